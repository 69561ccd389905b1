"""Segments: their limits, their seal, and what a session cannot do to a segment that it does not hold."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest
from tests.support.daemons import Daemon, running
from tests.support.raw import Session, info, reason
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
from tests.support.workers import (
    PAGE,
    worker,
)

from membroker.v1 import broker_pb2 as pb
from membroker.wire import frames as handoff

# Limits


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
