"""Shares: the division in whole granules against its definition, and what every division keeps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import budget
from tests.simulation.shares import fill as fill_by_definition
from tests.support.calls import calls_of
from tests.support.seeds import chosen_seed
from tests.support.sizes import MIB

from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.core.admission import Admission
from membrokerd.core.ledger import Ledger
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName
from membrokerd.core.recallable import Recallable
from membrokerd.core.shares import Item, Shares, fill

GRANULE = 2
SIZES = st.integers(0, 500).map(lambda size: 2 * size)
ITEMS = st.builds(
    lambda weight, low, more: Item(weight, low, low + more), st.sampled_from([0, 1, 1, 2, 3, 1_000]), SIZES, SIZES
)


@budget(100)
@given(st.integers(-100, 5_000), st.lists(ITEMS, max_size=12))
def test_a_division_is_the_defined_one(room: int, items: list[Item]) -> None:
    """Nothing is given twice, nothing wanted is left over, and each part is the defined one to a granule or two."""
    sizes = fill(room, items, GRANULE)
    exact = fill_by_definition(room, [item[:3] for item in items])
    for size, should, item in zip(sizes, exact, items, strict=True):
        assert item.low <= size <= item.high
        assert abs(size - should) <= 2 * GRANULE
    least, most = sum(item.low for item in items), sum(item.high for item in items)
    assert sum(sizes) <= max(room, least)
    assert sum(sizes) > min(room, most) - GRANULE


def test_tenants_are_divided_before_their_models() -> None:
    """A tenant with many models gets no more than one with one; a guarantee is out of the division."""
    ledger = Ledger({"device": 100 * MIB})
    rules = policy.Rules(
        granularity=2 * MIB,
        capacities={"device": 100 * MIB},
        limits={("c", None, "device"): 8 * MIB},
        guarantees={("g", "m", "device"): 12 * MIB},
    )
    names = [
        ModelName("a", "m"),
        *(ModelName("b", f"m{i}") for i in range(8)),
        ModelName("c", "m"),
        ModelName("g", "m"),
    ]
    for name in names:
        ledger.apply(ft.ModelBegan(name, None, {}))
    recallable = Recallable(ledger)
    admission = Admission(ledger, rules, recallable)
    division = Shares(ledger, rules, admission, recallable, is_possible=False)
    shares = division.divide("device", dict.fromkeys(names[:-1], 60 * MIB))
    assert shares[names[0]] == 40 * MIB
    assert [shares[name] for name in names[1:9]] == [6 * MIB] * 4 + [4 * MIB] * 4
    assert (shares[names[9]], shares[names[10]]) == (8 * MIB, 12 * MIB)
    assert sum(shares.values()) == 100 * MIB
    division.divide("device")
    assert not calls_of(lambda: division.divide("device"))["fill"], "nothing has changed"


def test_what_can_be_had_is_bounded_by_the_limit() -> None:
    """A model whose limit is 0 can have nothing, also while others wait and shares are divided."""
    rules = policy.Rules(granularity=2 * MIB, capacities={"device": 8 * MIB}, limits={("t", "z", "device"): 0})
    broker = Broker(rules, epoch=1)
    opened = broker.step(ev.OpenSession(1, "t", 1, 1, "p", False, "test"), 0).effects[0]
    session, name, none = opened.result.session, ModelName("t", "m"), ModelName("t", "z")
    for request, model in enumerate((name, none), 1):
        broker.step(ev.RegisterModel(1 + request, session, request, model, None, {}, False), 0)
    broker.step(ev.Allocate(4, session, 3, name, "device", 2 * MIB, 3), 0)
    broker.step(ev.Allocate(5, session, 4, name, "device", 2 * MIB, 2, wait_ns=10**9), 0)
    assert broker.waiting.of_model(name, "device") == (4 * MIB, 1)
    assert broker.waiting.share(none, "device") == (0, 0)
    assert broker.waiting.share(name, "device") == (8 * MIB, 2 * MIB)


def _borrowers(chance: random.Random, least: int, answering: float) -> tuple[Broker, policy.Rules, list[ModelName]]:
    """Models of two tenants that have borrowed and declared. Limits, guarantees and declarations may be odd sizes.

    A tenant's limit is more than 1/`least` of the memory; 0: anything. `answering` is the chance that a session answers
    recalls.
    """

    def size(least: int, most: int) -> int:
        return max(0, chance.randint(least, most) * 2 * MIB - chance.choice((0, 0, 0, 1, MIB)))

    capacity = chance.randint(4, 24)
    names = [ModelName(chance.choice("ab"), f"m{i}") for i in range(chance.randint(2, 5))]
    models = [(*name, "device") for name in names]
    tenants = [("a", None, "device"), ("b", None, "device")]
    rules = policy.Rules(
        granularity=2 * MIB,
        capacities={"device": capacity * 2 * MIB},
        limits={
            key: size(0 if key[1] or not least else capacity // least + 1, capacity)
            for key in models + tenants
            if chance.random() < 0.25
        },
        guarantees={key: size(0, capacity // 10) for key in models if chance.random() < 0.2},
        weights={key: chance.choice((0, 1, 2, 3, 3, 7)) for key in models + tenants if chance.random() < 0.5},
    )
    broker = Broker(rules, epoch=1)
    for call, name in enumerate(names):
        opened = broker.step(ev.OpenSession(4 * call, name.tenant, 1, 1, "p", False, "test"), 0).effects[0]
        session = opened.result.session
        broker.step(ev.RegisterModel(4 * call + 1, session, 1, name, None, {}, False, chance.random() < answering), 0)
        if count := chance.randint(0, capacity // 2):
            broker.step(ev.Allocate(4 * call + 2, session, 2, name, "device", 2 * MIB, count), 0)
        if chance.random() < 0.2:
            broker.step(ev.Declare(4 * call + 3, session, 3, name, "device", size(1, 2)), 0)
    return broker, rules, names


@pytest.mark.parametrize(
    ("worlds", "least", "answering"),
    [
        (600, 2, 0.7),
        *(pytest.param(3_000, least, chance, marks=pytest.mark.deep) for least, chance in ((2, 0.7), (0, 0), (0, 0.7))),
    ],
)
def test_a_model_that_wants_more_has_no_smaller_share(worlds: int, least: int, answering: float) -> None:
    """A hold that makes a model want more takes nothing of its share, and all shares fit in the memory.

    A limit that leaves no room for the guarantees bounds the shares, as far as memory is not firm.
    """
    chance = random.Random(chosen_seed())
    for number in range(worlds):
        broker, rules, names = _borrowers(chance, least=least, answering=answering)
        admission, ledger = broker.books.admission, broker.ledger
        recallable = broker.books.recallable
        divide = Shares(ledger, rules, admission, recallable, is_possible=recallable.is_possible).divide
        wanted = {name: chance.choice((0, chance.randint(0, 6))) * 2 * MIB for name in names}
        shares = divide("device", wanted)
        assert sum(shares.values()) <= rules.capacities["device"], f"world {number}"
        for tenant in {name.tenant for name in names}:
            firm = sum(admission.firm(name, "device") for name in names if name.tenant == tenant)
            limit = rules.limits.get((tenant, None, "device"), rules.capacities["device"])
            assert sum(size for name, size in shares.items() if name.tenant == tenant) <= max(firm, limit), number
        for name in names:
            more = divide("device", {**wanted, name: wanted[name] + chance.randint(1, 6) * 2 * MIB})
            assert more.get(name, 0) >= shares.get(name, 0), f"world {number}, {name}"
            assert least == 0 or sum(more.values()) <= rules.capacities["device"]
