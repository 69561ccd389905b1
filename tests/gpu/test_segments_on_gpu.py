"""Segments on a real GPU: written once, sealed, read in place by other processes, and free when the GPU shows it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from tests.support.daemons import Daemon, until
from tests.support.gpu import SLACK, at_rest, enter, milliseconds, on_gpu, states, until_lendable, used
from tests.support.sizes import GIB, MIB
from tests.support.workers import worker, workers

from membroker.v1 import broker_pb2, resources_pb2
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("gpu")]

State = Callable[[str, str], None]
EXTENTS = 16
"""Of a large segment, 1 GiB each."""


def segment_states(daemon: Daemon) -> list[str]:
    with daemon.admin_stub() as stub:
        listed = stub.ListSegments(broker_pb2.ListSegmentsRequest()).segments
    return [resources_pb2.Segment.State.Name(one.state) for one in listed]


def write(size: int, seed: int = 7) -> str:
    """The lines of a worker that writes a segment of `size` bytes and does not seal it."""
    return f"segment = model.create_segment('weights', {size}); write_blocks(segment, {seed})"


READ = "segment = client.attach('m/weights', timeout=60)"
DIGEST = "digest(segment, driver)"


def test_a_segment_is_written_sealed_and_read_by_others(gpu: CudaDriver, transport: str) -> None:
    """A reader waits for the seal; then three processes have the same bytes, charged once, and none can change them."""
    size = 256 * MIB
    with on_gpu(gpu) as daemon, workers(3) as (writer, reader, late), worker() as foreign:
        for each in (writer, reader, late):
            enter(each, daemon, transport=transport)
        enter(foreign, daemon, "blue", transport)
        writer.do(write(size))
        reader.begin(READ)
        until(lambda: "WRITING" in segment_states(daemon))
        written = writer.ask(DIGEST)
        writer.do("segment.seal()")
        reader.result()
        late.do(READ)
        assert [reader.ask(DIGEST), late.ask(DIGEST), writer.ask(DIGEST)] == [written] * 3
        for each in (writer, reader, late):
            assert each.refused("driver.write(segment.address, b'x')").error == "DriverError"
            assert each.refused("segment.write(0, b'x')").error == "SegmentNotWritable"
        assert reader.ask(DIGEST) == written
        assert foreign.refused("client.attach('m/weights', timeout=0)").error == "SegmentNotFound"
        assert daemon.books().lent_bytes == size
        (model,) = [each for each in daemon.models() if each.name == "tenants/red/models/m"]
        assert model.books[0].used_bytes == size, "charged once for each reader"
        writer.do("client.close()")
        late.do("segment.close()")
        assert reader.ask(DIGEST) == written
        reader.do("segment.delete(); client.close()")
        until_lendable(daemon)


def test_a_large_segment_of_many_extents_is_attached_elsewhere(gpu: CudaDriver, state: State) -> None:
    """Extents of 1 GiB, side by side in three processes, with the same sums over all of their bytes."""
    size = EXTENTS * GIB
    with on_gpu(gpu, {"capacity": size + GIB}) as daemon, workers(3) as (writer, *readers):
        for each in (writer, *readers):
            enter(each, daemon)
            # What torch loads for its sums grows the context once: do that before anything is measured.
            each.do("warm = model.allocate('8MiB'); digest(warm, driver) if torch_on_the_gpu() else 0; warm.close()")
        rest = at_rest(lambda: used(gpu))
        began = time.monotonic()
        writer.do(write(size))
        wrote = time.monotonic() - began
        writer.do("segment.seal()")
        written = writer.ask(DIGEST)
        times = []
        for each in readers:
            began = time.monotonic()
            each.do(READ)
            times.append(time.monotonic() - began)
        assert [each.ask(DIGEST) for each in readers] == [written] * 2
        for number in range(1, EXTENTS):  # across each seam: the end of one block, and the offset of the next
            seam = number * GIB
            read = f"segment.read({seam - 4}, 12).hex()"
            theirs = writer.ask("segment.read(64 * MIB - 4, 4).hex()") + seam.to_bytes(8, "little").hex()
            assert {each.ask(read) for each in (writer, *readers)} == {theirs}
        assert daemon.books().lent_bytes == size
        assert used(gpu) <= rest + size * 3 // 2, "there is more than one copy of it, beside the readers' contexts"
        writer.do("segment.delete(); client.close()")
        assert daemon.books().lent_bytes == size
        for each in readers:
            assert each.ask(DIGEST) == written, "it stays mapped where it is"
            each.do("segment.close()")
        until_lendable(daemon)
        for each in readers:
            each.do("client.close()")
    state(f"a segment of {EXTENTS} GiB, written from the host", f"{EXTENTS / wrote:.1f} GiB/s")
    state(f"attach of {EXTENTS} extents of 1 GiB, in two readers", milliseconds(times))


def test_a_sealed_segment_outlives_its_killed_writer(gpu: CudaDriver) -> None:
    """The broker keeps it. A worker that attaches later reads the same bytes; deleting the segment frees them."""
    size = GIB
    with on_gpu(gpu) as daemon, workers(2) as (writer, reader):
        for each in (writer, reader):
            enter(each, daemon)
        writer.do(f"{write(size)}; segment.seal()")
        written = writer.ask(DIGEST)
        writer.kill()
        until(lambda: states(daemon) == ["OPEN"])
        assert segment_states(daemon) == ["SEALED"]
        assert daemon.books().lent_bytes == size
        reader.do(READ)
        assert reader.ask(DIGEST) == written
        reader.do("segment.delete(); segment.close()")
        until_lendable(daemon)
        reader.do("client.close()")


def test_a_killed_readers_child_keeps_a_deleted_segment_charged(gpu: CudaDriver, state: State) -> None:
    """A child that was forked behind Python's back has it mapped: the bytes are not lent again until the GPU shows
    them free.
    """
    size = 2 * GIB
    with on_gpu(gpu, {"settle_seconds": 60.0}) as daemon, workers(2) as (writer, reader):
        for each in (writer, reader):
            enter(each, daemon)
        writer.do(f"{write(size)}; segment.seal(); segment.close()")
        reader.do(READ)
        held = at_rest(lambda: used(gpu))
        child = reader.ask("fork_unseen()")
        try:
            reader.kill()
            until(lambda: "OPEN" in states(daemon) and len(states(daemon)) == 1)
            writer.do("client.delete_segment('m/weights')")
            until(lambda: daemon.books().releasing_bytes == size)
            assert segment_states(daemon) == ["RELEASING"]
            with worker() as stranger:
                enter(stranger, daemon, "blue")
                stranger.kill()
            at_rest(lambda: used(gpu))
            assert daemon.books().releasing_bytes == size, "credited while a child still held it"
            assert used(gpu) >= held - SLACK
        finally:
            os.kill(child, signal.SIGKILL)
        began = time.monotonic()
        until_lendable(daemon)
        state("from SIGKILL of a reader's child until 2 GiB are lendable", milliseconds([time.monotonic() - began]))
        assert used(gpu) <= held - size + SLACK
        assert "proven=false" not in daemon.log()
        writer.do("client.close()")
