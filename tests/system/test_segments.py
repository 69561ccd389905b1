"""Segments between real processes: written by one, read by many, charged once, and outliving their writers.

Every test ends where it began: no segment, books of zero, the anchor and nothing else on the device, and as many
descriptors open in the daemon as before.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.raw import Asker, Session, info, is_readable, reason
from tests.support.sizes import GIB, MIB
from tests.support.workers import (
    ANCHOR_BYTES,
    PAGE,
    Worker,
    descriptors_at_start,
    is_gone,
    until_clean,
    worker,
    workers,
)

from membroker.v1 import broker_pb2 as pb
from membroker.v1 import handoff_pb2
from membroker.v1.resources_pb2 import Segment as SegmentMessage
from membroker.v1.resources_pb2 import Session as SessionMessage
from membroker.wire import frames as handoff

SIZE = 8 * MIB
FULL_NAME = "tenants/red/models/m/segments/weights"


@pytest.fixture
def hasty() -> Iterator[Daemon]:
    """A daemon that credits a death after one second. Which of two deaths freed memory is not always proven."""
    with running({"settle_seconds": 1.0}) as one:
        yield one


@contextmanager
def clean(daemon: Daemon) -> Iterator[None]:
    """A story that leaves nothing behind."""
    at_start = descriptors_at_start(daemon)
    yield
    until(lambda: not segments(daemon))
    until_clean(daemon, at_start)


def segments(daemon: Daemon) -> list[Any]:
    """Every segment, by the admin's list."""
    with daemon.admin_stub() as stub:
        return list(stub.ListSegments(pb.ListSegmentsRequest(page_size=1000)).segments)


def state(daemon: Daemon) -> str:
    """The state of the only segment; nothing if there is no segment."""
    return " ".join(SegmentMessage.State.Name(one.state) for one in segments(daemon))


def holders(daemon: Daemon) -> int:
    """How many sessions hold the only segment."""
    (one,) = segments(daemon)
    return int(one.sessions)


def device_used(daemon: Daemon) -> int:
    """What the device shows in use beyond the anchor."""
    return int(daemon.books().device_used_bytes) - ANCHOR_BYTES


def delete(daemon: Daemon) -> None:
    """Delete the segment as an operator does."""
    with daemon.admin_stub() as stub:
        stub.DeleteSegment(pb.DeleteSegmentRequest(name=FULL_NAME))


def write(one: Worker, daemon: Daemon, transport: str, size: int = SIZE, location: str = "device") -> Worker:
    """Have a worker make the segment and write to both its ends."""
    one.connect(daemon, transport=transport)
    one.do("model = client.register_model('m')")
    one.do(f"segment = model.create_segment('weights', {size}, {location!r})")
    one.do("segment.write(0, b'first'); segment.write(segment.size - 4, b'last')")
    return one


def attach(one: Worker, daemon: Daemon, transport: str, outage: float | None = None) -> Worker:
    """Have a worker attach the segment."""
    one.connect(daemon, transport=transport, outage=outage)
    one.do("segment = client.attach('weights')")
    return one


def wait_in_attach(one: Worker, daemon: Daemon, transport: str) -> Worker:
    """Have a worker attach the segment in a thread, which waits."""
    one.connect(daemon, transport=transport)
    one.do("attaching = Attaching(client.register_model('n'), client, 'weights')")
    assert one.ask("attaching.is_waiting()")
    return one


def reads(one: Worker) -> bool:
    """Say whether a worker reads what was written."""
    both = "[segment.read(0, 5).decode(), segment.read(segment.size - 4, 4).decode()]"
    return bool(one.ask(both) == ["first", "last"])


class SegmentAsker(Asker):
    """The requests about segments, by one transport."""

    def create(self, model: str, size: int = PAGE, segment_id: str = "weights", location: Any = 0) -> Any:
        """CreateSegment."""
        request = pb.CreateSegmentRequest(model=model, segment_id=segment_id, size_bytes=size, location=location)
        return self._ask("create_segment", "CreateSegment", request)

    def seal(self, generation: int) -> Any:
        """SealSegment."""
        return self._ask("seal_segment", "SealSegment", pb.SealSegmentRequest(generation=generation))

    def attach(self, name: str = FULL_NAME) -> Any:
        """AttachSegment, without waiting."""
        return self._ask("attach_segment", "AttachSegment", pb.AttachSegmentRequest(name=name))

    def detach(self, generation: int) -> Any:
        """DetachSegment."""
        return self._ask("detach_segment", "DetachSegment", pb.DetachSegmentRequest(generation=generation))

    def delete(self, name: str = FULL_NAME, generation: int = 0) -> Any:
        """DeleteSegment."""
        request = pb.DeleteSegmentRequest(name=name, generation=generation)
        return self._ask("delete_segment", "DeleteSegment", request)


