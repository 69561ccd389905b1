"""What one look at the requests that wait costs, counted in calls: times say little on a busy machine."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from benchmarks.load import core

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy, request_lines, schedule, shares
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName, QuotaKey

MOST_CALLS = 1_600


def test_one_look_at_many_requests_that_wait(capsys: pytest.CaptureFixture[str]) -> None:
    """A release is enough for one of 32 requests, each of another model, while 32 models are asked for memory.

    The shares are divided once. The host lends nothing: nobody waits there, so nothing is divided.
    """
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    release = core.crowd()
    sys.setprofile(count)
    try:
        release()
    finally:
        sys.setprofile(None)
    with capsys.disabled():
        print(f"\none look at the requests that wait: {calls.total():,} Python calls")
    assert calls["Shares.divide"] == 1, calls.most_common(20)
    assert calls.total() <= MOST_CALLS, calls.most_common(20)


GRANULE = 2 << 20


@pytest.mark.parametrize("answers", [False, True])
def test_one_look_asks_once_for_each_model_how_much_it_may_have(*, answers: bool) -> None:
    """A tenant's 240 requests, each of another size, are larger than what is free. Behind them small ones have room."""
    broker = Broker(policy.Rules(granularity=GRANULE, capacities={"device": 1_024 * GRANULE}), epoch=1)
    lender = joined(broker, 1, answers=False)
    lent = broker.step(ev.Allocate(100, lender, 100, name_of(1), "device", GRANULE, 1_024), 0).facts[0]
    for part in range(16):
        broker.step(ev.Made(lender, 100, part), 0)
        broker.step(ev.Acknowledge(lender, 100, part), 0)
    for number in range(16):
        session = joined(broker, 2, answers=answers)
        for count in range(16):
            size = 200 + 16 * number + count if number < 15 else 1
            call = 1_000 + 16 * number + count
            broker.step(ev.Allocate(call, session, call, name_of(2), "device", GRANULE, size, 10**10), 0)
    calls = Counter[str]()

    def count_calls(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(count_calls)
    try:
        facts = broker.step(ev.Release(400, lender, 400, tuple(range(lent.first, lent.first + 16))), 0).facts
    finally:
        sys.setprofile(None)
    granted = len(facts) - 1
    assert granted == 16
    looks = granted + 1
    assert calls["Admission.bound"] <= looks * 2, calls.most_common(10)
    assert calls["Line.fitting"] <= looks * 12, calls.most_common(10)
    assert calls["over"] <= looks, "a refusal is put into words that nobody reads"


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("more", [7, pytest.param(63, marks=[pytest.mark.deep, pytest.mark.timeout(1200)])])
def test_a_look_costs_nothing_for_each_request_that_waits(more: int, *, answers: bool) -> None:
    """An honest session borrows beside 256 requests of 16 models, and beside 2,048 or 16,384 of them."""
    most = {"max_sessions": 2_048, "max_sessions_per_process": 64}
    rules = policy.Rules(granularity=GRANULE, capacities={"device": 1_024 * GRANULE}, **most)
    broker = Broker(rules, epoch=1)
    lender, honest = joined(broker, 1, answers=answers), joined(broker, 2, answers=False)
    broker.step(ev.Allocate(100, lender, 100, name_of(1), "device", GRANULE, 1_000), 0)
    calls, number, costs = 0, 10_000, []

    def count_calls(_: FrameType, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for sessions in (1, more):
        for model in range(3, 19):
            for _ in range(sessions):
                session = joined(broker, model, answers=False)
                for request in range(16):
                    number += 1
                    size = 30 + number % 37
                    broker.step(
                        ev.Allocate(number, session, 100 + request, name_of(model), "device", GRANULE, size, 10**13), 0
                    )
        calls, number = 0, number + 1
        sys.setprofile(count_calls)
        try:
            broker.step(ev.Allocate(number, honest, number, name_of(2), "device", GRANULE, 1, 0), 0)
            broker.step(ev.InputsDrained(number), 0)
        finally:
            sys.setprofile(None)
        costs.append(calls)
    assert broker.waiting.of_location("device")[1] == 256 * (1 + more)
    line = 16 * (1 + more)
    assert costs[1] <= costs[0] + 3 * line, costs  # one line has a new request: all of its requests are looked at


@pytest.mark.parametrize("answers", [False, True])
def test_a_decision_costs_nothing_for_each_model_that_waits(*, answers: bool) -> None:
    """A release is enough for one request, beside 128 of as many models of four tenants, and beside 1,024."""
    rules = policy.Rules(
        granularity=GRANULE,
        capacities={"device": 1_024 * GRANULE},
        limits={("tenant3", "3-0", "device"): 512 * GRANULE, ("tenant4", None, "device"): 900 * GRANULE},
        guarantees={("tenant5", None, "device"): 2 * GRANULE},
        max_sessions=2_048,
        max_sessions_per_process=1_024,
        max_models_per_tenant=1_024,
    )
    broker = Broker(rules, epoch=1)
    lender = joined(broker, 1, answers=answers)
    lent = broker.step(ev.Allocate(100, lender, 100, name_of(1), "device", GRANULE, 1_022), 0).facts[0]
    for part in range(16):
        broker.step(ev.Made(lender, 100, part), 0)
        broker.step(ev.Acknowledge(lender, 100, part), 0)
    calls, costs, number, extent = 0, [], 1_000, lent.first

    def count_calls(_: FrameType, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for models in (128, 1_024):
        while number < 1_000 + models:
            tenant, number = 2 + number % 4, number + 1
            session, name = joined(broker, tenant, answers=False), ModelName(f"tenant{tenant}", f"{tenant}-{number}")
            broker.step(ev.RegisterModel(number, session, number, name, None, {}, False), 0)
            broker.step(ev.Allocate(10_000 + number, session, 1, name, "device", GRANULE, 1, 10**13), 0)
        most = []
        for _ in range(4):
            calls, number, extent = 0, number + 1, extent + 1
            sys.setprofile(count_calls)
            try:
                facts = broker.step(ev.Release(number, lender, number, (extent,)), 0).facts
            finally:
                sys.setprofile(None)
            assert len(facts) == 2, "one is granted"
            most.append(calls)
        costs.append(min(most))
    assert broker.waiting.of_location("device")[1] > 1_000
    assert costs[1] <= costs[0] + 2_000, costs  # 256 models at most have holds


def calls_of_a_recall(models: int) -> tuple[int, int]:
    """Return the Python calls of the step that can recall for so many models of 16 tenants, and of the next release."""
    crowd = core.Core(models, max_sessions=2 * models)
    lender = crowd.open("lender", "m")
    lent = [crowd.allocate(*lender) for _ in range(models)]
    for number in range(models):
        crowd.allocate(*crowd.open(f"t{number % 16}", f"m{number}"), wait_ns=core.WAIT_NS)
    found = []

    def count_calls(_: FrameType, event: str, __: Any) -> None:
        found[-1] += event == "call"

    for event in (
        ev.RegisterModel(1 << 40, lender[0], 1 << 40, lender[1], None, {}, False, True),
        ev.Release(1 << 41, lender[0], 1 << 41, lent[0]),
    ):
        found.append(0)
        sys.setprofile(count_calls)
        try:
            effects = crowd.step(event)
        finally:
            sys.setprofile(None)
        assert any(isinstance(effect, fx.SendRecall | fx.Make) for effect in effects)
    return found[0], found[1]


def test_a_division_costs_nothing_for_models_without_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where recalls are possible one step divides the memory of all: beside 128 models that wait, and beside 1,024."""
    monkeypatch.setattr(request_lines, "MOST_SHARERS", 64)
    few, many = calls_of_a_recall(128), calls_of_a_recall(1_024)
    assert many[0] <= few[0] + 200, (few, many)
    assert many[1] <= few[1] + 200, (few, many)


def bytecodes_of(work: Callable[[], Any]) -> int:
    """Return how many bytecodes of Python some work takes: also loops that call nothing count."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_what_a_recall_looks_at_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that recalls for the models that wait, of 16 tenants, begins holds for 16 of 256, or of 2,048."""
    monkeypatch.setattr(request_lines, "MOST_SHARERS", 32)
    monkeypatch.setattr(schedule, "MOST_HELD", 16)
    costs = []
    for models in (256, 2_048):
        guarantees: dict[QuotaKey, int] = {
            (f"t{number}", None, "device"): models * GRANULE // 16 for number in range(16)
        }
        crowd = core.Core(models, guarantees, max_sessions=2 * models)
        lender = crowd.open("lender", "m", answers=True)
        lent = [crowd.allocate(*lender) for _ in range(models)]
        crowd.step(ev.RegisterModel(1 << 40, lender[0], 1 << 40, lender[1], None, {}, False, False))
        for number in range(models):
            crowd.allocate(*crowd.open(f"t{number % 16}", f"m{number}"), wait_ns=core.WAIT_NS)
        answers = ev.RegisterModel(1 << 41, lender[0], 1 << 41, lender[1], None, {}, False, True)
        crowd.step(answers)
        (recall,) = crowd.broker.books.recallable.recalls.values()
        crowd.step(ev.AnswerRecall(lender[0], recall.number, recall.size))
        crowd.now += 10**11
        assert lent
        costs.append(bytecodes_of(lambda: crowd.step(ev.Elapsed())))  # noqa: B023 - it is called at once
        assert crowd.broker.books.recallable.recalls, "it is asked again"
    assert costs[1] <= 1.1 * costs[0], costs


def test_those_have_a_share_that_have_waited_longest_of_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tenant has at most as many as any other, 12 in all. Each model that gains or loses its share is told."""
    monkeypatch.setattr(request_lines, "MOST_SHARERS", 12)
    chance, told = random.Random(36), set[ModelName]()
    sharers, waiting = request_lines.Sharers(told.add), dict[ModelName, None]()
    before = set[ModelName]()
    for number in range(20_000):
        growing = number % 2_000 < 1_000
        if chance.random() < (0.6 if growing else 0.4) or not waiting:
            one = ModelName(f"t{chance.randrange(1 + number % 7 * 3)}", str(number))
            waiting[one] = None
            sharers.add(one)
        else:
            one = chance.choice(list(waiting))
            del waiting[one]
            sharers.remove(one)
            sharers.remove(one)
        by_tenant: dict[str, list[ModelName]] = {}
        for name in waiting:
            by_tenant.setdefault(name.tenant, []).append(name)
        each = max(
            [each for each in range(1, 13) if sum(min(each, len(own)) for own in by_tenant.values()) <= 12], default=1
        )
        after = {name for own in by_tenant.values() for name in own[:each]}
        assert {name for name in waiting if name in sharers} == after
        assert (before ^ after) - {one} <= told <= (before ^ after) | {one}
        before = after
        told.clear()


def test_all_are_served_although_few_have_a_share_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 models of three tenants wait. A guarantee needs no share; the others are recalled for and served in turns."""
    monkeypatch.setattr(request_lines, "MOST_SHARERS", 4)
    key = ("t2", "guaranteed", "device")
    crowd = core.Core(44, {key: 4 * GRANULE}, recall_ns=10**12)
    lender, name = crowd.open("lender", "m", answers=True)
    lent = [one for _ in range(44) for one in crowd.allocate(lender, name)]
    waiting = {crowd.open(f"t{number % 3}", f"m{number}") for number in range(30)}
    for session, model in waiting:
        assert not crowd.allocate(session, model, wait_ns=core.WAIT_NS)
    first = crowd.open("t2", "guaranteed")
    assert not crowd.allocate(*first, 4 * GRANULE, wait_ns=core.WAIT_NS)
    granted: list[int] = []
    for _ in range(44):
        if len(granted) == 31:
            break
        for effect in crowd.release(lender, (lent.pop(),)):
            if isinstance(effect, fx.Make):
                granted.append(effect.session)
                crowd.step(ev.Made(effect.session, effect.request_id, effect.part))
                crowd.step(ev.Acknowledge(effect.session, effect.request_id, effect.part))
    assert granted[0] == first[0]
    assert set(granted[1:]) == {session for session, _ in waiting}
    asked = sum(one.left for one in crowd.broker.books.recallable.recalls.values())
    assert len(lent) == 10, "each of the four tenants has a quarter of what is not guaranteed"
    assert not asked, "nobody is lacking anything"


@pytest.mark.parametrize("unlent", [False, True])
def test_a_look_at_a_tenant_does_not_add_up_the_guarantees_of_all(*, unlent: bool) -> None:
    """A release is enough for one request, beside those of as many tenants with guarantees: of 16, and of 128."""
    costs = []
    for tenants in (16, 128):
        names = [f"t{number}" for number in range(tenants)]
        guarantees: dict[QuotaKey, int] = {(name, None, "device"): 2 * GRANULE for name in names}
        more = {"guarantees": guarantees, "unlent": frozenset(names[1:] if unlent else ())}
        capacity = {"device": 4 * tenants * GRANULE}
        crowd = core.Core(4 * tenants)
        crowd.broker = Broker(policy.Rules(GRANULE, capacity, max_sessions=4 * tenants, **more), 1)
        lender = crowd.open("lender", "m", answers=True)
        lent = [ids for _ in range(4 * tenants) if (ids := crowd.allocate(*lender))]
        assert lent
        for name in names:
            session, model = crowd.open(name, "m")
            crowd.allocate(session, model, 8 * GRANULE, wait_ns=core.WAIT_NS)
        calls = Counter[str]()

        def count_calls(frame: FrameType, event: str, _: Any, calls: Counter[str] = calls) -> None:
            if event == "call":
                calls[frame.f_code.co_qualname] += 1

        sys.setprofile(count_calls)
        try:
            crowd.release(lender[0], lent[0])
        finally:
            sys.setprofile(None)
        costs.append(calls.total())
    assert costs[1] <= 10 * costs[0], costs


def test_models_that_nobody_uses_end_in_portions() -> None:
    """600 models have no session any more; those before them are charged for what a dead process had."""
    crowd = core.Core(1_024, max_sessions=2_048, max_models_per_tenant=2_048, settle_ns=10**15)
    seen = {"device": 1_024 * GRANULE}
    left = [crowd.open("t", f"m{number}") for number in range(900)]
    for session, name in left[:300]:
        crowd.allocate(session, name)
    for session, _ in left:
        crowd.step(ev.ProcessDied(session, seen))
    models = []
    for _ in range(4):
        crowd.now += 100 * 10**9
        crowd.step(ev.Audit(seen))
        models.append(len(crowd.broker.ledger.models))
    assert models == [900 - 256, 900 - 512, 300, 300]


def test_declarations_that_waited_are_granted_by_shares_of_one_division(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release has room for 8 declarations that were put aside, each of another model, while a request waits."""
    divisions, divide = Counter[str](), shares.Shares.divide

    def counted(self: shares.Shares, *arguments: Any, **named: Any) -> Any:
        divisions["all"] += 1
        return divide(self, *arguments, **named)

    monkeypatch.setattr(shares.Shares, "divide", counted)
    broker = Broker(policy.Rules(granularity=GRANULE, capacities={"device": 64 * GRANULE}), epoch=1)
    lender = joined(broker, 1, answers=True)
    lent = broker.step(ev.Allocate(100, lender, 100, name_of(1), "device", GRANULE, 64, 0, False, 0), 0).facts[0]
    broker.step(ev.Made(lender, 100, 0), 0)
    broker.step(ev.Acknowledge(lender, 100, 0), 0)
    waiting, *declaring = [(number, joined(broker, number, answers=False)) for number in range(2, 11)]
    for number, session in declaring:
        call = ev.Declare(200 + number, session, 200, name_of(number), "device", GRANULE)
        assert broker.step(call, 0).effects == [fx.DrainInputs(200 + number)], "it is put aside until all input is read"
    number, session = waiting
    call = ev.Allocate(300, session, 300, name_of(number), "device", GRANULE, 24, 10**10, False, 0)
    broker.step(call, 0)
    divisions.clear()
    answers = broker.step(ev.Release(400, lender, 400, tuple(range(lent.first, lent.first + 16))), 0).effects
    assert sum(getattr(one, "call", None) in range(203, 211) for one in answers) == 8
    assert divisions["all"] <= 2


def name_of(number: int) -> ModelName:
    return ModelName(f"tenant{number}", "model")


def joined(broker: Broker, number: int, *, answers: bool) -> int:
    """Return a session of a tenant of its own, with a model."""
    opened = ev.OpenSession(number, name_of(number).tenant, 0, 0, f"process {number}", False, "token")
    session: int = broker.step(opened, 0).effects[0].result.session  # type: ignore[attr-defined]
    broker.step(ev.RegisterModel(number, session, number, name_of(number), None, {}, False, answers), 0)
    return session
