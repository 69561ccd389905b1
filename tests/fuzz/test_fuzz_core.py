"""Requests with any numbers and names, through the daemon's own conversion, into the real core.

Each is answered or refused, never an exception; a refusal leaves the books' revision where it was. The core is the
one that has a model, some extents and a call in flight, so that requests can hit something.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import LOCATIONS, NAMES, NUMBERS, PAGE, REQUESTS, UNSIGNED, bent, budget, lasting

from membroker.v1 import handoff_pb2 as pb
from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.broker import Broker, Step
from membrokerd.core.denied import Denied
from membrokerd.rpc import convert, errors

RULES = policy.Rules(granularity=PAGE, capacities={"device": 64 * PAGE, "host": 0}, max_models_per_tenant=4)


class Bench:
    """A core with two sessions, of which red has a model, three extents and a packet that is being made."""

    def __init__(self) -> None:
        self.broker = Broker(RULES, epoch=1)
        self.calls = 0
        self.red, self.blue = self.open("red"), self.open("blue")
        name = ev.ModelName("red", "mine")
        self.step(lambda call: ev.RegisterModel(call, self.red, 1, name, None, {}, False))
        self.step(lambda call: ev.Allocate(call, self.red, 2, name, "device", PAGE, 3))
        self.broker.step(ev.Made(self.red, 2, 0), 0)
        self.step(lambda call: ev.Allocate(call, self.red, 3, name, "device", PAGE, 1))

    def open(self, tenant: str) -> int:
        (answer,) = self.step(lambda call: ev.OpenSession(call, tenant, 1, 1, tenant, False, "fuzz")).effects
        assert isinstance(answer, fx.Answer)
        assert isinstance(answer.result, fx.SessionOpened)
        return answer.result.session

    def step(self, make_event: convert.MakeEvent) -> Step:
        self.calls += 1
        return self.broker.step(make_event(self.calls), 0)

    def put(self, make_event: convert.MakeEvent) -> None:
        """Ask: the books hold, and have moved only if nothing was refused."""
        before = self.broker.ledger.revision
        step = self.step(make_event)
        answers = [effect for effect in step.effects if isinstance(effect, fx.Answer) and effect.call == self.calls]
        for answer in answers:
            if isinstance(answer.result, Denied):
                assert self.broker.ledger.revision == before, "a refusal changed the books"
                errors.to_status(answer.result)
        assert answers or step.effects or step.facts, "a request was swallowed"
        self.broker.ledger.recount()


def _ask(bench: Bench, session: int, tenant: str, request_id: int, message: Message) -> None:
    before = bench.broker.ledger.revision
    try:
        make_event = convert.to_event(session, tenant, request_id, message)
    except convert.Refused as refused:
        assert bench.broker.ledger.revision == before
        errors.to_status(refused.denied)
        return
    bench.put(make_event)


def test_any_request_is_answered_or_refused() -> None:
    """A handful of requests in a row, from either tenant, with any request id."""

    @budget(1_000)
    @given(st.lists(st.tuples(st.booleans(), st.one_of(st.integers(1, 6), UNSIGNED), REQUESTS), max_size=6))
    def fuzz(asked: list[tuple[bool, int, Any]]) -> None:
        bench = Bench()
        for mine, request_id, message in asked:
            session, tenant = (bench.red, "red") if mine else (bench.blue, "blue")
            _ask(bench, session, tenant, request_id, message)

    lasting(fuzz)


def test_bent_frames_reach_the_core_unharmed() -> None:
    """What of a bent frame still decodes to a request goes the same way as any."""

    @budget(1_000)
    @given(st.lists(bent(), max_size=6))
    def fuzz(packets: list[bytes]) -> None:
        bench = Bench()
        for data in packets:
            try:
                frame = pb.Frame.FromString(data)
            except Exception:  # noqa: BLE001 - test_fuzz_parsers holds what may be raised; here only frames matter
                continue
            if frame.WhichOneof("kind") in ("allocate", "release", "declare"):
                _ask(bench, bench.red, "red", frame.request_id, getattr(frame, frame.WhichOneof("kind")))
            elif frame.HasField("ack"):
                revision = bench.broker.ledger.revision
                bench.broker.step(ev.Acknowledge(bench.red, frame.request_id, frame.ack.part), 0)
                assert bench.broker.ledger.revision == revision

    lasting(fuzz)


def test_any_quota_is_set_or_refused() -> None:
    @budget(1_000)
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