# Sharing


def test_bytes_are_charged_once_however_many_have_them_mapped(daemon: Daemon, transport: str) -> None:
    """Three engines of one model: one loads the weights, two map the same memory. The books, the device and the
    metrics have it once, under the model and under no session.
    """
    with clean(daemon), workers(3) as (writer, *readers):
        write(writer, daemon, transport)
        writer.do("segment.seal()")
        for each in readers:
            attach(each, daemon, transport)
        assert all(reads(each) for each in (writer, *readers))
        assert holders(daemon) == 3
        assert daemon.books().lent_bytes == SIZE
        until(lambda: device_used(daemon) == SIZE)
        (model,) = daemon.models()
        assert (model.books[0].used_bytes, model.books[0].segment_bytes, model.books[0].extents) == (SIZE, SIZE, 1)
        assert [books.used_bytes for one in daemon.sessions() for books in one.books if books.used_bytes] == []
        assert [list(one.segments) for one in daemon.sessions()] == [[FULL_NAME]] * 3
        figures = re.findall(
            r"^membroker_(model_used_bytes|device_lent_bytes)\{.*device\"\S* (\S+)$", daemon.metrics(), re.M
        )
        assert {name: float(value) for name, value in figures} == dict.fromkeys(
            ("model_used_bytes", "device_lent_bytes"), SIZE
        )
        writer.do("segment.close()")
        readers[0].do("segment.close()")
        assert (holders(daemon), daemon.books().lent_bytes) == (1, SIZE)
        assert reads(readers[1])
        readers[1].do("segment.delete()")
        assert (state(daemon), daemon.books().lent_bytes) == ("ENDING", SIZE)
        readers[1].do("segment.close()")
        until(lambda: not segments(daemon))
        assert [each.finish() for each in (writer, *readers)] == [0, 0, 0]


def test_an_attach_waits_for_a_writer_in_another_process(daemon: Daemon, transport: str) -> None:
    """All ranks start at once, and the one that loads takes longest."""
    with clean(daemon), workers(3) as (writer, *readers):
        write(writer, daemon, transport)
        for each in readers:
            wait_in_attach(each, daemon, transport)
        writer.do("segment.write(0, b'first')")
        assert all(each.ask("attaching.is_waiting()") for each in readers)
        assert holders(daemon) == 1
        writer.do("segment.seal()")
        for each in readers:
            each.do("segment = attaching.result()")
            assert reads(each)
        writer.do("segment.delete()")


@pytest.mark.parametrize("end", ["killed", "goodbye", "close", "delete"])
def test_the_writers_end_is_told_to_all_who_wait(daemon: Daemon, transport: str, end: str) -> None:
    """Nothing will seal what it wrote: the waiting readers are told at once, and the bytes are free again."""
    with clean(daemon), workers(3) as (writer, *readers):
        write(writer, daemon, transport)
        for each in readers:
            wait_in_attach(each, daemon, transport)
        if end == "killed":
            writer.kill()
        else:
            writer.do({"goodbye": "client.close()", "close": "segment.close()", "delete": "segment.delete()"}[end])
        for each in readers:
            refused = each.refused("attaching.result()")
            assert (refused.error, refused.reason) == ("WriterDied", "WRITER_DIED")
            assert "weights" in refused.message
        if end == "delete":
            assert writer.ask("segment.read(0, 5).decode()") == "first"
            writer.do("segment.close()")
        until(lambda: not segments(daemon))
        until(lambda: daemon.books().lent_bytes == 0 == device_used(daemon))
        readers[0].do("again = client.register_model('m').create_segment('weights', '256MiB'); again.close()")


def test_a_writer_that_lost_its_connection_still_writes(hasty: Daemon, transport: str) -> None:
    """Its socket broke and its process lives: it may still seal by gRPC, so readers wait on, until it dies."""
    daemon = hasty
    with clean(daemon), workers(2) as (writer, reader):
        write(writer, daemon, transport)
        wait_in_attach(reader, daemon, transport)
        writer.do("import socket; client._session.connection._socket.shutdown(socket.SHUT_RDWR)")
        until(lambda: daemon.device().detached_sessions == 1)
        assert (state(daemon), holders(daemon)) == ("WRITING", 1)
        assert reader.ask("attaching.is_waiting()")
        writer.do("segment.write(0, b'still')")
        writer.kill()
        assert reader.refused("attaching.result()").error == "WriterDied"


