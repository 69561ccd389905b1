"""Segments between real processes: in many packets, at the broker's own limit, and sealed in odd ways.

Their rules are in the transcripts `segment_*`. Every test ends where it began: no segment, books of zero, the anchor
and nothing else on the device, and as many descriptors open in the daemon as before.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.daemons import Daemon, running, until
from tests.support.raw import Session, info, reason, segment_of
from tests.support.sizes import GIB
from tests.support.workers import PAGE, Worker, descriptors_at_start, until_clean, worker, workers

from membroker.v1 import broker_pb2 as pb
from membroker.v1.resources_pb2 import Segment as SegmentMessage


@contextmanager
def clean(daemon: Daemon) -> Iterator[None]:
    """A story that leaves nothing behind."""
    at_start = descriptors_at_start(daemon)
    yield
    until(lambda: not segments(daemon))
    until_clean(daemon, at_start)


def segments(daemon: Daemon) -> list[Any]:
    with daemon.admin_stub() as stub:
        return list(stub.ListSegments(pb.ListSegmentsRequest(page_size=1000)).segments)


def wait_in_attach(one: Worker, daemon: Daemon) -> None:
    one.connect(daemon).do("attaching = Attaching(client.model('n'), client, 'weights')")
    assert one.ask("attaching.is_waiting()")


def test_a_large_segment_comes_in_packets(transport: str) -> None:
    """130 extents are three packets, more than a window. Only eight bytes at each seam are touched."""
    with running({"capacity": "140GiB"}) as daemon, clean(daemon), workers(2) as (writer, reader):
        marks = "marks = {at - 4: at.to_bytes(8, 'little') for at in range(1 << 30, segment.size, 1 << 30)}"
        writer.connect(daemon, transport=transport)
        writer.do(f"segment = client.model('m').create_segment('weights', {130 * GIB}); {marks}")
        writer.do("for at, mark in marks.items(): segment.write(at, mark)")
        writer.do("segment.write(segment.size - 4, b'last'); segment.seal()")
        (one,) = segments(daemon)
        assert (one.size_bytes, one.extents) == (130 * GIB, 130)
        reader.connect(daemon, transport=transport)
        reader.do(f"segment = client.attach('weights'); {marks}; assert len(marks) == 129")
        reader.do("for at, mark in marks.items(): assert segment.read(at, 8) == mark, at")
        assert reader.ask("segment.read(segment.size - 4, 4).decode()") == "last"
        assert reader.ask("len([name for name in os.listdir('/proc/self/fd')]) < 40")
        assert daemon.books().lent_bytes == 130 * GIB
        reader.do("segment.delete(); segment.close()")
        writer.do("segment.close()")


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


def test_a_writer_that_spoils_its_own_seal_harms_nobody(daemon: Daemon) -> None:
    """It forbids further seals on its descriptor: readers wait on, and the segment is given up like any other."""
    with clean(daemon), Session(daemon.endpoint()) as session, worker() as reader:
        made, _, (descriptor,) = session.take(create_segment=segment_of(session.register("m"), "weights", PAGE))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        wait_in_attach(reader, daemon)
        for _ in range(2):
            refused = session.call(seal_segment=pb.SealSegmentRequest(generation=made.generation))
            assert reason(refused) == "DRIVER_FAILED"
            assert "EPERM" in info(refused).metadata["driver_says"]
        assert [(one.state, one.sessions) for one in segments(daemon)] == [(SegmentMessage.WRITING, 1)]
        assert reader.ask("attaching.is_waiting()")
        os.close(descriptor)
        detach = pb.DetachSegmentRequest(generation=made.generation)
        assert session.call(detach_segment=detach) == pb.DetachSegmentResponse()
        assert reader.refused("attaching.result()").error == "WriterDied"
