"""The host driver: CUDA's promises, and the truth about memory without a GPU."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.support.driver_errors import named
from tests.support.host_driver import copies, lent, make_host, mapped, used

from membroker.testing import CHECKS, MakeDriver, check_driver, wait_until
from membroker.vmm import DriverError, Handle, Location
from membroker.vmm.host.driver import GRANULARITY, HostDriver
from membroker.vmm.host.watch import ExtentWatch
from membroker.vmm.sizes import round_up


def ended(driver: HostDriver) -> HostDriver:
    """End the driver, and return its successor."""
    survivors = copies(driver)
    driver.close()
    return HostDriver(total_bytes=1 << 50, survivors=survivors)


@contextmanager
def forked(body: Callable[[], None]) -> Iterator[tuple[int, Callable[[], None]]]:
    """Fork; the child waits for the word, runs `body`, says so, and waits for its end."""
    word, answer = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(word[1])
            os.read(word[0], 1)
            body()
            os.write(answer[1], b"d")
            os.read(word[0], 1)
            status = 0
        finally:
            os._exit(status)

    def run_body() -> None:
        os.write(word[1], b"g")
        assert os.read(answer[0], 1) == b"d"

    os.close(answer[1])
    try:
        yield child, run_body
    finally:
        for descriptor in (word[0], word[1], answer[0]):
            os.close(descriptor)
        os.waitpid(child, 0)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_twin_keeps_a_drivers_promises(check: Callable[[MakeDriver], None]) -> None:
    check(make_host)


def test_check_driver_runs_the_whole_suite_and_stops_at_a_broken_promise() -> None:
    check_driver(make_host)

    class Generous(HostDriver):
        def create(self, size: int, location: Location = Location.DEVICE) -> Handle:
            return super().create(round_up(max(size, 1), GRANULARITY), location)

    with pytest.raises(AssertionError, match=r"not refused: create\(0\)"):
        check_driver(Generous)


# The truth about memory


def test_a_forked_child_keeps_its_parents_memory_until_it_abandons_the_driver(driver: HostDriver) -> None:
    """A worker forks and lets go; its child holds the mapping and the handle, until the fork hook runs."""
    address, handle = mapped(driver)
    spare = driver.create(GRANULARITY)
    with forked(driver.abandon) as (_child, run_abandon):
        driver.unmap(address, GRANULARITY)
        driver.release(handle)
        driver.release(spare)
        assert used(driver) == 2 * GRANULARITY
        run_abandon()
        wait_until(lambda: used(driver) == 0, "the child that abandoned its driver holds nothing")
    driver.create(GRANULARITY)
    assert used(driver) == GRANULARITY, "the child's abandon closed its parent's watch"


def test_abandon_does_not_wait_for_a_thread_that_was_not_forked(driver: HostDriver) -> None:
    """Another thread of the parent is inside the driver at the fork: in the child nobody unlocks."""
    mapped(driver)
    with driver._process.lock, driver._lock, driver._birth_lock, forked(driver.abandon) as (_child, run_abandon):
        run_abandon()


def test_a_fork_while_another_thread_closes_the_driver(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child abandons a driver that is half closed: no number is closed twice, it may be another file's by then."""
    driver.release(driver.create(GRANULARITY))
    close, forks = os.close, []

    def fork_then(descriptor: int) -> None:
        close(descriptor)
        monkeypatch.undo()
        with forked(driver.abandon) as (_child, run_abandon):
            run_abandon()
        forks.append(descriptor)

    monkeypatch.setattr(os, "close", fork_then)
    driver.close()
    assert forks


def test_a_forked_childs_calls_raise_and_leave_the_parents_events_alone(driver: HostDriver) -> None:
    """Reading the inherited inotify descriptor would take deaths from the parent."""

    def body() -> None:
        memory, create = partial(driver.memory, Location.DEVICE), partial(driver.create, GRANULARITY)
        for call in (memory, create, driver.survivors, driver.close):
            with pytest.raises(DriverError, check=named("ECHILD")):
                call()

    driver.create(GRANULARITY)
    with forked(body) as (_child, run_body):
        run_body()


def test_a_child_of_a_fork_in_c_is_refused_too(driver: HostDriver) -> None:
    """A C extension forks, so no hook of Python runs in the child. What it released would be the parent's."""
    child = ctypes.PyDLL(None).fork()
    if not child:
        told = "not refused"
        try:
            driver.synchronize()
        except DriverError as error:
            told = error.name
        os._exit(0 if told == "ECHILD" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_queued_packet_keeps_the_memory(driver: HostDriver) -> None:
    """A worker that never reads its socket holds what was sent to it, until the socket goes."""
    handle = driver.create(GRANULARITY)
    descriptor = driver.export(handle)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        with ours:
            socket.send_fds(ours, [b"x"], [descriptor])
        os.close(descriptor)
        driver.release(handle)
        assert used(driver) == GRANULARITY
    wait_until(lambda: used(driver) == 0, "the unread packet is gone")


@pytest.mark.deep
@pytest.mark.parametrize("follower", ["the same driver", "a successor", "a successor that began later"])
def test_more_deaths_at_once_than_the_queue_holds_are_recounted(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch, follower: str
) -> None:
    """A worker with thousands of extents dies: the kernel drops events, and the figure is exact all the same."""
    queue = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    count = queue // 2 + 1000  # each death is two events: IN_DELETE_SELF and IN_IGNORED
    if count > 50_000:
        pytest.skip(f"fs.inotify.max_queued_events is {queue}: more mappings than a process may have")
    big = HostDriver(total_bytes=1 << 50)
    descriptor = big.lend(GRANULARITY, 1)[0]
    address = driver.reserve(count * GRANULARITY)
    for number in range(count):
        with lent(big) as each:
            driver.map_descriptors(address + number * GRANULARITY, [each], GRANULARITY)
    assert used(big) == (count + 1) * GRANULARITY
    recounts, recount = [], ExtentWatch._recount

    def counted(watch: ExtentWatch, watches: int) -> None:
        recounts.append(watches)
        recount(watch, watches)

    monkeypatch.setattr(ExtentWatch, "_recount", counted)
    if follower == "a successor":
        big = ended(big)
    driver.unmap(address, count * GRANULARITY)
    if follower == "a successor that began later":
        big = ended(big)
    wait_until(lambda: used(big) == GRANULARITY, "only one extent is left")
    assert recounts, "the queue did not overflow: this test shows nothing"
    with lent(big):
        assert used(big) == 2 * GRANULARITY
    os.close(descriptor)
    wait_until(lambda: used(big) == 0, "events are followed again after an overflow")
    big.close()