def test_a_writer_without_a_connection_seals_by_grpc(daemon: Daemon) -> None:
    """Its token still does everything that brings no descriptors: seal, detach, delete."""
    with Session(daemon.endpoint()) as writer, worker() as reader:
        made = SegmentAsker(writer, "handoff").create(writer.register("m"), SIZE)
        wait_in_attach(reader, daemon, "handoff")
        writer.sock.shutdown(socket.SHUT_RDWR)
        until(lambda: daemon.device().detached_sessions == 1)
        asker = SegmentAsker(writer, "grpc")
        assert asker.seal(made.generation).state == SegmentMessage.SEALED
        assert reader.ask("attaching.result().read(0, 5) == bytes(5)")
        assert reason(asker.attach()) == "DELIVERY_FAILED"
        assert asker.detach(made.generation) == pb.DetachSegmentResponse()
        assert asker.delete().state == SegmentMessage.ENDING
        reader.do("client.close()")
        until(lambda: not segments(daemon))
        assert daemon.books().lent_bytes == 0
        assert [one.state for one in daemon.sessions()] == [SessionMessage.DETACHED], "it ends with this process"


# Deaths


def test_a_killed_reader_takes_nothing_from_the_others(hasty: Daemon, transport: str) -> None:
    """The out-of-memory killer takes one of three; its hold is gone, the memory is not."""
    daemon = hasty
    with clean(daemon), workers(3) as (writer, reader, other):
        write(writer, daemon, transport)
        writer.do("segment.seal()")
        attach(reader, daemon, transport)
        attach(other, daemon, transport)
        reader.kill()
        until(lambda: holders(daemon) == 2 and len(daemon.sessions()) == 2)
        assert reads(writer)
        assert reads(other)
        assert (daemon.books().lent_bytes, daemon.books().releasing_bytes) == (SIZE, 0)
        writer.do("segment.delete(); segment.close()")
        assert (state(daemon), daemon.books().lent_bytes) == ("ENDING", SIZE)
        other.kill()


def test_a_dead_readers_child_keeps_the_bytes_charged(daemon: Daemon, transport: str) -> None:
    """A reader is killed, and a child that was forked without the library's knowledge has the mapping still. The
    segment is deleted, and everybody else has left: only the device's own figure ends its charge.
    """
    with clean(daemon), workers(3) as (writer, reader, other):
        write(writer, daemon, transport)
        writer.do("segment.seal()")
        attach(reader, daemon, transport)
        child = reader.ask("fork_unseen()")
        try:
            reader.kill()
            until(lambda: holders(daemon) == 1)
            writer.do("segment.delete(); segment.close()")
            until(lambda: state(daemon) == "RELEASING")
            books = daemon.books()
            assert (books.lent_bytes, books.releasing_bytes) == (0, SIZE)
            other.connect(daemon, transport=transport)
            other.do("model = client.register_model('n')")
            assert other.refused("model.allocate('250MiB')").numbers == ("capacity", 250 * MIB, 248 * MIB, 256 * MIB)
            refused = other.refused("client.register_model('m').create_segment('weights', 1)")
            assert (refused.error, refused.metadata["state"]) == ("SegmentExists", "releasing")
            assert device_used(daemon) == SIZE
            assert state(daemon) == "RELEASING", "credited while a child still held it"
            assert not is_gone(child)
        finally:
            os.kill(child, signal.SIGKILL)
        until(lambda: not segments(daemon))
        assert "proven=false" not in daemon.log()
        other.do("model.allocate('256MiB').close()")


def test_the_daemon_is_killed_and_readers_read_on(transport: str) -> None:
    """The daemon's end is not the memory's: what is mapped stays, can be read, and is closed without an error."""
    with running() as daemon, workers(2) as (writer, reader):
        write(writer, daemon, transport)
        writer.do("segment.seal()")
        attach(reader, daemon, transport, outage=0)
        daemon.kill()
        assert reads(writer)
        assert reads(reader)
        assert reader.refused("client.attach('weights')").error == "BrokerUnavailable"
        for each in (writer, reader):
            each.do("segment.close(); client.close()")
            assert each.finish() == 0


# Life


@pytest.mark.parametrize("end", ["goodbye", "exit", "killed"])
def test_a_segment_outlives_its_writer(daemon: Daemon, transport: str, end: str) -> None:
    """A loader has done its work and ends; engines that start later attach what it left, charged and held by nobody."""
    with clean(daemon):
        with worker() as writer:
            write(writer, daemon, transport)
            writer.do("segment.seal()")
            if end == "killed":
                writer.kill()
            elif end == "goodbye":
                writer.do("client.close()")
            else:
                assert writer.finish() == 0
            until(lambda: not daemon.sessions())
        assert (state(daemon), holders(daemon), daemon.books().lent_bytes) == ("SEALED", 0, SIZE)
        with worker() as reader:
            attach(reader, daemon, transport)
            assert reads(reader)
            assert reader.ask("[one.sessions for one in client.segments()]") == [1]
            reader.do("segment.close(); client.delete_segment('m/weights')")


