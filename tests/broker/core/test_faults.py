"""Faults that the core once had, each as the shortest story that shows it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from membrokerd.core import books, policy, waiting
from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core.denied import Denied, Reason, deny
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName, QuotaKey, SegmentName

MODEL = ModelName("t", "m")
SEGMENT = SegmentName("t", "m", "s")
PACKET = 64 * 2
"""Bytes of a whole packet of extents of 2 bytes."""


class Story:
    """A broker of 4096 bytes; `answers` are all that it gave, by call. Sessions are numbered by `open`."""

    def __init__(self) -> None:
        self.broker = Broker(policy.Rules(granularity=2, capacities={"device": 4096}), epoch=1)
        self.answers: dict[int, Any] = {}
        self.asked = 0
        self.now = 0

    def tell(self, event: ev.Event) -> None:
        for effect in self.broker.step(event, self.now).effects:
            if isinstance(effect, fx.Answer):
                self.answers[effect.call] = effect.result

    def call(self) -> int:
        self.asked += 1
        return self.asked

    def open(self, tenant: str = "t") -> int:
        """Open a session and let it register t/m (a stranger's is refused)."""
        call = self.call()
        self.tell(ev.OpenSession(call, tenant, 1, 1, str(call), False, "story"))
        session: int = self.answers[call].session
        self.tell(ev.RegisterModel(self.call(), session, 1, MODEL, None, {}, False))
        return session

    def allocate(self, session: int, count: int, request_id: int = 2) -> int:
        call = self.call()
        self.tell(ev.Allocate(call, session, request_id, MODEL, "device", 2, count))
        return call

    def made(self, session: int, part: int = 0) -> None:
        self.tell(ev.Made(session, 2, part))

    def create(self, session: int, size: int) -> int:
        """Create the segment t/m/s by request 2, and return its generation."""
        self.tell(ev.CreateSegment(self.call(), session, 2, SEGMENT, "device", size))
        return self.broker.ledger.labels[SEGMENT]

    def write(self, session: int, size: int) -> int:
        """As `create`, whole and delivered."""
        segment = self.create(session, size)
        self.made(session)
        self.tell(ev.Acknowledge(session, 2, 0))
        return segment

    def releasing(self) -> int:
        return self.broker.ledger.totals["device"].releasing


@pytest.fixture
def story() -> Story:
    return Story()


def test_a_fall_after_the_limit_settles_no_other(story: Story) -> None:
    """Forked children keep two dead parents' memory; one is credited by the limit, and then its child ends.

    That fall belongs to bytes that were paid for already; the other parent's child still holds its own.
    """
    first, second = story.open(), story.open()
    for session in (first, second):
        story.allocate(session, 64)
        story.made(session)
        story.tell(ev.Acknowledge(session, 2, 0))
    story.tell(ev.Audit({"device": 2 * PACKET}))
    story.tell(ev.ProcessDied(first, {"device": 2 * PACKET}))
    story.now = 5_000_000_000
    story.tell(ev.ProcessDied(second, {"device": 2 * PACKET}))
    story.now = 10_000_000_000
    story.tell(ev.Audit({"device": 2 * PACKET}))
    if story.releasing() != PACKET:
        pytest.fail("the first is to be credited by the limit, and the second not")
    story.tell(ev.Audit({"device": PACKET}))
    assert story.releasing() == PACKET


def test_refusals_are_counted_at_a_model_that_is_there_and_end_with_it(story: Story) -> None:
    """Each name that a worker makes up would otherwise stay in the broker's memory for good."""
    session = story.open()
    story.tell(ev.InputsDrained(story.allocate(session, 4096)))
    for name in ("Upper", "m2"):
        story.tell(ev.RegisterModel(story.call(), session, 1, ModelName("t", name), None, {"device": -1}, False))
    story.tell(ev.Allocate(story.call(), session, 2, ModelName("t", "m2"), "device", 2, 1))
    assert story.broker.denials == {MODEL: {Reason.CAPACITY: 1}}
    story.tell(ev.UnregisterModel(story.call(), session, 3, MODEL))
    assert not story.broker.denials
    assert story.broker.books.tenant_denials == {"t": {Reason.CAPACITY: 1}}, "its tenant's and the device's stay"
    assert story.broker.books.device_denials == {Reason.CAPACITY: 1}


def test_what_is_kept_about_refused_tenants_is_bounded(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each user is a tenant: those that were refused long ago are forgotten, and the device's sum has them still."""
    monkeypatch.setattr(books, "MOST_TENANTS", 2)
    for tenant in ("t", "u", "v"):
        session, name = story.open(tenant=tenant), ModelName(tenant, "m")
        story.tell(ev.RegisterModel(story.call(), session, 2, name, None, {}, False))
        story.tell(ev.Allocate(story.call(), session, 3, name, "device", 2, 4096))
        story.tell(ev.InputsDrained(story.asked))
    assert list(story.broker.books.tenant_denials) == ["u", "v"]
    assert story.broker.books.device_denials == {Reason.CAPACITY: 3}


def test_extents_are_counted_of_segments_as_of_any_others(story: Story) -> None:
    """What a model has ever borrowed and given back: a segment's extent, two that were lent, two that failed.

    The most that it was ever charged is what it was while it had the segment.
    """
    session = story.open()
    segment = story.write(session, PACKET)
    story.tell(ev.DetachSegment(story.call(), session, 3, segment))
    story.tell(ev.Dropped(segment))
    row = story.broker.ledger.models[MODEL]
    assert (row.allocations, row.releases) == (1, 1)
    story.allocate(session, 2)
    story.made(session)
    story.allocate(session, 2, request_id=4)
    story.tell(ev.NotMade(session, 4, 0, "DRIVER_FAILED", {}))
    assert (row.allocations, row.releases) == (5, 3)
    assert (row.charges["device"].bytes, row.charges["device"].peak) == (4, PACKET)


def test_the_anchor_is_no_strangers() -> None:
    """What the daemon itself has on the device is in use there, and is not said to be beyond the books."""
    broker = Broker(policy.Rules(granularity=2, capacities={"device": 64, "host": 64}, anchor_bytes=2), epoch=1)
    broker.step(ev.Audit({"device": 2, "host": 0}), 0)
    assert (broker.releasing.shown("device"), broker.releasing.shown("host")) == (0, 0)


def test_a_commanded_limit_ends_where_nothing_is_lent_any_more() -> None:
    """An earlier daemon lent host memory, and a limit was commanded for it; this one lends none."""
    commanded = ft.QuotaSet("t", None, "host", 4)
    broker = Broker(policy.Rules(granularity=2, capacities={"device": 64}), epoch=1, facts=[commanded])
    end = ev.SetQuota(1, "t", None, "host", None)
    assert broker.step(end, 0).effects == [fx.Answer(1, fx.Done())]
    assert not broker.ledger.quotas
    for event in (end, ev.SetQuota(1, "t", None, "host", 4)):
        assert broker.step(event, 0).effects == [fx.Answer(1, deny(Reason.LOCATION_UNAVAILABLE, location="host"))]


class Charges(dict[Any, Any]):
    """A session's charges, of which each look through all of them is counted."""

    looks = 0

    def items(self) -> Any:
        Charges.looks += 1
        return super().items()

    def values(self) -> Any:
        Charges.looks += 1
        return super().values()

    def __iter__(self) -> Any:
        Charges.looks += 1
        return super().__iter__()


def looks_at_charges(sessions: int) -> tuple[int, int]:
    """Return how often charges of sessions with three models were looked through, at their deaths and at an audit."""
    broker = Broker(policy.Rules(granularity=2, capacities={"device": 1 << 40}), epoch=1)
    for number in range(sessions):
        broker.step(ev.OpenSession(0, "t", 1, 1, str(number), False, "story"), 0)
    for session, row in broker.ledger.sessions.items():
        for model in "abc":
            broker.step(ev.RegisterModel(0, session, 1, ModelName("t", model), None, {}, False), 0)
            broker.step(ev.Declare(0, session, 1, ModelName("t", model), "device", 4), 0)
        row.charges = Charges(row.charges)
    Charges.looks = 0
    for session in list(broker.ledger.sessions):
        broker.step(ev.ProcessDied(session, {"device": 1 << 30}), 0)
    at_deaths = Charges.looks
    broker.step(ev.Audit({"device": 1 << 30}), 1)
    assert broker.ledger.totals["device"].releasing == sessions * 3 * 4, "they are settled already"
    return at_deaths, Charges.looks - at_deaths


def test_the_dead_are_looked_at_by_sums() -> None:
    """At each death and each audit all of the dead are: a tenant's sessions with 256 models each stopped the broker."""
    (few, _), (many, at_audit) = looks_at_charges(10), looks_at_charges(40)
    assert few, "nothing counts"
    assert many == 4 * few
    assert at_audit == 0


def test_deaths_are_credited_some_at_a_time(story: Story) -> None:
    """128 sessions die, and the device shows all their memory free: one step credits 64 of them at most."""
    sessions = [story.open() for _ in range(128)]
    for session in sessions:
        story.tell(ev.Declare(story.call(), session, 2, MODEL, "device", 2))
    for session in sessions:
        story.tell(ev.ProcessDied(session, {"device": 2 * len(sessions)}))
    left = []
    while story.releasing():
        story.tell(ev.Audit({"device": 0}))
        left.append(story.releasing() // 2)
    assert left == [64, 0]


def test_attaches_that_wait_are_bounded(story: Story) -> None:
    """Eight sessions of a tenant wait for a seal with sixteen attaches each: only so many begin in one step.

    One that is given up makes room for one.
    """
    story.broker.books.rules = dataclasses.replace(story.broker.books.rules, max_waiting_per_tenant=100)
    writer = story.open()
    segment = story.write(writer, 2)
    for session in [story.open() for _ in range(8)]:
        for number in range(16):
            story.tell(ev.AttachSegment(story.call(), session, 2 + number, SEGMENT, 10**9))
    assert refused(story) == {Reason.TOO_MANY_REQUESTS: 28}
    story.tell(ev.CancelWait(story.asked - 127))
    for number in (18, 19):
        story.tell(ev.AttachSegment(story.call(), session, number, SEGMENT, 10**9))
    assert refused(story) == {Reason.DELIVERY_FAILED: 1, Reason.TOO_MANY_REQUESTS: 29}
    story.tell(ev.SealSegment(story.call(), writer, 3, segment))
    story.tell(ev.Sealed(segment))
    assert sum(story.broker.ledger.segments[segment].holders.values()) == 101
    other = story.open()
    story.tell(ev.AttachSegment(story.call(), other, 2, SEGMENT, 10**9))
    assert other in story.broker.ledger.segments[segment].holders


def crowd(story: Story) -> int:
    """Let 40 requests for 2 bytes wait, then free all memory: 16 are granted. Return the session that freed it."""
    holder, waiters = story.open(), [story.open() for _ in range(4)]
    story.tell(ev.Declare(story.call(), holder, 2, MODEL, "device", 4096))
    for session in waiters:
        for number in range(10):
            story.tell(ev.Allocate(story.call(), session, 2 + number, MODEL, "device", 2, 1, 1_000))
    story.tell(ev.Declare(story.call(), holder, 3, MODEL, "device", 0))
    return holder


def lent(story: Story) -> int:
    return story.broker.ledger.totals["device"].lent


def test_those_who_are_left_over_have_their_turn_when_time_has_passed(story: Story) -> None:
    """Other events grant them nothing: each is a step of its own in one turn of the event loop."""
    session, seen = crowd(story), [lent(story)]
    for number in range(4):
        story.tell(ev.Declare(story.call(), session, 4 + number, MODEL, "device", 0))
    seen.append(lent(story))
    while story.broker.deadline == 0:
        story.tell(ev.Elapsed())
        seen.append(lent(story))
    assert seen == [32, 32, 64, 80]


@pytest.mark.parametrize("beside", [0, 2])
def test_who_does_not_wait_overtakes_nobody_who_is_left_over(story: Story, beside: int) -> None:
    """24 requests are left over, for 48 bytes. What is free beside these may go at once."""
    session = crowd(story)
    size = 4096 - lent(story) - 48 + beside
    call = story.call()
    story.tell(ev.Allocate(call, session, 4, MODEL, "device", size, 1, 0))
    story.tell(ev.InputsDrained(call))
    assert isinstance(story.answers.get(call), Denied) == bool(beside)
    story.tell(ev.Elapsed())
    story.tell(ev.Elapsed())
    assert lent(story) == 80 + (0 if beside else size)


@pytest.mark.parametrize("size", [2, 100])
def test_who_does_not_wait_is_refused_for_nobody_beyond_a_share(story: Story, size: int) -> None:
    """24 requests of a tenant are left over, and 150 bytes. Another tenant has nothing, and comes before most."""
    holder, waiters = story.open(), [story.open() for _ in range(4)]
    story.tell(ev.Declare(story.call(), holder, 2, MODEL, "device", 4096))
    for session in waiters:
        for number in range(10):
            story.tell(ev.Allocate(story.call(), session, 2 + number, MODEL, "device", 100, 1, 1_000))
    story.tell(ev.Declare(story.call(), holder, 3, MODEL, "device", 4096 - 16 * 100 - 150))
    assert story.broker.deadline == 0
    assert story.broker.waiting.of_location("device")[1] == 24
    other = ModelName("other", "m")
    session = story.open("other")
    story.tell(ev.RegisterModel(story.call(), session, 3, other, None, {}, False))
    call = story.call()
    story.tell(ev.Allocate(call, session, 4, other, "device", size, 1, 0))
    story.tell(ev.InputsDrained(call))
    assert story.broker.books.admission.lent(other, "device") == size
    story.tell(ev.Elapsed())
    assert lent(story) == 4096 - 150 + (102 if size == 2 else 100)


@pytest.mark.parametrize("beside", [4, 100])
def test_who_does_not_wait_is_refused_for_one_who_may_be_left_over(
    story: Story, monkeypatch: pytest.MonkeyPatch, beside: int
) -> None:
    """A step had no time to look whether anybody else has room for 4 bytes. If nobody has, these go at once."""
    monkeypatch.setattr(waiting, "MOST_LOOKS", 1)
    session = story.open()
    story.tell(ev.Declare(story.call(), session, 2, MODEL, "device", 4096))
    for number, size in enumerate((4, beside)):
        story.tell(ev.Allocate(story.call(), story.open(), 2 + number, MODEL, "device", size, 1, 1_000))
    story.tell(ev.Declare(story.call(), session, 3, MODEL, "device", 4088))
    assert lent(story) == 4092
    assert story.broker.deadline == 0
    call = story.call()
    story.tell(ev.Allocate(call, session, 4, MODEL, "device", 2, 1, 0))
    story.tell(ev.InputsDrained(call))
    assert isinstance(story.answers.get(call), Denied) == (beside == 4)


def test_who_does_not_wait_has_what_is_guaranteed_to_it_beside_those_left_over(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is free, of a recall for an older request that is guaranteed as much. No request has its turn yet."""
    guarantees: dict[QuotaKey, int] = {(tenant, None, "device"): 2048 for tenant in "gh"}
    story.broker = Broker(policy.Rules(granularity=2, capacities={"device": 4096}, guarantees=guarantees), epoch=1)
    lender = story.open()
    story.tell(ev.RegisterModel(story.call(), lender, 2, MODEL, None, {}, False, True))
    story.tell(ev.Allocate(story.call(), lender, 2, MODEL, "device", 1024, 4))
    story.made(lender)
    (first, *_) = story.broker.ledger.sessions[lender].extents
    monkeypatch.setattr(waiting, "MOST_AT_ONCE", 0)
    for tenant, size, wait_ns in (("g", 2048, 1_000), ("h", 1024, 0)):
        session, name, call = story.open(tenant), ModelName(tenant, "m"), story.call()
        story.tell(ev.RegisterModel(story.call(), session, 2, name, None, {}, False))
        story.tell(ev.Allocate(call, session, 3, name, "device", size, 1, wait_ns))
        if wait_ns:
            story.tell(ev.Release(story.call(), lender, 3, (first,)))
    story.tell(ev.InputsDrained(call))
    assert story.broker.books.admission.lent(name, "device") == size


def test_the_more_models_wait_the_fewer_have_their_turn_in_a_step(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn looks at one line here: a model's requests are one, however many they are. So a step has two turns."""
    monkeypatch.setattr(waiting, "MOST_LOOKS", 2)
    crowd(story)
    seen = [lent(story) // 2]
    while story.broker.deadline == 0:
        story.tell(ev.Elapsed())
        seen.append(lent(story) // 2 - sum(seen))
    assert seen == [2] * 20


def readers(story: Story, count: int) -> int:
    """Let 16 attaches of each of so many sessions wait for the seal of a segment. Return its writer."""
    writer = story.open()
    story.write(writer, 2)
    for session in [story.open() for _ in range(count)]:
        for number in range(16):
            story.tell(ev.AttachSegment(story.call(), session, 2 + number, SEGMENT, 10**9))
    return writer


def refused(story: Story) -> Counter[str]:
    return Counter(answer.reason for answer in story.answers.values() if isinstance(answer, Denied))


@pytest.mark.parametrize("why", [Reason.WRITER_DIED, Reason.SEGMENT_NOT_SEALED])
def test_attaches_that_wait_are_refused_some_at_a_time(story: Story, why: Reason) -> None:
    """The segment of 160 is deleted, or their time is over: one step refuses 64 of them at most."""
    readers(story, 10)
    if why is Reason.WRITER_DIED:
        story.tell(ev.DeleteSegment(story.call(), None, 0, SEGMENT, 0))
    else:
        story.now = 10**9
        story.tell(ev.Elapsed())
    left = [160 - refused(story)[why]]
    while story.broker.deadline is not None and story.broker.deadline <= story.now:
        story.tell(ev.Elapsed())
        left.append(160 - refused(story)[why])
    assert left == [96, 32, 0]


def test_an_attach_whose_refusal_is_left_over_ends_with_its_session(story: Story) -> None:
    """It is answered once, and its request id is in use until then."""
    writer = readers(story, 10)
    story.tell(ev.Goodbye(story.call(), writer, 9))
    last = writer + 10
    again = story.call()
    story.tell(ev.AttachSegment(again, last, 2, SEGMENT, 0))
    assert story.answers[again].reason is Reason.REQUEST_ID_IN_USE
    story.tell(ev.ConnectionLost(last))
    assert refused(story)[Reason.DELIVERY_FAILED] == 16
    story.tell(ev.Elapsed())
    story.tell(ev.Elapsed())
    assert refused(story) == {Reason.WRITER_DIED: 144, Reason.DELIVERY_FAILED: 16, Reason.REQUEST_ID_IN_USE: 1}
    assert story.broker.deadline is None


@pytest.mark.parametrize("draining", [False, True])
def test_a_request_ahead_of_need_is_refused_and_not_counted(story: Story, *, draining: bool) -> None:
    """Nobody needs the memory yet, whatever the reason of the refusal. So no metric and no alert is about it."""
    session = story.open()
    story.broker.books.draining = draining
    for ahead in (True, False):
        call = story.call()
        story.tell(ev.Allocate(call, session, call, MODEL, "device", 2, 4_096, 0, ahead, 0))
        if not draining and not ahead:
            story.tell(ev.InputsDrained(call))
        assert isinstance(story.answers[call], Denied)
        assert sum(story.broker.denials.get(MODEL, {}).values()) == (not ahead)
