"""What one look at the requests that wait costs, counted in calls: times say little on a busy machine."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
from benchmarks.load import core
from tests.support.calls import calls_of, lines_of
from tests.support.honest_worker import State

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy, recallable, request_lines, schedule, shares, waiting
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName, QuotaKey

MOST_CALLS_OF_A_STEP = 50_000


GRANULE = 2 << 20


@pytest.mark.parametrize("answers", [False, True])
def test_one_look_asks_once_for_each_model_how_much_it_may_have(*, answers: bool) -> None:
    """A tenant's 240 requests, each of another size, are larger than what is free. Behind them small ones have room."""
    crowd = core.Core(1_024)
    lender = crowd.open("lender", "m")
    lent = [extent for _ in range(1_024) for extent in crowd.allocate(*lender)]
    for number in range(16):
        session, name = crowd.open("red", "m", answers=answers)
        for count in range(16):
            size = 200 + 16 * number + count if number < 15 else 1
            assert not crowd.allocate(session, name, size * GRANULE, wait_ns=core.WAIT_NS)
    effects = list[Any]()
    calls = calls_of(lambda: effects.extend(crowd.release(lender[0], tuple(lent[:16]))))
    assert sum(isinstance(one, fx.Make) for one in effects) == 16
    looks = 17
    assert calls["Admission.bound"] <= looks * 2, calls.most_common(10)
    assert calls["Line.fitting"] <= looks * 12, calls.most_common(10)
    assert calls["over"] <= looks, "a refusal is put into words that nobody reads"


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("more", [7, pytest.param(63, marks=[pytest.mark.deep, pytest.mark.timeout(1200)])])
def test_a_look_costs_nothing_for_each_request_that_waits(more: int, *, answers: bool) -> None:
    """An honest session borrows beside 256 requests of 16 models, and beside 2,048 or 16,384 of them."""
    crowd = core.Core(1_024, max_sessions=2_048)
    crowd.allocate(*crowd.open("lender", "m", answers=answers), 1_000 * GRANULE)
    honest, costs, sizes = crowd.open("honest", "m"), list[int](), itertools.count()
    for sessions in (1, more):
        for one in [crowd.open(f"t{model}", "m") for model in range(16) for _ in range(sessions)]:
            for _ in range(16):
                assert not crowd.allocate(*one, (30 + next(sizes) % 37) * GRANULE, wait_ns=core.WAIT_NS)
        costs.append(calls_of(lambda: crowd.allocate(*honest)).total())
    assert crowd.broker.waiting.of_location("device")[1] == 256 * (1 + more)
    line = 16 * (1 + more)
    assert costs[1] <= costs[0] + 3 * line, costs  # one line has a new request: all of its requests are looked at


@pytest.mark.parametrize("answers", [False, True])
def test_a_decision_costs_nothing_for_each_model_that_waits(*, answers: bool) -> None:
    """A release is enough for one request, beside 128 of as many models of four tenants, and beside 1,024."""
    limits: dict[QuotaKey, int] = {("t1", "m1", "device"): 512 * GRANULE, ("t2", None, "device"): 900 * GRANULE}
    guarantees: dict[QuotaKey, int] = {("t3", None, "device"): 2 * GRANULE}
    crowd = core.Core(1_024, guarantees, limits=limits, max_sessions=2_048, max_models_per_tenant=1_024)  # type: ignore[arg-type]
    lender = crowd.open("lender", "m", answers=answers)
    lent = [crowd.allocate(*lender) for _ in range(1_022)]
    costs, models = list[int](), 0
    for count in (128, 1_024):
        while models < count:
            crowd.allocate(*crowd.open(f"t{models % 4}", f"m{models}"), wait_ns=core.WAIT_NS)
            models += 1
        most = []
        for _ in range(4):
            while crowd.broker.deadline == 0:  # a look that an earlier step has left
                crowd.step(ev.Elapsed())
            effects = list[Any]()
            most.append(calls_of(lambda: effects.extend(crowd.release(lender[0], lent.pop()))).total())  # noqa: B023
            assert sum(isinstance(one, fx.Make) for one in effects) == 1
        costs.append(min(most))
    assert crowd.broker.waiting.of_location("device")[1] > 1_000
    assert costs[1] <= costs[0] + 2_000, costs  # 256 models at most have holds


