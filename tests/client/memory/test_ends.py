"""Ends that fail or come amid a call, of a source in this process: nothing is forgotten, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.support.daemons import until
from tests.support.driver_errors import fail_once, named
from tests.support.fake_lender import PAGE, FlakyDriver
from tests.support.host_driver import used
from tests.support.sizes import MIB
from tests.support.threads import together

from membroker import VirtualMemoryPool
from membroker.errors import ClosedError, DeviceFailure, ProtocolError
from membroker.memory.buffer import Buffer
from membroker.memory.lifetime import MappedMemory, Placing
from membroker.memory.local_source import PACKET, LocalSource
from membroker.vmm.host.driver import HostDriver


@pytest.mark.parametrize(
    ("call", "number", "left"), [("synchronize", 1, 8), ("unmap", 1, 8), ("unmap", 2, 6), ("unreserve", 1, 0)]
)
def test_what_could_not_be_given_back_is_held_until_it_is_closed_again(
    driver: FlakyDriver, call: str, number: int, left: int
) -> None:
    """A pool of two runs, of 2 and 6 MiB: what is unmapped is credited, and the rest is not forgotten."""
    with LocalSource(driver) as source:
        pool = VirtualMemoryPool(source, 64 * MIB, PAGE)
        pool.allocate(0, 2 * MIB)
        pool.allocate(16 * MIB, 6 * MIB)
        fail_once(driver, call, number)
        with pytest.raises(DeviceFailure, check=named("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")):
            pool.close()
        assert pool.closed
        assert source.physical_usage_bytes == used(driver) == left * MIB
        with pytest.raises(ClosedError):
            pool.allocate(0, PAGE)
        together([pool.close])  # another thread can, too
        assert source.physical_usage_bytes == used(driver) == 0


def test_what_an_allocation_could_not_take_back_is_spare(driver: FlakyDriver) -> None:
    """Memory comes for the first packet and not for the second: it is charged, can be used, and goes back."""
    with LocalSource(driver) as source:
        with VirtualMemoryPool(source, 2 * PACKET * PAGE, PAGE) as pool:
            fail_once(driver, "lend", 2)
            for _ in range(2):  # it is tried again
                fail_once(driver, "unmap")
            with pytest.raises(DeviceFailure, check=named("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")):
                pool.allocate(0, (PACKET + 1) * PAGE)
            assert source.physical_usage_bytes == used(driver) == pool.physical_usage_bytes == PACKET * PAGE
            pool.allocate(0, PACKET * PAGE)
        assert source.physical_usage_bytes == used(driver) == 0


def test_what_garbage_could_not_give_back_goes_with_the_next_that_can(
    driver: FlakyDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has it any more to close it again."""
    with LocalSource(driver) as source:
        buffer, other = Buffer(source, PAGE), Buffer(source, 2 * PAGE)
        fail_once(driver, "synchronize")
        del buffer
        until(lambda: "CAPTURE" in caplog.text)
        assert source.physical_usage_bytes == used(driver) == 3 * PAGE
        other.close()
        until(lambda: source.physical_usage_bytes == used(driver) == 0)


def test_a_source_that_could_not_end_all_is_closed_again(driver: FlakyDriver, caplog: pytest.LogCaptureFixture) -> None:
    source = LocalSource(driver)
    buffers = [Buffer(source, PAGE) for _ in range(3)]
    fail_once(driver, "unmap")
    source.close()
    assert "could not release" in caplog.text
    assert all(buffer.closed for buffer in buffers)
    until(lambda: used(driver) in (0, PAGE))  # the next one's end may have taken it along
    source.close()
    until(lambda: used(driver) == 0)


def test_more_extents_than_were_requested_are_refused(driver: HostDriver) -> None:
    """A broker with a bug delivers another one: nothing of that packet is mapped."""
    memory = MappedMemory(LocalSource(driver), driver, 2 * PAGE, "buffer")
    with pytest.raises(ProtocolError):
        Placing(memory, [0, PAGE]).place([1, 2, 3], [-1, -1, -1], PAGE)
    assert not memory.region.extents
    memory.end()


@pytest.mark.parametrize("take", [MappedMemory.view, MappedMemory.span])
def test_memory_that_ends_while_a_view_is_made_has_none(driver: HostDriver, take: Callable[..., object]) -> None:
    """Another thread closes it after the first look. The second look has the lock."""
    memory = MappedMemory(LocalSource(driver), driver, PAGE, "buffer")
    lock = memory._lock

    @contextmanager
    def closed_before() -> Iterator[None]:
        memory._lock = lock
        memory.end()
        yield

    memory._lock = closed_before()
    with pytest.raises(ClosedError):
        take(memory, memory, 0, PAGE)
