"""Segments: their limits, their seal, and what a session cannot do to a segment that it does not hold."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest
from tests.support.daemons import Daemon, running
from tests.support.raw import Session, info, is_readable, reason
from tests.support.segment_workers import (
    FULL_NAME,
    SIZE,
    SegmentAsker,
    attach,
    clean,
    holders,
    reads,
    segments,
    state,
    wait_in_attach,
    write,
)
from tests.support.sizes import GIB, MIB
from tests.support.workers import (
    PAGE,
    worker,
    workers,
)

from membroker.v1 import broker_pb2 as pb
from membroker.v1 import handoff_pb2
from membroker.v1.resources_pb2 import Segment as SegmentMessage
from membroker.wire import frames as handoff

# Limits


def test_each_limit_refuses_with_its_numbers(transport: str) -> None:
    """A segment is a debit like any other, for its model, its tenant and the device."""
    tenants = {"red": {"limit": "48MiB", "models": {"small": {"limit": "16MiB"}}}, "blue": {}}
    with (
        running({"capacity": "64MiB", "settle_seconds": 1.0, "tenants": tenants}) as daemon,
        clean(daemon),
        workers(2) as both,
    ):
        red, blue = both
        red.connect(daemon, "red", transport)
        blue.connect(daemon, "blue", transport)
        red.do("small, large = client.register_model('small'), client.register_model('large')")
        blue.do("other = client.register_model('other')")
        red.do("one = small.create_segment('one', '8MiB'); one.seal()")
        red.do("again = client.attach('one')")  # a reader is charged nothing
        refused = red.refused("small.create_segment('two', '10MiB')")
        assert (refused.error, refused.reason) == ("OutOfMemory", "MODEL_LIMIT")
        assert refused.numbers == ("model", 10 * MIB, 8 * MIB, 16 * MIB)
        assert red.refused("small.allocate('10MiB')").numbers == ("model", 10 * MIB, 8 * MIB, 16 * MIB)
        refused = red.refused("large.create_segment('two', '42MiB')")
        assert (refused.reason, refused.numbers) == ("TENANT_LIMIT", ("tenant", 42 * MIB, 40 * MIB, 48 * MIB))
        red.do("two = large.create_segment('two', '40MiB')")
        refused = blue.refused("other.create_segment('three', '18MiB')")
        assert (refused.reason, refused.numbers) == ("CAPACITY", ("capacity", 18 * MIB, 16 * MIB, 64 * MIB))
        blue.do("three = other.create_segment('three', '16MiB')")
        assert daemon.books().free_bytes == 0
        red.do("client.delete_segment('one'); two.close()")
        blue.do("three.close()")


def test_the_broker_keeps_only_so_many(transport: str) -> None:
    """Each segment, and each extent of one, is a descriptor that the daemon keeps: a tenant cannot take them all."""
    with running({"capacity": "1GiB"}) as daemon, clean(daemon), Session(daemon.endpoint()) as red:
        model = red.register("m")
        asker = SegmentAsker(red, transport)
        by_frame = SegmentAsker(red, "handoff")
        for number in range(256):
            assert by_frame.create(model, PAGE, f"s{number}").extents == 1
        refused = asker.create(model, PAGE, "one-more")
        assert reason(refused) == "TOO_MANY_SEGMENTS"
        assert info(refused).metadata["limit"] == "256"
        assert daemon.books().lent_bytes == 256 * PAGE
        with Session(daemon.endpoint("blue")) as blue:
            assert SegmentAsker(blue, transport).create(blue.register("m"), PAGE).extents == 1
        assert by_frame.delete("tenants/red/models/m/segments/s7", 0).sessions == 1
        assert reason(asker.create(model, PAGE, "one-more")) == "TOO_MANY_SEGMENTS", "it is held still"


def test_the_broker_keeps_only_so_many_extents(transport: str) -> None:
    """With few descriptors of its own the daemon refuses a segment that would need too many, and serves on."""
    config = {"capacity": "400GiB", "max_sessions": 2}
    with running(config, descriptors=512) as daemon, clean(daemon), worker() as one:
        one.connect(daemon, transport=transport).do("model = client.register_model('m')")
        refused = one.refused("model.create_segment('weights', '300GiB')")
        assert (refused.error, refused.reason) == ("TooMany", "TOO_MANY_SEGMENTS")
        limit = int(refused.metadata["limit"])
        assert 64 < limit < 256
        one.do(f"segment = model.create_segment('weights', '{limit}GiB')")
        assert one.refused("model.create_segment('other', 1)").reason == "TOO_MANY_SEGMENTS"
        one.do("segment.close()")


# Nobody writes to what is sealed


def test_a_reader_cannot_make_it_writable(daemon: Daemon, transport: str) -> None:
    """On the host driver the kernel keeps a reader from writing, by its descriptor or its mapping."""
    with clean(daemon), worker() as writer:
        write(writer, daemon, transport)
        writer.do("segment.seal()")
        with Session(daemon.endpoint()) as session:
            answer, ids, (descriptor,) = session.take(attach_segment=pb.AttachSegmentRequest(name=FULL_NAME))
            assert (answer.generation, len(ids)) == (segments(daemon)[0].generation, 1)
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, SIZE)
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"x", 0)
            for change in (lambda: os.ftruncate(descriptor, 0), lambda: os.ftruncate(descriptor, 2 * SIZE)):
                with pytest.raises(PermissionError):
                    change()
            with pytest.raises(PermissionError):
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
            with pytest.raises(PermissionError):
                mmap.mmap(again, SIZE)
            mapping = mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED, mmap.PROT_READ)
            assert mapping[:5] == b"first"
            handoff.close_all([again, descriptor])
            with pytest.raises(TypeError):
                mapping[0] = 1
            mapping.close()
        attach(writer, daemon, transport)
        writer.do("import ctypes; protect = ctypes.CDLL(None).mprotect")
        assert writer.ask("protect(ctypes.c_void_p(segment.address), 4096, 3)") == -1
        assert reads(writer)
        writer.do("segment.delete()")


def test_a_writers_own_mapping_is_not_taken_from_it(daemon: Daemon) -> None:
    """What was mapped before the seal stays writable for the process that mapped it: it is trusted, as any writer is.

    The library gives that up by itself; no broker can, on a GPU either.
    """
    with clean(daemon), Session(daemon.endpoint()) as session, worker() as reader:
        made, _, (descriptor,) = session.take(
            create_segment=pb.CreateSegmentRequest(model=session.register("m"), segment_id="weights", size_bytes=PAGE)
        )
        mapping = mmap.mmap(descriptor, PAGE)
        os.close(descriptor)
        asker = SegmentAsker(session, "handoff")
        assert asker.seal(made.generation).state == SegmentMessage.SEALED
        mapping[:5] = b"after"
        attach(reader, daemon, "handoff")
        assert reader.ask("segment.read(0, 5).decode()") == "after"
        mapping.close()
        asker.delete()


def test_a_writer_that_spoils_its_own_seal_harms_nobody(daemon: Daemon, transport: str) -> None:
    """It forbids further seals on its descriptor, so that the broker cannot seal: the segment stays what it was,
    readers wait on, and it is given up like any other.
    """
    with clean(daemon), Session(daemon.endpoint()) as session, worker() as reader:
        asker = SegmentAsker(session, transport)
        request = pb.CreateSegmentRequest(model=session.register("m"), segment_id="weights", size_bytes=PAGE)
        made, _, (descriptor,) = session.take(create_segment=request)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        wait_in_attach(reader, daemon, transport)
        for _ in range(2):
            refused = asker.seal(made.generation)
            assert reason(refused) == "DRIVER_FAILED"
            assert "EPERM" in info(refused).metadata["driver_says"]
        assert (state(daemon), holders(daemon)) == ("WRITING", 1)
        assert reader.ask("attaching.is_waiting()")
        os.close(descriptor)
        assert asker.detach(made.generation) == pb.DetachSegmentResponse()
        assert reader.refused("attaching.result()").error == "WriterDied"


# Strangers


def test_a_session_cannot_touch_what_it_does_not_hold(daemon: Daemon, transport: str) -> None:
    """A hostile process guesses generations and names, at its own tenant and at another's: the books do not move."""
    with (
        clean(daemon),
        Session(daemon.endpoint()) as writer,
        Session(daemon.endpoint()) as stranger,
        Session(daemon.endpoint("blue")) as blue,
    ):
        own, foreign, other = (SegmentAsker(one, transport) for one in (writer, stranger, blue))
        made = own.create(writer.register("m"), SIZE)
        extents = range(made.generation + 1, made.generation + 1 + made.extents)
        stranger.register("m")
        before = daemon.device().revision
        guesses = [*range(max(1, made.generation - 3), made.generation + 4), 0, 1, (1 << 64) - 1]
        for asker in (foreign, other):
            for generation in guesses:
                assert reason(asker.detach(generation)) == "SEGMENT_NOT_FOUND"
                assert reason(asker.seal(generation)) == "SEGMENT_NOT_FOUND"
            for ids in ([made.generation], list(extents), [made.generation + 2]):
                assert reason(asker.release(*ids)) == "EXTENT_NOT_FOUND"
        for ids in ([made.generation], list(extents)):
            assert reason(own.release(*ids)) == "EXTENT_NOT_FOUND", "a segment's extents are nobody's to release"
        for name in (FULL_NAME, "tenants/red/models/-/segments/weights", "tenants/blue/models/-/segments/weights"):
            assert reason(other.delete(name)) == "SEGMENT_NOT_FOUND"
            assert reason(other.attach(name)) == "SEGMENT_NOT_FOUND"
        for generation in guesses:
            if generation not in (0, made.generation):
                assert reason(foreign.delete(FULL_NAME, generation)) == "SEGMENT_NOT_FOUND"
        assert reason(foreign.attach()) == "SEGMENT_NOT_SEALED"
        assert daemon.device().revision == before, "a refusal changed the books"
        assert (state(daemon), holders(daemon), daemon.books().lent_bytes) == ("WRITING", 1, SIZE)

        assert own.seal(made.generation).state == SegmentMessage.SEALED
        assert own.seal(made.generation).state == SegmentMessage.SEALED, "its writer may not have had the answer"
        assert foreign.attach().sessions == 2
        before = daemon.device().revision
        assert reason(foreign.seal(made.generation)) == "SEGMENT_NOT_WRITABLE"
        assert reason(foreign.release(*extents)) == "EXTENT_NOT_FOUND"
        assert daemon.device().revision == before
        assert foreign.detach(made.generation) == pb.DetachSegmentResponse()
        assert reason(foreign.detach(made.generation)) == "SEGMENT_NOT_FOUND", "one attach, two detaches"
        assert holders(daemon) == 1
        assert own.delete(FULL_NAME, made.generation).state == SegmentMessage.ENDING
        assert reason(own.delete()) == "SEGMENT_NOT_FOUND"


