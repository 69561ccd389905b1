"""Requests with any numbers and names, through the daemon's own conversion, into the real core.

Each is answered or refused, never an exception; a refusal leaves the books as they were. The core is the one that has
a model, some extents, segments in each of their states, and calls in flight, so that requests can hit something. What
the core asks of the world in between happens, or fails; and in the end nobody waits, and nothing is charged.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import (
    ENDING,
    LOCATIONS,
    NAMES,
    NUMBERS,
    OF_SEGMENTS,
    PAGE,
    REQUESTS,
    SEALED,
    SEGMENTS,
    UNSIGNED,
    WRITTEN,
    budget,
    lasting,
)

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.books import Step
from membrokerd.core.denied import Denied
from membrokerd.core.machine import Broker
from membrokerd.core.names import Location, ModelName, SegmentName
from membrokerd.core.recount import recount
from membrokerd.edge import convert, errors
from membrokerd.runtime.loop import MakeEvent

pytestmark = pytest.mark.deep

RULES = policy.Rules(
    granularity=PAGE,
    capacities={"device": 64 * PAGE, "host": 0},
    max_models_per_tenant=4,
    segment_extent_bytes=2 * PAGE,
    max_segments_per_tenant=6,
    max_segment_extents=32,
    stock_extents=6,
    stock_bytes=16 * PAGE,
)
DAY_NS = 86_400_000_000_000


class Bench:
    """A core with two sessions, of which red has a model, three extents and a packet that is being made.

    It has segments, too: one that is sealed and attached, one that is written, and one that was deleted.
    """

    def __init__(self) -> None:
        self.broker = Broker(RULES, epoch=1)
        self.calls = 0
        self.now = 0
        self.unanswered: set[int] = set()
        self.asked: deque[fx.Effect] = deque()
        """What the core has asked of the world, and has not heard of."""
        self.ready: Counter[tuple[Location, int]] = Counter()
        """What was made ahead."""
        self.red, self.blue = self.open("red"), self.open("blue")
        self.name = ModelName("red", "mine")
        self.ask(lambda call: ev.RegisterModel(call, self.red, 1, self.name, None, {}, False))
        self.ask(lambda call: ev.Allocate(call, self.red, 2, self.name, "device", PAGE, 3))
        self.create(20, "sealed", 3)
        self.create(21, "ending", 1)
        self.create(22, "written", 2)
        self.hear_all()
        for segment in [row.segment for row in self.broker.ledger.segments.values() if row.label != "written"]:
            self.ask(lambda call, segment=segment: ev.SealSegment(call, self.red, 30, segment))
        self.hear_all()
        self.ask(lambda call: ev.DeleteSegment(call, self.red, 31, self.segment("ending"), 0))
        self.ask(lambda call: ev.AttachSegment(call, self.red, 4, self.segment("written"), DAY_NS))
        self.ask(lambda call: ev.Allocate(call, self.red, 3, self.name, "device", PAGE, 1))
        states = {row.segment: row.state for row in self.broker.ledger.segments.values()}
        assert states == {SEALED: "sealed", ENDING: "ending", WRITTEN: "writing"}

    def segment(self, label: str) -> SegmentName:
        return SegmentName(self.name.tenant, self.name.model, label)

    def create(self, request_id: int, label: str, pages: int) -> None:
        size = pages * PAGE
        self.ask(lambda call: ev.CreateSegment(call, self.red, request_id, self.segment(label), "device", size))

    def open(self, tenant: str) -> int:
        (answer,) = self.ask(lambda call: ev.OpenSession(call, tenant, 1, 1, tenant, False, "fuzz")).effects
        return answer.result.session

    def ask(self, make_event: MakeEvent) -> Step:
        self.calls += 1
        self.unanswered.add(self.calls)
        return self.tell(make_event(self.calls))

    def tell(self, event: ev.Event) -> Step:
        """Take one step. Each call is answered once, and what is asked of the world is kept."""
        step = self.broker.step(event, self.now)
        for effect in step.effects:
            if isinstance(effect, fx.Answer):
                self.unanswered.remove(effect.call)
            elif isinstance(effect, fx.DropStock):
                self.ready[effect.location, effect.extent_bytes] -= effect.count
            elif isinstance(effect, fx.DrainInputs | fx.Make | fx.Send | fx.Seal | fx.Drop | fx.Stock):
                self.asked.append(effect)
                if isinstance(effect, fx.Make) and effect.stocked:
                    self.ready[effect.location, effect.extent_bytes] -= len(effect.ids)
        assert all(count >= 0 for count in self.ready.values()), "what is not in the stock goes out of it"
        recount(self.broker.ledger)
        return step

    def hear(self, *, fails: bool = False) -> None:
        """What the core asked for first has happened, or has failed; packets are acknowledged at once."""
        match self.asked.popleft() if self.asked else None:
            case fx.Make(session=session, request_id=request_id, part=part) | fx.Send(session, request_id, part):
                packet = (session, request_id, part)
                if fails:
                    self.tell(ev.NotMade(*packet, "DRIVER_FAILED", {}))
                else:
                    self.tell(ev.Made(*packet))
                    self.tell(ev.Acknowledge(*packet))
            case fx.DrainInputs(call):
                self.tell(ev.InputsDrained(call))
            case fx.Seal(segment):
                self.tell(ev.NotSealed(segment, "DRIVER_FAILED", {}) if fails else ev.Sealed(segment))
            case fx.Drop(segment):
                self.tell(ev.Dropped(segment))
            case fx.Stock(where, size):
                self.ready[where, size] += not fails
                self.tell(ev.Stocked(where, size, made=not fails))

    def hear_all(self) -> None:
        while self.asked:
            self.hear()

    def books(self) -> Any:
        """Return all that the ledger holds, as a value of its own."""
        ledger = self.broker.ledger
        parts = (ledger.totals, ledger.sessions, ledger.models, ledger.segments, ledger.labels, ledger.tenants)
        return copy.deepcopy((ledger.revision, ledger.quotas, self.broker.books.making, *parts))

    def put(self, make_event: MakeEvent) -> None:
        """Ask: the books hold, and have moved only if nothing was refused."""
        before, waiting = self.books(), len(self.unanswered)
        step = self.ask(make_event)
        answers = [effect for effect in step.effects if isinstance(effect, fx.Answer) and effect.call == self.calls]
        for answer in answers:
            if isinstance(answer.result, Denied):
                assert self.books() == before, "a refusal changed the books"
                errors.to_status(answer.result)
            elif not isinstance(answer.result, fx.Registered | fx.Done):
                convert.from_result(answer.result)
        waits = len(self.unanswered) > waiting and (self.broker.deadline is not None or self.asked)
        assert answers or step.effects or step.facts or waits, "a request was swallowed"

    def end(self) -> None:
        """Everybody goes, and what was asked for happens: nobody waits for anything then, and nothing is left."""
        for session in (self.red, self.blue):
            self.tell(ev.ProcessDied(session, {}))
        assert self.broker.deadline is None, "somebody waits who is gone"
        for row in list(self.broker.ledger.segments.values()):
            if row.state in ("writing", "sealing", "sealed"):
                name = row.full_name()
                self.ask(lambda call, name=name: ev.DeleteSegment(call, None, 1, name, 0))
        self.hear_all()
        for _ in range(3):
            self.now += DAY_NS
            self.tell(ev.Audit({}))
        ledger = self.broker.ledger
        assert not self.unanswered
        assert not ledger.sessions
        assert not ledger.segments
        assert not ledger.labels
        assert not ledger.models
        assert ledger.totals["device"].charged == ledger.totals["device"].stock == 0
        assert not +self.ready
        assert self.broker.books.making["device"] == 0


def _ask(bench: Bench, session: int, tenant: str, request_id: int, message: Message) -> None:
    before = bench.broker.ledger.revision
    try:
        event = convert.to_event(bench.calls + 1, session, tenant, request_id, message)
    except convert.Refused as refused:
        assert bench.broker.ledger.revision == before
        errors.to_status(refused.denied)
        return
    bench.put(lambda _: event)


REQUEST_IDS = st.one_of(st.integers(1, 6), st.integers(100, 10_000), UNSIGNED)


def test_any_request_is_answered_or_refused() -> None:
    """A handful of requests in a row, from either tenant, with any request id."""

    @budget(500)
    @given(st.lists(st.tuples(st.booleans(), REQUEST_IDS, REQUESTS), max_size=6))
    def fuzz(asked: list[tuple[bool, int, Any]]) -> None:
        bench = Bench()
        for mine, request_id, message in asked:
            session, tenant = (bench.red, "red") if mine else (bench.blue, "blue")
            _ask(bench, session, tenant, request_id, message)

    lasting(fuzz)


def test_whatever_happens_in_between_everybody_is_answered() -> None:
    """Requests about segments, and what they ask for happens late, fails, or meets a session that goes."""
    happens = st.sampled_from(["made", "made", "fails", "fails", "elapsed", "lost", "died", "bye", "deleted"])

    @budget(300)
    @given(st.lists(st.one_of(happens, st.tuples(REQUEST_IDS, OF_SEGMENTS)), min_size=5, max_size=16))
    def fuzz(story: list[str | tuple[int, Any]]) -> None:
        bench = Bench()
        for number, what in enumerate(story):
            match what:
                case "made" | "fails":
                    bench.hear(fails=what == "fails")
                case "elapsed":
                    bench.now += DAY_NS
                    bench.tell(ev.Elapsed())
                    assert bench.broker.deadline is None, "somebody waits whose time is over"
                case "lost":
                    bench.tell(ev.ConnectionLost(bench.red))
                case "died":
                    bench.tell(ev.ProcessDied(bench.red, {"device": 10 * PAGE}))
                case "bye":
                    bench.put(lambda call, number=number: ev.Goodbye(call, bench.red, 1_000 + number))
                case "deleted":
                    bench.put(lambda call: ev.DeleteSegment(call, None, 1, bench.segment("written"), 0))
                case (request_id, message):
                    _ask(bench, bench.red, "red", request_id, message)
        bench.end()

    lasting(fuzz)


def test_any_quota_is_set_or_refused() -> None:
    @budget(500)
    @given(NAMES, LOCATIONS, st.none() | NUMBERS)
    def fuzz(name: str, number: int, limit: int | None) -> None:
        bench = Bench()
        try:
            tenant, model = convert.parse_quota_name(name)
            location = convert.parse_location(number)
        except convert.Refused:
            return
        bench.put(lambda call: ev.SetQuota(call, tenant, model, location, limit))

    lasting(fuzz)


def test_an_operator_deletes_or_is_refused() -> None:
    @budget(250)
    @given(SEGMENTS, UNSIGNED)
    def fuzz(name: str, generation: int) -> None:
        bench = Bench()
        try:
            segment = convert.parse_segment(name)
        except convert.Refused:
            return
        for one in (generation, 0):
            bench.put(lambda call, one=one: ev.DeleteSegment(call, None, 1, segment, one))
        bench.end()

    lasting(fuzz)
