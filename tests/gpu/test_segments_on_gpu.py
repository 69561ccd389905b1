"""Segments on a real GPU: written once, sealed, read in place by other processes, and free when the GPU shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.daemons import Daemon, until
from tests.support.gpu import enter, on_gpu, states, until_lendable
from tests.support.sizes import GIB, MIB
from tests.support.workers import worker, workers

from membroker.v1 import broker_pb2, resources_pb2
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("gpu")]

State = Callable[[str, str], None]


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