def test_an_attach_that_is_never_acknowledged_stops_nobody_else() -> None:
    """A client takes an attach's packets and says nothing: it gets two of three, and holds; the others go on."""
    with (
        running({"capacity": "140GiB"}) as daemon,
        clean(daemon),
        worker() as writer,
        worker() as reader,
        Session(daemon.endpoint()) as mute,
    ):
        write(writer, daemon, "handoff", 130 * GIB)
        writer.do("segment.seal()")
        request = pb.AttachSegmentRequest(name=FULL_NAME)
        mute.send(handoff_pb2.Frame(request_id=77, attach_segment=request))
        assert [mute.receive().frame.delivery.part for _ in range(2)] == [0, 1]
        for _ in range(3):
            attach(reader, daemon, "handoff")
            assert reads(reader)
            reader.do("segment.close(); client.close()")
        assert holders(daemon) == 2
        assert not is_readable(mute.sock)
        # Its hold is not one that it can end before the call is answered.
        detach = pb.DetachSegmentRequest(generation=segments(daemon)[0].generation)
        assert reason(mute.call(detach_segment=detach)) == "SEGMENT_NOT_FOUND"
        acknowledge(mute, 77, 0)
        assert mute.receive().frame.delivery.HasField("reply")
        assert mute.call(detach_segment=detach) == pb.DetachSegmentResponse()
        assert holders(daemon) == 1
        acknowledge(mute, 77, 1, 2)
        mute.send(handoff_pb2.Frame(request_id=78, attach_segment=request))
        assert mute.receive().frame.delivery.parts == 3
        writer.do("segment.delete(); segment.close()")
        assert state(daemon) == "ENDING", "it holds what it was sent a part of"


def acknowledge(session: Session, request_id: int, *parts: int) -> None:
    for part in parts:
        session.send(handoff_pb2.Frame(request_id=request_id, ack=handoff_pb2.Ack(part=part)))
