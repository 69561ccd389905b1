"""Segments between real processes: written by one, read by many, charged once, and outliving their writers.

And their limits and their seal. Every test ends where it began: no segment, books of zero, the anchor and nothing else
on the device, and as many descriptors open in the daemon as before.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.daemons import Daemon, running, until
from tests.support.raw import Asker, Session, info, reason
from tests.support.sizes import GIB, MIB
from tests.support.workers import (
    PAGE,
    Worker,
    descriptors_at_start,
    until_clean,
    worker,
    workers,
)

from membroker.v1 import broker_pb2 as pb
from membroker.v1.resources_pb2 import Segment as SegmentMessage
from membroker.v1.resources_pb2 import Session as SessionMessage

SIZE = 8 * MIB
FULL_NAME = "tenants/red/models/m/segments/weights"


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


def write(
    one: Worker, daemon: Daemon, transport: str = "handoff", *, size: int = SIZE, location: str = "device"
) -> Worker:
    """Have a worker make the segment and write to both its ends."""
    one.connect(daemon, transport=transport)
    one.do("model = client.model('m')")
    one.do(f"segment = model.create_segment('weights', {size}, {location!r})")
    one.do("segment.write(0, b'first'); segment.write(segment.size - 4, b'last')")
    return one


def attach(one: Worker, daemon: Daemon, transport: str = "handoff") -> Worker:
    """Have a worker attach the segment."""
    one.connect(daemon, transport=transport)
    one.do("segment = client.attach('weights')")
    return one


def wait_in_attach(one: Worker, daemon: Daemon) -> Worker:
    """Have a worker attach the segment in a thread, which waits."""
    one.connect(daemon)
    one.do("attaching = Attaching(client.model('n'), client, 'weights')")
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


def test_a_writer_without_a_connection_seals_by_grpc(daemon: Daemon) -> None:
    """Its token still does everything that brings no descriptors: seal, detach, delete."""
    with Session(daemon.endpoint()) as writer, worker() as reader:
        made = SegmentAsker(writer, "handoff").create(writer.register("m"), SIZE)
        wait_in_attach(reader, daemon)
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


# Life


def test_a_large_segment_comes_in_packets(transport: str) -> None:
    """130 GiB are 130 extents, three packets: more than a window. Its seams are seen by nobody.

    Nothing of it is touched but eight bytes at each seam, so it costs no memory.
    """
    with running({"capacity": "140GiB"}) as daemon, clean(daemon), workers(2) as (writer, reader):
        size = 130 * GIB
        write(writer, daemon, transport, size=size)
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


# Limits


def test_the_broker_keeps_only_so_many_extents() -> None:
    """With few descriptors of its own the daemon refuses a segment that would need too many, and serves on."""
    config = {"capacity": "400GiB", "max_sessions": 2}
    with running(config, descriptors=512) as daemon, clean(daemon), worker() as one:
        one.connect(daemon).do("model = client.model('m')")
        refused = one.refused("model.create_segment('weights', '300GiB')")
        assert (refused.error, refused.reason) == ("TooMany", "TOO_MANY_SEGMENTS")
        limit = int(refused.metadata["limit"])
        assert 64 < limit < 256
        one.do(f"segment = model.create_segment('weights', '{limit}GiB')")
        assert one.refused("model.create_segment('other', 1)").reason == "TOO_MANY_SEGMENTS"
        one.do("segment.close()")


# Nobody writes to what is sealed


def test_a_writer_that_spoils_its_own_seal_harms_nobody(daemon: Daemon) -> None:
    """It forbids further seals on its descriptor, so that the broker cannot seal: the segment stays what it was,
    readers wait on, and it is given up like any other.
    """
    with clean(daemon), Session(daemon.endpoint()) as session, worker() as reader:
        asker = SegmentAsker(session, "handoff")
        request = pb.CreateSegmentRequest(model=session.register("m"), segment_id="weights", size_bytes=PAGE)
        made, _, (descriptor,) = session.take(create_segment=request)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        wait_in_attach(reader, daemon)
        for _ in range(2):
            refused = asker.seal(made.generation)
            assert reason(refused) == "DRIVER_FAILED"
            assert "EPERM" in info(refused).metadata["driver_says"]
        assert (state(daemon), holders(daemon)) == ("WRITING", 1)
        assert reader.ask("attaching.is_waiting()")
        os.close(descriptor)
        assert asker.detach(made.generation) == pb.DetachSegmentResponse()
        assert reader.refused("attaching.result()").error == "WriterDied"