def test_a_deleted_segment_stays_with_who_has_it(daemon: Daemon, transport: str) -> None:
    """New weights are coming: the old ones are deleted under readers that finish with them."""
    with clean(daemon), workers(3) as (writer, reader, late):
        write(writer, daemon, transport)
        writer.do("segment.seal()")
        attach(reader, daemon, transport)
        delete(daemon)
        late.connect(daemon, transport=transport)
        assert late.refused("client.attach('weights')").error == "SegmentNotFound"
        refused = late.refused("client.register_model('m').create_segment('weights', 1)")
        assert (refused.error, refused.metadata["state"]) == ("SegmentExists", "ending")
        assert reads(reader)
        writer.do("segment.close()")
        assert (state(daemon), daemon.books().lent_bytes) == ("ENDING", SIZE)
        reader.do("view = segment.view(); segment.close()")
        assert state(daemon) == "ENDING", "a view still has it"
        reader.do("del view")
        until(lambda: not segments(daemon))
        late.do("again = client.register_model('m').create_segment('weights', 1)")
        assert late.ask("again.read(0, 5) == bytes(5)")


def test_a_large_segment_comes_in_packets(transport: str) -> None:
    """130 GiB are 130 extents, three packets: more than a window. Its seams are seen by nobody.

    Nothing of it is touched but eight bytes at each seam, so it costs no memory.
    """
    with running({"capacity": "140GiB"}) as daemon, clean(daemon), workers(2) as (writer, reader):
        size = 130 * GIB
        write(writer, daemon, transport, size)
        marks = (
            "marks = {at - 4: at.to_bytes(8, 'little') for at in range(1 << 30, segment.size, 1 << 30)}\n"
            "assert len(marks) == 129\n"
        )
        writer.do(marks + "for at, mark in marks.items(): segment.write(at, mark)\nsegment.seal()")
        (one,) = segments(daemon)
        assert (one.size_bytes, one.extents) == (size, 130)
        attach(reader, daemon, transport)
        reader.do(marks + "for at, mark in marks.items(): assert segment.read(at, 8) == mark, at")
        assert reads(reader)
        assert reader.ask("len([name for name in os.listdir('/proc/self/fd')]) < 40")
        assert daemon.books().lent_bytes == size
        reader.do("segment.delete(); segment.close()")
        writer.do("segment.close()")


def test_a_segment_of_host_memory(transport: str) -> None:
    """Weights that are swapped in and out lie in host memory, with a capacity, books and limits of its own."""
    tenants = {"red": {"host_limit": "32MiB"}}
    with (
        running({"host_capacity": "64MiB", "settle_seconds": 1.0, "tenants": tenants}) as daemon,
        clean(daemon),
        workers(2) as both,
    ):
        writer, reader = both
        write(writer, daemon, transport, location="host")
        writer.do("segment.seal()")
        attach(reader, daemon, transport)
        assert reads(reader)
        assert [each.ask("segment.location") for each in both] == ["host", "host"]
        assert [books.lent_bytes for books in daemon.device().locations] == [0, SIZE]
        until(lambda: [books.device_used_bytes for books in daemon.device().locations] == [ANCHOR_BYTES, SIZE])
        refused = writer.refused("model.create_segment('other', '26MiB', 'host')")
        assert refused.numbers == ("tenant", 26 * MIB, 24 * MIB, 32 * MIB)
        assert refused.metadata["location"] == "host"
        reader.kill()
        writer.do("segment.delete(); segment.close()")


def test_two_hundred_lives_leave_no_descriptor(daemon: Daemon, transport: str) -> None:
    """A service that makes and drops segments all day: the daemon keeps nothing of those that are gone."""
    lives = (
        "for turn in range(200):\n"
        "    segment = model.create_segment(f's{turn}', 1)\n"
        "    segment.write(0, b'x'); segment.seal()\n"
        "    attached = client.attach(f's{turn}')\n"
        "    assert attached.read(0, 1) == b'x'\n"
        "    segment.close(); attached.delete(); attached.close()\n"
    )
    with clean(daemon), worker() as one:
        one.connect(daemon, transport=transport).do("model = client.register_model('m')")
        one.do(lives)
        until(lambda: not segments(daemon))
        assert daemon.books().lent_bytes == 0
        until(lambda: device_used(daemon) == 0)
        one.do("client.close()")


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
            anew = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
            with pytest.raises(PermissionError):
                mmap.mmap(anew, SIZE)
            mapping = mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED, mmap.PROT_READ)
            assert mapping[:5] == b"first"
            handoff.close_all([anew, descriptor])
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
