"""Offloads and restores that fail halfway: no byte is lost, and nothing stays charged."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
from tests.client.pool.offload.pages import PAGES, digest, fill, pinned_bytes, sizes
from tests.support.daemons import until
from tests.support.driver_errors import named
from tests.support.fake_lender import PAGE, Lender

from membroker import interrupts
from membroker.arguments import Progress
from membroker.errors import ClosedError, DeviceFailure, OutOfMemory
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm.driver import DriverError


def allocate_numbered(pool: VirtualMemoryPool) -> None:
    """Allocate twelve pages, each with its number."""
    pool.allocate(0, 12 * PAGE)
    for page in range(12):
        fill(pool, page * PAGE, bytes([page]))


def check_numbers(pool: VirtualMemoryPool) -> None:
    assert [pool.view(page * PAGE, 1)[0] for page in range(12)] == [*range(12)]


@contextmanager
def copies_fail(lender: Lender, at: range) -> Iterator[None]:
    """The device fails at these chunks, counted from 1."""
    copier = lender.driver.copier

    def failing() -> object:
        made = copier()
        wait = made.wait

        def fail(mark: int) -> None:
            wait(mark)
            if mark in at:
                raise DriverError("cuEventSynchronize", "CUDA_ERROR_ECC_UNCORRECTABLE", 214)

        made.wait = fail  # type: ignore[method-assign]
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lender.driver, "copier", failing)
        yield


class EnoughError(Exception):
    """What a caller raises to stop it."""


def enough(done: int, total: int) -> None:
    if done >= 2 * PAGE:
        raise EnoughError


def interrupt(*_: int) -> None:
    signal.raise_signal(signal.SIGINT)
    until(lambda: interrupts.here.task is not None and interrupts.here.task.interrupted)


@pytest.mark.parametrize("away", [True, False])
@pytest.mark.parametrize(
    ("progress", "error"), [(enough, EnoughError), (interrupt, KeyboardInterrupt), (None, DeviceFailure)]
)
def test_it_stops(
    pool: VirtualMemoryPool, lender: Lender, progress: Progress | None, error: type[BaseException], away: bool
) -> None:
    """The caller has enough, somebody presses Ctrl-C, or the device fails at the third chunk of six.

    What was on its way has arrived, what had not begun is where it was, and nothing is lost.
    """
    allocate_numbered(pool)
    if not away:
        pool.offload()
    fails = nullcontext() if progress is not None else copies_fail(lender, at=range(3, 4))
    with fails, pytest.raises(error) as failed:
        (pool.offload if away else pool.restore)(progress=progress)
    mapped, offloaded = sizes(pool)
    assert mapped + offloaded == 12
    assert min(mapped, offloaded) >= 2
    if isinstance(failed.value, DeviceFailure):
        assert named("CUDA_ERROR_ECC_UNCORRECTABLE")(failed.value)
        assert failed.value.metadata["offloaded_bytes"] == str(offloaded * PAGE)
    assert lender.lent_bytes == lender.used_bytes == mapped * PAGE
    assert pool.restore() == offloaded * PAGE
    check_numbers(pool)


def test_too_little_memory_to_restore(
    pool: VirtualMemoryPool, lender: Lender, random_bytes: Callable[[int], bytes]
) -> None:
    """Others took it meanwhile: what has room is back and used, the rest is safe, and the error has the numbers."""
    pool.allocate(0, 8 * PAGE)
    fill(pool, 0, random_bytes(8 * PAGE))
    others = range(PAGE, 8 * PAGE, PAGE)
    before = digest(pool, *others)
    pool.offload()
    lender.capacity = 5 * PAGE
    told: list[tuple[int, int]] = []
    with pytest.raises(OutOfMemory, match=r"8\.0 MiB of 16\.0 MiB ") as refused:
        pool.restore(progress=lambda *numbers: told.append(numbers))
    assert (refused.value.level, refused.value.metadata["restored_bytes"]) == ("capacity", str(4 * PAGE))
    assert refused.value.metadata["offloaded_bytes"] == str(4 * PAGE)
    assert sizes(pool) == (4, 4)
    assert all(done <= 4 * PAGE and total == 8 * PAGE for done, total in told)
    fill(pool, 0, b"written between the two")
    lender.capacity = 8 * PAGE
    assert pool.restore() == 4 * PAGE
    assert digest(pool, *others) == before
    assert bytes(pool.view(0, 7)) == b"written"
    assert lender.declared_bytes == 0


def test_interrupted_while_pinned_memory_is_freed(
    pool: VirtualMemoryPool, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a trim that frees gigabytes: all of it is freed, and nothing stays declared."""
    pool.allocate(0, 9 * PAGE)
    pool.offload()
    pool.restore(keep_pinned=True)
    unpin = lender.driver.unpin

    def interrupted(address: int) -> None:
        signal.raise_signal(signal.SIGINT)
        unpin(address)

    monkeypatch.setattr(lender.driver, "unpin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.trim()
    assert lender.declared_bytes == pinned_bytes(lender) == 0


@pytest.mark.parametrize("end", ["restore", "trim", "close"])
def test_pinned_memory_that_cannot_be_freed(lender: Lender, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A card frees nothing while a graph is captured: what stays pinned stays charged, until the next end."""
    unpin, failing = lender.driver.unpin, True

    def refusing(address: int) -> None:
        if failing and len(lender.driver._pinned) == 2:
            raise DriverError("cuCtxSynchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900)
        unpin(address)

    monkeypatch.setattr(lender.driver, "unpin", refusing)
    pool = VirtualMemoryPool(lender, PAGES * PAGE, PAGE)
    pool.allocate(0, 9 * PAGE)
    pool.offload()
    if end == "trim":
        pool.restore(keep_pinned=True)
    with pytest.raises(DeviceFailure, check=named("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")):
        getattr(pool, end)()
    assert lender.declared_bytes == pinned_bytes(lender) == 6 * PAGE
    failing = False
    if end == "restore":
        assert sizes(pool) == (9, 0)
    if end != "close":
        pool.trim()
        assert lender.declared_bytes == pinned_bytes(lender) == 0
    pool.close()


def test_a_lost_device_keeps_no_host_memory(pool: VirtualMemoryPool, lender: Lender) -> None:
    """Not even what the pages allowed can be set again: what was pinned for them is freed all the same."""
    pool.allocate(0, 12 * PAGE)
    pool.protect(0, 12 * PAGE, "none")

    def lose(done: int, total: int) -> None:
        lender.driver.lost = True

    with pytest.raises(DeviceFailure, check=named("CUDA_ERROR_ILLEGAL_ADDRESS")):
        pool.offload(progress=lose)
    lender.driver.lost = False
    mapped, offloaded = sizes(pool)
    assert mapped + offloaded == 12
    pool.free(0, 12 * PAGE)
    assert lender.declared_bytes == pinned_bytes(lender) == 0


def test_closed_by_another_thread(pool: VirtualMemoryPool, lender: Lender) -> None:
    """It ends soon, and what was on its way to either side is given back."""
    pool.allocate(0, 16 * PAGE)

    def close(done: int, total: int) -> None:
        closing = threading.Thread(target=pool.close)
        closing.start()
        closing.join()

    with pytest.raises(ClosedError):
        pool.offload(progress=close)
    assert lender.lent == {}
    assert lender.declared_bytes == pinned_bytes(lender) == 0
