"""The driver thread: what it makes it hands over whole, or nothing of it is left; and nothing ends it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from membroker.handoff import close_all
from membroker.vmm import DriverError, DriverLimit, DriverOutOfMemory, Handle, Location, MemoryInfo
from membroker.vmm.host import HostDriver
from membrokerd.core.denied import Reason
from membrokerd.core.effects import Make
from membrokerd.executor import Executor, Failure, Figures

MIB = 1 << 20
PAGE = 2 * MIB
TOTAL = 64 * MIB


class Failing(HostDriver):
    """A device whose call of this name raises at its k-th time."""

    def __init__(self) -> None:
        super().__init__(TOTAL, TOTAL)
        self.call, self.left, self.failure = "", 0, Exception()

    def fail(self, call: str, at: int, failure: Exception) -> None:
        self.call, self.left, self.failure = call, at, failure

    def _count(self, call: str) -> None:
        if call == self.call:
            self.left -= 1
            if not self.left:
                raise self.failure

    def create(self, size: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> Handle:
        self._count("create")
        return super().create(size, location, sealable=sealable)

    def export(self, handle: Handle) -> int:
        self._count("export")
        return super().export(handle)

    def release(self, handle: Handle) -> None:
        super().release(handle)
        self._count("release")

    def seal(self, descriptor: int) -> None:
        self._count("seal")
        super().seal(descriptor)

    def memory(self, location: Location) -> MemoryInfo:
        self._count("memory")
        return super().memory(location)


@pytest.fixture
def driver() -> Iterator[Failing]:
    one = Failing()
    one.release(one.create(PAGE))  # the driver's inotify descriptor is made before anything is counted
    assert one.memory(Location.DEVICE).used == 0
    yield one
    one.close()


def packet(count: int, size: int = PAGE, location: Any = "device", segment: int = 0) -> Make:
    return Make(1, 7, 0, 1, range(100, 100 + count), size, location, segment)


def run(driver: HostDriver, *work: Callable[[Executor, Callable[[Any], None]], None], reserve: int = 0) -> list[Any]:
    """Run each piece of work on a started executor and return what it was told, in the order of the answers."""

    async def main() -> list[Any]:
        executor = Executor(driver, reserve)
        executor.start(asyncio.get_running_loop())
        answers: asyncio.Queue[Any] = asyncio.Queue()
        try:
            for piece in work:
                piece(executor, answers.put_nowait)
            return [await asyncio.wait_for(answers.get(), 10) for _ in work]
        finally:
            executor.stop()

    return asyncio.run(main())


def makes(make: Make) -> Callable[[Executor, Callable[[Any], None]], None]:
    return lambda executor, done: executor.make(make, done)


def looks(executor: Executor, done: Callable[[Figures], None]) -> None:
    executor.look(done)


def seals(descriptors: list[int]) -> Callable[[Executor, Callable[[Any], None]], None]:
    return lambda executor, done: executor.seal(descriptors, done)


def closes(descriptors: list[int]) -> Callable[[Executor, Callable[[Any], None]], None]:
    return lambda executor, done: executor.close(descriptors, done)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_packet_is_made_in_order_and_nothing_is_kept(driver: Failing) -> None:
    """Descriptors come back, one for each id; once they are closed the device shows every byte free again."""
    before = descriptors()
    (made,) = run(driver, makes(packet(5)))
    assert len(set(made)) == 5
    assert all(os.fstat(one).st_size == PAGE for one in made)
    assert not any(os.get_inheritable(one) for one in made)
    assert driver.memory(Location.DEVICE).used == 5 * PAGE
    close_all(made)
    assert driver.memory(Location.DEVICE).used == 0
    assert descriptors() == before


def test_the_gate_refuses_before_anything_is_created(driver: Failing) -> None:
    """The books allow it and a stranger fills the card: DEVICE_FULL with the numbers, and not one create."""
    driver.stranger_bytes = TOTAL - 4 * PAGE
    driver.fail("create", 1, AssertionError("the gate stands before every create"))
    (failure,) = run(driver, makes(packet(3)), reserve=2 * PAGE)
    assert failure.reason is Reason.DEVICE_FULL
    assert failure.numbers["requested_bytes"] == 3 * PAGE
    assert failure.numbers["device_free_bytes"] == 4 * PAGE
    assert failure.numbers["available_bytes"] == 2 * PAGE
    assert failure.numbers["reserve_bytes"] == 2 * PAGE


def test_the_gate_lets_exactly_what_fits_through(driver: Failing) -> None:
    driver.stranger_bytes = TOTAL - 4 * PAGE
    (made,) = run(driver, makes(packet(2)), reserve=2 * PAGE)
    close_all(made)
    assert len(made) == 2


FAILURES = [
    (Reason.DEVICE_FULL, DriverOutOfMemory("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", 2)),
    (Reason.DESCRIPTORS_EXHAUSTED, DriverLimit("inotify_add_watch", "ENOSPC", errno.ENOSPC)),
    (Reason.DRIVER_FAILED, DriverError("cuMemCreate", "CUDA_ERROR_UNKNOWN", 999)),
    (Reason.DESCRIPTORS_EXHAUSTED, OSError(errno.EMFILE, "Too many open files")),
    (Reason.DRIVER_FAILED, OSError(errno.EIO, "I/O error")),
    (Reason.INTERNAL, ValueError("a bug of the driver's own")),
]


@pytest.mark.parametrize(("why", "failure"), FAILURES, ids=[str(failure) for _, failure in FAILURES])
@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("call", ["create", "export", "release"])
def test_a_failure_at_the_kth_call_leaves_nothing(
    driver: Failing, call: str, at: int, why: Reason, failure: Exception
) -> None:
    """Whatever fails, and wherever: nothing is open, nothing is used, and the next packet is made."""
    before = descriptors()
    driver.fail(call, at, failure)
    refused, made = run(driver, makes(packet(5)), makes(packet(1)))
    assert isinstance(refused, Failure)
    assert refused.reason is why
    assert refused.numbers["requested_bytes"] == 5 * PAGE
    close_all(made)
    assert len(made) == 1
    assert descriptors() == before
    assert driver.memory(Location.DEVICE).used == 0


@pytest.mark.parametrize("failure", [DriverError("nvmlDeviceGetMemoryInfo", "NVML_ERROR_GPU_IS_LOST", 15), KeyError(1)])
def test_a_device_that_cannot_be_asked_does_not_end_the_thread(driver: Failing, failure: Exception) -> None:
    """NVML fails during an audit: the figures are absent, and the thread, which everybody needs, works on."""
    driver.fail("memory", 1, failure)
    absent, made, figures = run(driver, looks, makes(packet(1)), looks)
    assert set(absent.values()) == {None}
    close_all(made)
    assert figures["device"].used == PAGE


def test_a_gate_that_cannot_ask_creates_nothing(driver: Failing) -> None:
    driver.fail("memory", 1, DriverError("nvmlDeviceGetMemoryInfo", "NVML_ERROR_GPU_IS_LOST", 15))
    (failure,) = run(driver, makes(packet(1)))
    assert failure.reason is Reason.DRIVER_FAILED
    assert "GPU_IS_LOST" in failure.numbers["driver_says"]
    assert driver.memory(Location.DEVICE).used == 0


def test_answers_come_in_the_order_of_the_jobs(driver: Failing) -> None:
    """A look that is asked for behind a packet sees the packet."""
    first, seen, second, last = run(driver, makes(packet(2)), looks, makes(packet(3, location="host")), looks)
    close_all(first + second)
    assert seen["device"].used == 2 * PAGE
    assert (seen["host"].used, last["host"].used) == (0, 3 * PAGE)


def test_only_a_segments_extents_can_be_sealed(driver: Failing) -> None:
    """A private extent is sealed at its birth against every later seal: nobody can end its owner's writing."""
    private, shared = run(driver, makes(packet(1)), makes(packet(1, segment=9)))
    assert fcntl.fcntl(private[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    assert not fcntl.fcntl(shared[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    close_all(private + shared)


def test_a_seal_is_of_every_extent_and_closes_nothing(driver: Failing) -> None:
    """Who maps it from now on cannot write; sealing it again changes nothing."""
    (made,) = run(driver, makes(packet(3, segment=9)))
    assert run(driver, seals(made), seals(made), seals([])) == [None, None, None]
    for descriptor in made:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, PAGE)
        mmap.mmap(descriptor, PAGE, prot=mmap.PROT_READ).close()
    close_all(made)
    assert driver.memory(Location.DEVICE).used == 0


@pytest.mark.parametrize(
    ("why", "failure"),
    [
        (Reason.DRIVER_FAILED, DriverError("fcntl", "EIO", errno.EIO)),
        (Reason.INTERNAL, ValueError("a bug of the driver's own")),
    ],
    ids=str,
)
def test_a_seal_that_fails_in_the_middle_can_be_done_again(driver: Failing, why: Reason, failure: Exception) -> None:
    """Some extents are sealed by then; the thread lives, and the next seal does the rest."""
    (made,) = run(driver, makes(packet(3, segment=9)))
    driver.fail("seal", 2, failure)
    failed, done = run(driver, seals(made), seals(made))
    assert isinstance(failed, Failure)
    assert failed.reason is why
    assert done is None
    assert all(fcntl.fcntl(one, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL for one in made)
    close_all(made)


def test_what_is_closed_is_gone_before_the_next_look(driver: Failing) -> None:
    """The core counts on it: a figure that it gets after `Dropped` shows what went with it, one before does not."""
    before = descriptors()
    (made,) = run(driver, makes(packet(3, segment=9)))
    seen, closed, after = run(driver, looks, closes(made), looks)
    assert (seen["device"].used, closed, after["device"].used) == (3 * PAGE, None, 0)
    assert descriptors() == before


def test_the_anchor_is_one_granule_until_the_end(driver: Failing) -> None:
    before = descriptors()
    executor = Executor(driver, 0)
    assert executor.drop_anchor() == PAGE
    assert driver.memory(Location.DEVICE).used == PAGE
    executor.stop()  # it was never started
    assert driver.memory(Location.DEVICE).used == 0
    assert descriptors() == before


def test_an_anchor_that_fails_leaves_nothing(driver: Failing) -> None:
    before = descriptors()
    driver.fail("export", 1, DriverError("cuMemExportToShareableHandle", "CUDA_ERROR_NOT_SUPPORTED", 801))
    with pytest.raises(DriverError):
        Executor(driver, 0).drop_anchor()
    assert driver.memory(Location.DEVICE).used == 0
    assert descriptors() == before
