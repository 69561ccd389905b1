"""What a client without gRPC may do on the handoff: register models, learn a segment's size, acknowledge by a count."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from tests.support import raw
from tests.support.daemons import Daemon, running, until
from tests.support.raw import Session, allocation, reason, segment_of
from tests.support.sizes import GIB, MIB, PAGE
from tests.system.library.test_waiting import waiting

from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2 as rpb
from membroker.wire import frames as handoff
from membroker.wire import names

pytestmark = pytest.mark.shared_daemon


def test_a_model_is_registered_joined_and_left(daemon: Daemon) -> None:
    """The answer is the model as it stands, and the session can borrow for it."""
    with Session(daemon.endpoint()) as one, Session(daemon.endpoint()) as two:
        assert one.welcome.protocol_revision == names.PROTOCOL_REVISION
        limit = rpb.Limit(location=rpb.LOCATION_DEVICE, limit_bytes=8 * MIB)
        wanted = bpb.RegisterModelRequest(model_id="m", virtual_capacity_bytes=GIB, limits=[limit], exclusive=True)
        model = one.call(register_model=wanted)
        assert (model.name, model.virtual_capacity_bytes, model.sessions) == ("tenants/red/models/m", GIB, 1)
        assert model.books[0].limit_bytes == 8 * MIB
        ids = one.borrow(model.name, PAGE, 2)
        joined = two.call(register_model=bpb.RegisterModelRequest(model_id="m"))
        assert (joined.sessions, joined.books[0].used_bytes, joined.allocations_total) == (2, 2 * PAGE, 2)
        leave = bpb.UnregisterModelRequest(name=model.name)
        assert reason(one.call(unregister_model=leave)) == "MODEL_IN_USE"
        assert one.call(release=bpb.ReleaseExtentsRequest(extent_ids=ids)).released_bytes == 2 * PAGE
        for session in (one, two):
            assert session.call(unregister_model=leave) == bpb.UnregisterModelResponse()
        assert daemon.models() == []


def test_the_first_delivery_of_a_segment_has_its_size() -> None:
    """A client that attaches knows what to reserve before it maps anything: 1 GiB and 4 MiB come in two packets."""
    with running({"capacity": "2GiB"}) as daemon, Session(daemon.endpoint()) as session:
        name = session.register("m")
        size = GIB + 4 * MIB
        requests: list[dict[str, Any]] = [
            {"create_segment": segment_of(name, "weights", size)},
            {"attach_segment": bpb.AttachSegmentRequest(name=f"{name}/segments/weights")},
        ]
        for request in requests:
            session.send(pb.Frame(request_id=5, **request))
            first, second = (session.receive().frame for _ in range(2))
            assert [one.delivery.part for one in (first, second)] == [0, 1]
            assert (first.delivery.segment_bytes, first.delivery.segment_extents) == (size, 2)
            assert (second.delivery.segment_bytes, second.delivery.segment_extents) == (0, 0)
            assert second.delivery.reply.segment.size_bytes == size
            for part in (0, 1):
                session.send(pb.Frame(request_id=5, ack=pb.Ack(part=part)))
            if "create_segment" in request:
                session.call(seal_segment=bpb.SealSegmentRequest(generation=first.delivery.segment))
        session.send(pb.Frame(request_id=5, allocate=allocation(name, PAGE)))
        assert not session.receive().frame.delivery.segment_bytes
        session.send(pb.Frame(request_id=5, ack=pb.Ack()))
        session.call(delete_segment=bpb.DeleteSegmentRequest(name=f"{name}/segments/weights"))


def counts_only(session: Session, request: pb.Frame, taken: int) -> tuple[int, list[int]]:
    """Make a call and acknowledge by counts alone; return the count at its end, and the ids that it brought."""
    request.acknowledged = taken
    session.send(request)
    ids: list[int] = []
    while True:
        frame = session.receive().frame
        assert frame.request_id == request.request_id
        taken += frame.HasField("delivery")
        ids += frame.delivery.extent_ids
        if raw.reply_in(frame) is not None:
            return taken, ids
        session.send(pb.Frame(acknowledged=taken, ack=pb.Ack()))


def test_a_client_that_counts(daemon: Daemon) -> None:
    """Six packets through the window of two, the same request id again and again, and no Ack behind a last packet."""
    with Session(daemon.endpoint()) as session:
        name, taken = session.register("m"), 0
        for turn in range(1, 4):
            frame = pb.Frame(request_id=9, allocate=allocation(name, 2 * MIB, 65))
            taken, ids = counts_only(session, frame, taken)
            assert (taken, len(ids)) == (2 * turn, 65)
            release = bpb.ReleaseExtentsRequest(extent_ids=ids)
            session.send(pb.Frame(request_id=9, acknowledged=taken, release=release))
            assert session.answer(9)[0].released_bytes == 130 * MIB


def _counted_too_many(session: Session, name: str) -> None:
    session.send(pb.Frame(request_id=5, allocate=allocation(name, PAGE)))
    session.answer(5, acknowledge=False)
    session.send(pb.Frame(request_id=6, acknowledged=2, release=bpb.ReleaseExtentsRequest(extent_ids=[1])))


def _counted_the_most(session: Session, name: str) -> None:
    session.send(pb.Frame(request_id=6, acknowledged=(1 << 64) - 1, ack=pb.Ack()))


def _acknowledged_what_was_counted(session: Session, name: str) -> None:
    session.send(pb.Frame(request_id=5, allocate=allocation(name, PAGE)))
    session.answer(5, acknowledge=False)
    session.send(pb.Frame(request_id=6, acknowledged=1, declare=bpb.DeclareMemoryRequest(model=name)))
    session.answer(6)
    session.send(pb.Frame(request_id=5, ack=pb.Ack()))


def test_a_false_count_ends_the_connection(daemon: Daemon) -> None:
    """Of its own session only, which stays charged until its process ends; nothing that came with it is done."""
    for violate in [_counted_too_many, _counted_the_most, _acknowledged_what_was_counted]:
        with Session(daemon.endpoint()) as session, Session(daemon.endpoint("blue")) as other:
            violate(session, session.register("m"))
            last = session.last_words()
            assert last is not None
            assert reason(last) == "PROTOCOL_VIOLATION"
            assert "acknowledged" in last.message
            other.register("m")


def test_a_cancel_ends_a_wait(daemon: Daemon) -> None:
    """Only that of the request; a Cancel that comes again, or of no request, changes nothing.

    Ids are a session's own: nobody ends another one's wait, nor on another connection of the same tenant.
    """
    with Session(daemon.endpoint()) as one, Session(daemon.endpoint()) as other:
        model = one.register("m")
        one.borrow(model, PAGE)
        first, second = waits(one, model), waits(one, model)
        until(lambda: waiting(daemon) == 2)
        other.send(pb.Frame(request_id=first, cancel=pb.Cancel()))
        other.register("other")  # it has been read
        assert waiting(daemon) == 2
        for request_id in (first, first, 0, 1 << 60):
            one.send(pb.Frame(request_id=request_id, cancel=pb.Cancel()))
        assert reason(one.answer(first)[0]) == "DELIVERY_FAILED"
        assert waiting(daemon) == 1
        one.send(pb.Frame(request_id=second, cancel=pb.Cancel()))
        assert reason(one.answer(second)[0]) == "DELIVERY_FAILED"
        assert waiting(daemon) == 0
        assert len(one.borrow(model, PAGE)) == 1


def waits(session: Session, model: str) -> int:
    """Send a request for all that can be lent, of which a page is lent, and return its id."""
    request_id, request = next(raw._ids), allocation(model, session.welcome.capacities[0].limit_bytes)
    request.wait.seconds = 600
    session.send(pb.Frame(request_id=request_id, allocate=request))
    return request_id


def test_who_is_turned_away_is_told_why_and_counted() -> None:
    """An endpoint does not admit a user, and a process has a session too many. The other sessions hear of the stop."""
    tenants = {"red": {}, "blue": {"uids": [os.geteuid() + 1]}}
    with running({"tenants": tenants}) as daemon, ExitStack() as sessions:
        first, *_ = [sessions.enter_context(Session(daemon.endpoint())) for _ in range(16)]
        for tenant, why in (("blue", "ENDPOINT_FORBIDDEN"), ("red", "TOO_MANY_SESSIONS")):
            with raw.Connection(daemon.endpoint(tenant)) as line:
                with suppress(BrokenPipeError):  # it may be turned away before it has said anything
                    line.send(raw.hello())
                assert reason(line.last_words()) == why
            assert daemon.figure("membroker_connections_refused_total", reason=why) == 1
        assert daemon.stop() == 0
        assert handoff.receive(first.notices).frame.notice.HasField("stopping")