def calls_of_a_recall(models: int) -> tuple[int, int]:
    """Return the Python calls of the step that can recall for so many models of 16 tenants, and of the next release."""
    crowd = core.Core(models, max_sessions=2 * models)
    lender = crowd.open("lender", "m")
    lent = [crowd.allocate(*lender) for _ in range(models)]
    for number in range(models):
        crowd.allocate(*crowd.open(f"t{number % 16}", f"m{number}"), wait_ns=core.WAIT_NS)
    found = []
    for event in (
        ev.RegisterModel(1 << 40, lender[0], 1 << 40, lender[1], None, {}, False, True),
        ev.Release(1 << 41, lender[0], 1 << 41, lent[0]),
    ):
        effects = list[Any]()
        found.append(calls_of(lambda: effects.extend(crowd.step(event))).total())  # noqa: B023 - it is called at once
        assert any(isinstance(effect, fx.SendRecall | fx.Make) for effect in effects)
        while crowd.broker.deadline == 0:  # a look that the step has left
            crowd.step(ev.Elapsed())
    return found[0], found[1]


def test_a_division_costs_nothing_for_models_without_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where recalls are possible one step divides the memory of all: beside 128 models that wait, and beside 1,024."""
    monkeypatch.setattr(request_lines, "MOST_SHARERS", 64)
    few, many = calls_of_a_recall(128), calls_of_a_recall(1_024)
    assert many[0] <= few[0] + 200, (few, many)
    assert many[1] <= few[1] + 200, (few, many)


def charged_models(models: int) -> tuple[core.Core, tuple[int, ModelName]]:
    """Return a core with so many models of 16 guaranteed tenants, a page each, and the session that alone answers.

    Nothing is free, and another tenant waits for more than its share.
    """
    guarantees: dict[QuotaKey, int] = {(f"t{number}", None, "device"): GRANULE for number in range(16)}
    crowd = core.Core(models + 1, guarantees, max_sessions=2 * models)
    answering = crowd.open("other", "m", answers=True)
    for one in (answering, *[crowd.open(f"t{number % 16}", f"m{number}") for number in range(models)]):
        assert crowd.allocate(*one)
    assert not crowd.allocate(*crowd.open("waiting", "m"), 64 * GRANULE, wait_ns=core.WAIT_NS)
    return crowd, answering


_calls = itertools.count(1 << 42)


def refused(crowd: core.Core, session: int, name: ModelName, size: int) -> Counter[str]:
    """Return the calls that the refusal of a request takes."""
    call = next(_calls)
    request = ev.Allocate(call, session, call, name, "device", size, 1, 0)
    calls = calls_of(lambda: crowd.step(request)) + calls_of(lambda: crowd.step(ev.InputsDrained(call)))
    assert crowd.broker.waiting.tenant_of(call) == ""
    return calls


def test_whether_recalls_are_possible_can_change_without_a_division_of_all() -> None:
    """The only session that answers recalls says that it does not, and that it does, and is refused each time."""
    costs = []
    for models in (128, 1_024):
        crowd, (session, name) = charged_models(models)
        found = []
        for number in range(6):
            call = (1 << 40) + number
            answers = ev.RegisterModel(call, session, call, name, None, {}, False, number % 2 == 1)
            calls = calls_of(lambda: crowd.step(answers))  # noqa: B023 - it is called at once
            found.append((calls + refused(crowd, session, name, 8 * GRANULE)).total())
        costs.append(max(found[2:]))
    assert costs[1] <= costs[0] + 200, costs


def test_what_is_not_asked_for_is_not_forgotten() -> None:
    """A tenant begins and leaves 2,100 models while nobody waits. The refusal after that looks at portions."""
    crowd, (session, name) = charged_models(2_048)
    for request in crowd.broker.waiting.waiters():
        crowd.step(ev.CancelWait(request.event.call))
    crowd.now += 10**10
    crowd.step(ev.Elapsed())
    refused(crowd, session, name, GRANULE)
    for number in range(2_100):
        call, other = (1 << 40) + 2 * number, ModelName(name.tenant, f"x{number}")
        crowd.step(ev.RegisterModel(call, session, call, other, None, {}, False))
        crowd.step(ev.UnregisterModel(call + 1, session, call + 1, other))
    assert refused(crowd, session, name, GRANULE)["Shares._model"] <= 4 * (shares.PORTION + 1)


def test_a_recall_looks_once_at_each_model() -> None:
    """A request is refused, and 512 models of 16 tenants could be asked for what it lacks."""
    crowd = core.Core(512, max_sessions=1_024)
    lent = [crowd.allocate(*crowd.open(f"t{number % 16}", f"m{number}", answers=True)) for number in range(512)]
    assert all(lent)
    calls = refused(crowd, *crowd.open("red", "m"), 2 * GRANULE)
    assert len(crowd.broker.books.recallable.recalls) >= 2
    assert calls["Recallable.asked_of_model"] <= 512 + 64, calls.most_common(10)


def test_where_all_keep_what_they_have_no_shares_without_them_are_worked_out() -> None:
    """16 tenants are late for recalls, and nobody else has anything that can be recalled: nobody would be asked."""
    crowd = core.Core(256, max_sessions=512)
    lent = [crowd.allocate(*crowd.open(f"t{number % 16}", f"m{number}", answers=True)) for number in range(256)]
    assert all(lent)
    session, name = crowd.open("red", "m")
    recallable = crowd.broker.books.recallable
    for size in range(2, 40):
        refused(crowd, session, name, size * GRANULE)
        crowd.now += 10**10
        crowd.step(ev.Elapsed())
    assert recallable.models("device")
    assert len(recallable.keepers("device")) == 256
    calls = refused(crowd, session, name, GRANULE)
    assert calls["Schedule._ask_for"] == 1, "nothing was recalled"
    assert calls["Shares._model"] <= 16, calls.most_common(10)


@pytest.mark.parametrize("guaranteed", [False, True])
def test_a_step_looks_once_at_each_of_many_tenants(monkeypatch: pytest.MonkeyPatch, *, guaranteed: bool) -> None:
    """64 tenants wait, as if they were 1,024: no step looks at one twice, also if it recalls memory or grants some."""
    tenants = [f"t{number}" for number in range(64)]
    guarantees: dict[QuotaKey, int] = {(tenant, None, "device"): GRANULE for tenant in tenants if guaranteed}
    crowd = core.Core(128, guarantees, max_sessions=128)
    lender = crowd.open("lender", "m", answers=True)
    lent = [ids for _ in range(128) if (ids := crowd.allocate(*lender))]
    crowd.step(ev.RegisterModel(1 << 40, lender[0], 1 << 40, lender[1], None, {}, False, False))
    sessions = [crowd.open(tenant, "m") for tenant in tenants]
    for session, model in sessions:
        assert not crowd.allocate(session, model, 2 * GRANULE, wait_ns=core.WAIT_NS)
    monkeypatch.setattr(waiting, "MOST_LOOKS", 64)
    looks, divisions, made = [], [], list[int]()

    def counted(event: ev.Event) -> None:
        effects = list[Any]()
        calls = calls_of(lambda: effects.extend(crowd.step(event)))
        looks.append(calls["Schedule._look"])
        divisions.append(calls["Shares.divide"])
        for one in effects:
            if isinstance(one, fx.Make):
                made.append(one.session)
                crowd.step(ev.Made(one.session, one.request_id, one.part))

    for event in (
        ev.RegisterModel(1 << 41, lender[0], 1 << 41, lender[1], None, {}, False, True),
        *[ev.Release(1 << 42, lender[0], (1 << 42) + number, ids) for number, ids in enumerate(lent[:16])],
    ):
        counted(event)
        while crowd.broker.deadline == 0:
            counted(ev.Elapsed())
    assert made == [session for session, _ in sessions[: len(made)]]
    assert len(made) == 8
    assert max(looks) == 64, "each is looked at once in a step"
    assert max(divisions) <= 2, "once more after the holds have begun"


def test_a_look_costs_nothing_for_each_model_that_keeps_what_it_is_asked_for() -> None:
    """32 models of a tenant are marked and wait: a step looks at them as at one."""
    crowd = core.Core(64, {("red", None, "device"): 64 * GRANULE})
    red = crowd.open("red", "m")
    keepers = [crowd.open("blue", f"m{number}", answers=True) for number in range(32)]
    lent = [crowd.allocate(*keeper, 2 * GRANULE) for keeper in keepers]
    asked = list[Any]()

    def asked_by(event: ev.Event) -> None:
        asked.extend(effect for effect in crowd.step(event) if isinstance(effect, fx.SendRecall))

    asked_by(ev.Allocate(1 << 40, red[0], 1 << 40, red[1], "device", 64 * GRANULE, 1, core.WAIT_NS))
    for recall in asked:  # more are asked as these keep everything
        asked_by(ev.AnswerRecall(recall.session, recall.recall, 0))
    state = crowd.broker.books.recallable
    assert all(state.is_marked(name, "device") for _, name in keepers)
    for keeper in keepers:
        assert not crowd.allocate(*keeper, wait_ns=core.WAIT_NS)
    calls = calls_of(lambda: crowd.release(keepers[0][0], lent[0]))
    assert 1 <= calls["Schedule._look"] <= 4, calls.most_common(10)


@pytest.mark.parametrize("waits", [128, pytest.param(16_384, marks=[pytest.mark.deep, pytest.mark.timeout(1200)])])
def test_no_step_of_the_worst_mix_has_more_than_so_many_calls(state: State, waits: int) -> None:
    """As many requests of as many models of 16 tenants wait; 60 models are recalled, answer, and release.

    It is 23,000 from 1,024 waits on. A call takes up to a microsecond, with what it does itself.
    """
    crowd = core.Core(2 * waits, max_sessions=2 * waits, max_models_per_tenant=waits, max_waiting_per_tenant=waits)
    lenders = [crowd.open("lender", f"m{number}") for number in range(60)]
    lent = [[crowd.allocate(*one, 2 * waits // 64 * GRANULE)] for one in lenders]
    rest = crowd.open("rest", "m")
    assert crowd.allocate(*rest, 4 * (2 * waits // 64) * GRANULE)
    for number in range(waits):
        assert not crowd.allocate(*crowd.open(f"t{number % 16}", f"m{number}"), wait_ns=core.WAIT_NS)
    calls, asked = list[int](), dict[int, int]()

    def counted(event: ev.Event) -> None:
        effects = list[Any]()
        calls.append(calls_of(lambda: effects.extend(crowd.step(event))).total())
        for one in effects:
            if isinstance(one, fx.SendRecall):
                asked[one.session] = one.recall
            if isinstance(one, fx.Make):
                calls.append(calls_of(partial(crowd.step, ev.Made(one.session, one.request_id, one.part))).total())
        for _ in range(64):
            if crowd.broker.deadline != 0:
                break
            counted(ev.Elapsed())

    for number, (session, name) in enumerate(lenders):
        counted(ev.RegisterModel(1 << 40, session, (1 << 40) + number, name, None, {}, False, True))
    assert len(asked) > 1
    for number, (session, _) in enumerate(lenders):
        counted(ev.Release(1 << 41, session, (1 << 41) + number, lent[number][0]))
        if session in asked:
            counted(ev.AnswerRecall(session, asked[session], GRANULE))
    crowd.now += 10**10
    counted(ev.Elapsed())
    state("most calls of a step", f"{max(calls):,}")
    assert max(calls) <= MOST_CALLS_OF_A_STEP


def guests_of(crowd: core.Core, tenant: str, count: int, size: int = GRANULE) -> list[Any]:
    """Let a session of a tenant declare so much for each of so many models, recallably. Return the answers."""
    session, first = crowd.open(tenant, "0", answers=True)
    answers = []
    for number in range(count):
        name = ModelName(tenant, str(number))
        if name != first:
            crowd.step(ev.RegisterModel(1 << 41, session, (1 << 41) + number, name, None, {}, False, True))
        declared = crowd.step(ev.Declare(1 << 42, session, (1 << 42) + number, name, "device", size, True))
        answers += [one.result for one in declared if isinstance(one, fx.Answer)]
    return answers


def test_a_tenant_with_many_guests_costs_others_nothing() -> None:
    """Another tenant borrows and releases beside one guest, and beside as many as a tenant may have."""
    costs = []
    for count in (1, recallable.MOST_GUESTS_OF_A_TENANT):
        crowd = core.Core(1_024)
        guests_of(crowd, "guests", count)
        session, name = crowd.open("other", "m")
        costs.append(calls_of(lambda: crowd.release(session, crowd.allocate(session, name))).total())  # noqa: B023
        assert len(crowd.broker.books.recallable.guests) == count
    assert costs[1] <= costs[0] + 10, costs


def test_guests_are_bounded() -> None:
    """A tenant has 64 at a location, and all together have 256, also if they resume. One that goes is no new one."""
    most, each = recallable.MOST_GUESTS, recallable.MOST_GUESTS_OF_A_TENANT
    crowd = core.Core(1_024)
    answers = guests_of(crowd, "greedy", each + 1)
    assert [isinstance(one, Denied) for one in answers] == [False] * each + [True]
    assert not any(isinstance(one, Denied) for one in guests_of(crowd, "greedy", 1, 0)), "nothing is always declared"
    for number in range(most // each):
        last = guests_of(crowd, f"t{number}", each)
    guests = crowd.broker.books.recallable.guests
    assert len(guests) == most
    refused = [one for one in last if isinstance(one, Denied)]
    assert [(one.reason, one.numbers["whose"]) for one in refused] == [(Reason.TOO_MANY_REQUESTS, "broker")] * each
    session, name = crowd.open("late", "m", answers=True)
    crowd.step(ev.Declare(1 << 43, session, 1 << 43, name, "device", GRANULE))
    crowd.step(ev.ConnectionLost(session))
    crowd.broker.recalls.resumed(session, frozenset((name,)), {(name, "device")}, (), crowd.now)
    assert len(guests) == most


def test_guests_are_counted_once_in_a_step() -> None:
    """The slices of 64 guests end at once, half of them are recalled, and their session comes back."""
    most = recallable.MOST_GUESTS_OF_A_TENANT
    crowd = core.Core(most, slice_ns=10**9)
    guests_of(crowd, "guests", most)
    crowd.now += 10**10
    calls = [calls_of(lambda: crowd.step(ev.Elapsed()))]
    other = crowd.open("other", "m")
    calls.append(calls_of(lambda: crowd.allocate(*other, most // 2 * GRANULE, wait_ns=core.WAIT_NS)))
    state = crowd.broker.books.recallable
    assert len(state.guests) == most
    assert len(state.recalls) == most // 2
    (session,) = {borrower.session for borrower in state.guests}
    names = frozenset(borrower.name for borrower in state.guests)
    calls.append(calls_of(lambda: crowd.step(ev.ConnectionLost(session))))
    places = {(name, "device") for name in names}
    calls.append(calls_of(lambda: crowd.broker.recalls.resumed(session, names, places, (), crowd.now)))
    found = [one["Recallable.that_can_go"] for one in calls]
    assert max(found) <= 10, found


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
        costs.append(lines_of(partial(crowd.step, ev.Elapsed())).total())
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
        costs.append(calls_of(partial(crowd.release, lender[0], lent[0])).total())
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
