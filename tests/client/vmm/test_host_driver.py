"""The host twin: CUDA's promises, and what only the twin has to show: the truth about memory without a card."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from membroker.testing.driver_suite import CHECKS, MakeDriver, check_driver, wait_until
from membroker.testing.harness import TRUTH_BYTES, child_process, create_and_hand_over, keep_descriptor, keep_mapping
from membroker.vmm import (
    AccessFlags,
    DriverError,
    DriverLimit,
    DriverOutOfMemory,
    Handle,
    Location,
    open_driver,
)
from membroker.vmm import (
    libc as _libc,
)
from membroker.vmm.host import table as _table
from membroker.vmm.host.driver import GRANULARITY, HostDriver, holders
from membroker.vmm.host.watch import ExtentWatch
from membroker.vmm.mappings import MARGIN, mapping_count
from membroker.vmm.sizes import round_up

make_host = partial(open_driver, "host")


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver()
    yield driver
    driver.abandon()


def used(driver: HostDriver, location: Location = Location.DEVICE) -> int:
    return driver.memory(location).used


def mapped(driver: HostDriver, size: int = GRANULARITY) -> tuple[int, Handle]:
    handle, address = driver.create(size), driver.reserve(size)
    driver.map(address, handle)
    driver.set_access(address, size, AccessFlags.READ_WRITE)
    return address, handle


@contextmanager
def lent(driver: HostDriver) -> Iterator[int]:
    (descriptor,) = driver.lend(GRANULARITY, 1)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def copies(driver: HostDriver) -> dict[str, int]:
    return {name: os.dup(descriptor) for name, descriptor in driver.survivors().items()}


def ended(driver: HostDriver) -> HostDriver:
    """End the driver, and return its successor."""
    survivors = copies(driver)
    driver.close()
    return HostDriver(total_bytes=1 << 50, survivors=survivors)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def links() -> list[str]:
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [os.readlink(path) for path in paths if os.path.islink(path)]


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


# The contract


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


def test_the_twin_says_what_it_is(driver: HostDriver) -> None:
    info = driver.device
    assert (info.uuid, info.name, info.granularity) == ("host", "host memory", 2 << 20)


def test_locations_have_totals_of_their_own() -> None:
    driver = HostDriver(total_bytes=4 * GRANULARITY, host_bytes=2 * GRANULARITY)
    driver.create(2 * GRANULARITY, Location.HOST)
    assert driver.memory(Location.HOST).free == 0
    assert driver.memory(Location.DEVICE).free == 4 * GRANULARITY
    with pytest.raises(DriverOutOfMemory) as caught:
        driver.create(GRANULARITY, Location.HOST)
    assert (caught.value.name, caught.value.code) == ("ENOMEM", errno.ENOMEM)
    driver.close()


# The truth about memory


@pytest.mark.parametrize("keep", [keep_mapping, keep_descriptor])
def test_a_killed_borrowers_memory_stays_until_it_is_dead(driver: HostDriver, keep: Callable[..., None]) -> None:
    """A worker is killed with SIGKILL; its bytes count until then, and not a byte is left after."""
    with child_process(keep, make_host) as child:
        child.wait_for_reply()
        handle = driver.create(TRUTH_BYTES)
        descriptor = driver.export(handle)
        child.send_descriptor(descriptor)
        child.wait_for_reply()
        os.close(descriptor)
        driver.release(handle)
        assert used(driver) == TRUTH_BYTES
        child.kill()
        wait_until(lambda: used(driver) == 0, "the dead worker's memory is back")


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
            with pytest.raises(DriverError, match="ECHILD"):
                call()

    driver.create(GRANULARITY)
    with forked(body) as (_child, run_body):
        run_body()


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


# A successor


def test_a_successor_knows_what_a_killed_daemon_lent() -> None:
    """The daemon is killed; a worker computes on with what it borrowed, and the next daemon sees the worker's end."""
    with child_process(keep_mapping, make_host) as worker:
        with child_process(create_and_hand_over, make_host) as daemon:
            descriptor, survivors = daemon.receive_survivors()
            worker.wait_for_reply()
            worker.send_descriptor(descriptor)
            worker.wait_for_reply()
            os.close(descriptor)
            daemon.kill()
        driver = make_host(survivors=survivors)
        assert used(driver) == TRUTH_BYTES, "not what the worker maps, or what died with the daemon besides"
        with lent(driver):
            assert used(driver) == TRUTH_BYTES + GRANULARITY
        worker.kill()
        wait_until(lambda: used(driver) == 0, "the dead worker's memory is back")
    driver.close()


def test_what_died_meanwhile_is_counted_once() -> None:
    """Of three extents one ends before the daemon, which sees it, and one while no daemon runs."""
    first = HostDriver()
    seen, unseen, kept = (first.lend(size * GRANULARITY, 1)[0] for size in (1, 2, 4))
    host = first.lend(GRANULARITY, 1, Location.HOST)[0]
    os.close(seen)
    wait_until(lambda: used(first) == 6 * GRANULARITY, "the daemon sees a death")
    survivors = copies(first)
    first.close()
    os.close(unseen)
    second = HostDriver(survivors=survivors)
    for _ in range(2):
        assert used(second) == 4 * GRANULARITY
        assert used(second, Location.HOST) == GRANULARITY
    os.close(kept)
    wait_until(lambda: used(second) == 0, "later deaths are seen too")
    assert used(second, Location.HOST) == GRANULARITY
    os.close(host)
    second.close()


def test_a_death_that_was_half_told_before_the_restart_is_seen(driver: HostDriver) -> None:
    """The daemon read that an extent ended and was killed, and the next one counted before the kernel was done."""
    descriptor = driver.lend(GRANULARITY, 1)[0]
    assert used(driver) == GRANULARITY
    # The kernel's second word of a death, without the first.
    assert ctypes.CDLL(None).inotify_rm_watch(driver.survivors()["watches"], 1) == 0
    assert used(driver) == 0
    os.close(descriptor)


def test_a_daemon_that_died_at_an_extents_birth_has_a_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the watch and its entry: nobody else has that extent. More than one is a table cut short."""
    first = HostDriver()
    with lent(first), ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(_table, "write", lambda *_arguments: None)
            stack.enter_context(lent(first))
        second = HostDriver(survivors=copies(first))
        assert used(second) == GRANULARITY
        second.close()
        os.truncate(first.survivors()["table"], 0)
        with pytest.raises(DriverError, match="too short: it has 0 of 2"):
            HostDriver(survivors=first.survivors())
    first.close()


def test_a_successors_end_leaves_the_others_alone() -> None:
    """The second daemon ends; the keeper's copies serve a third, and what a worker maps stays."""
    with child_process(create_and_hand_over, make_host) as daemon:
        descriptor, kept = daemon.receive_survivors()
        daemon.kill()
    worker = HostDriver()
    address = worker.reserve(TRUTH_BYTES)
    worker.map_descriptors(address, [descriptor], TRUTH_BYTES)
    os.close(descriptor)
    worker.write(address, b"kept")
    before = open_descriptors()
    second = HostDriver(survivors={name: os.dup(each) for name, each in kept.items()})
    also = second.lend(GRANULARITY, 1)[0]
    assert used(second) == TRUTH_BYTES + GRANULARITY
    second.close()
    assert open_descriptors() == before + 1
    assert worker.read(address, 4) == b"kept"
    third = HostDriver(survivors=kept)
    assert used(third) == TRUTH_BYTES + GRANULARITY
    os.close(also)
    worker.unmap(address, TRUTH_BYTES)
    wait_until(lambda: used(third) == 0, "the third sees both ends")
    third.close()
    worker.abandon()


def test_junk_is_no_survivor(driver: HostDriver) -> None:
    """A keeper that mixes its descriptors up: each mistake is named, takes nothing, and the right ones work after."""
    end, other_end = os.pipe()
    extents = driver.lend(GRANULARITY, 2)
    junk = os.memfd_create(_table.NAME)
    for number, entry in ((1, GRANULARITY), (2, GRANULARITY + 2)):
        os.pwrite(junk, entry.to_bytes(8, "little"), number * 8)
    good = copies(driver)
    watches, table = good["watches"], good["table"]
    before = open_descriptors()
    for wrong, message in (
        ({"watches": watches}, "are watches and table, not watches"),
        ({**good, "memory": end}, "not watches, table, memory"),
        ({"watches": end, "table": table}, r"`watches` .* is pipe:"),
        ({"watches": table, "table": watches}, r"`watches` .* is /memfd:membroker-table"),
        ({"watches": watches, "table": watches}, "`table` .* is anon_inode:inotify"),
        ({"watches": watches, "table": extents[0]}, "`table` .* is /memfd:membroker-extent"),
        ({"watches": watches, "table": 1 << 20}, "`table` .* is closed"),
        ({"watches": watches, "table": junk}, "entry 2 of the table, 0x200002, is not a size and location"),
    ):
        with pytest.raises(DriverError, match=message):
            HostDriver(survivors=wrong)
    for entry in (1, 1 << 63):
        os.pwrite(junk, entry.to_bytes(8, "little"), 16)
        with pytest.raises(DriverError, match=f"entry 2 of the table, {entry:#x}, is not a size and location"):
            HostDriver(survivors={"watches": watches, "table": junk})
    os.ftruncate(junk, 0)
    with pytest.raises(DriverError, match="too short: it has 0 of 2"):
        HostDriver(survivors={"watches": watches, "table": junk})
    assert open_descriptors() == before
    os.close(extents[0])
    with pytest.raises(DriverError, match=r"`table` .* is pipe:"):
        HostDriver(survivors={"watches": watches, "table": end})
    second = HostDriver(survivors=good)
    assert used(second) == GRANULARITY
    os.close(extents[1])
    wait_until(lambda: used(second) == 0, "a refusal took an event")
    second.close()
    for each in (end, other_end, junk):
        os.close(each)


def test_a_table_does_not_grow_with_every_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin that lends and gets back for weeks: its table holds the living, and forgets none of them."""
    monkeypatch.setattr(_table, "SWEEP_NUMBERS", 1 << 10)
    first = HostDriver()
    early = first.lend(2 * GRANULARITY, 1)[0]
    table = first.survivors()["table"]
    for number in range(10 << 10):
        with lent(first):
            if number == 5000:
                middle = first.lend(4 * GRANULARITY, 1)[0]
    assert used(first) == 6 * GRANULARITY
    assert os.fstat(table).st_blocks * 512 <= 6 * 4096  # 21 pages were written
    second = HostDriver(survivors=copies(first))
    assert used(second) == 6 * GRANULARITY
    for each in (early, middle):
        os.close(each)
    wait_until(lambda: used(second) == 0, "the early extents' ends are seen")
    second.close()
    first.close()


def test_a_successors_descriptors_are_its_own(driver: HostDriver) -> None:
    """A keeper that hands them over by an exec has them inheritable, and another may have made them wait."""
    survivors = copies(driver)
    for descriptor in survivors.values():
        os.set_inheritable(descriptor, True)
    os.set_blocking(survivors["watches"], True)
    second = HostDriver(survivors=survivors)
    assert used(second) == 0
    assert not any(map(os.get_inheritable, survivors.values()))
    second.close()


def test_a_stranger_takes_memory_that_nobody_borrowed() -> None:
    """Somebody calls cudaMalloc beside the broker: the device is full before the books are."""
    driver = HostDriver(total_bytes=8 * GRANULARITY, stranger_bytes=6 * GRANULARITY)
    assert driver.memory(Location.DEVICE).free == 2 * GRANULARITY
    with pytest.raises(DriverOutOfMemory):
        driver.create(4 * GRANULARITY)
    driver.stranger_bytes = 0
    driver.create(4 * GRANULARITY)
    driver.stranger_bytes = 100 * GRANULARITY
    assert driver.memory(Location.DEVICE).free == 0
    assert driver.memory(Location.HOST).used == 0
    driver.close()


def test_processes_are_named_with_the_bytes_they_map(driver: HostDriver) -> None:
    """An operator asks who holds what of the device; an extent mapped twice by one process counts once."""
    descriptor = driver.export(driver.create(TRUTH_BYTES))
    with child_process(keep_mapping, make_host) as child:
        child.wait_for_reply()
        child.send_descriptor(descriptor)
        child.wait_for_reply()
        assert (child.pid, TRUTH_BYTES) in driver.processes()
        assert holders(os.getuid() + 1) == []
    os.close(descriptor)
    assert child.pid not in dict(driver.processes())

    def own() -> int:
        return dict(driver.processes()).get(os.getpid(), 0)

    before = own()
    _address, handle = mapped(driver, 2 * GRANULARITY)
    driver.map(driver.reserve(2 * GRANULARITY), handle)
    assert own() - before == 2 * GRANULARITY
    driver.map(driver.reserve(GRANULARITY), driver.create(GRANULARITY, Location.HOST))
    assert own() - before == 2 * GRANULARITY, "the host's memory is not the device's"


# What a holder of a descriptor can and cannot do


def test_a_holder_cannot_change_the_size_or_the_seals(driver: HostDriver) -> None:
    """A tenant that could shrink an extent would kill every process that maps it (SIGBUS)."""
    descriptor = driver.export(driver.create(GRANULARITY))
    for size in (0, 2 * GRANULARITY):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    for seal in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SEAL):
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seal)
    os.close(descriptor)


def test_a_sealed_extent_is_closed_to_every_way_of_writing(driver: HostDriver) -> None:
    """A reader has a descriptor that is open for writing; the kernel refuses what it could do with it all the same."""
    handle = driver.create(GRANULARITY, sealable=True)
    descriptor = driver.export(handle)
    os.pwrite(descriptor, b"written", 0)
    with mmap.mmap(descriptor, GRANULARITY) as before:
        driver.seal(descriptor)
        before[:2] = b"WR"
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        for each in (descriptor, again):
            for call in (
                lambda each=each: mmap.mmap(each, GRANULARITY),
                lambda each=each: os.pwrite(each, b"x", 0),
                lambda each=each: os.ftruncate(each, 0),
                lambda each=each: fcntl.fcntl(each, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            ):
                with pytest.raises(PermissionError):
                    call()
        with mmap.mmap(descriptor, GRANULARITY, prot=mmap.PROT_READ) as after:
            assert after[:7] == b"WRitten"
        with mmap.mmap(descriptor, GRANULARITY, flags=mmap.MAP_PRIVATE) as own:
            own[:2] = b"my"  # a copy of its own, of no concern to others
            assert before[:2] == b"WR"
    os.close(descriptor)
    os.close(again)


def test_only_what_was_created_for_it_is_sealed(driver: HostDriver) -> None:
    """An extent that was lent to one process cannot be turned against it by a seal."""
    descriptor = driver.export(driver.create(GRANULARITY))
    with pytest.raises(DriverError, match="EPERM"):
        driver.seal(descriptor)
    mmap.mmap(descriptor, GRANULARITY).close()
    os.close(descriptor)


def test_a_memfd_that_could_shrink_is_refused(driver: HostDriver) -> None:
    """A liar passes a memfd of the right size, to cut it under the reader later."""
    descriptor = os.memfd_create("membroker-extent", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, GRANULARITY)
    before = open_descriptors()
    with pytest.raises(DriverError, match="not sealed"):
        driver.import_extent(descriptor, GRANULARITY)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(DriverError, match="not an extent of"):
        driver.import_extent(descriptor, 2 * GRANULARITY)
    assert open_descriptors() == before
    driver.import_extent(descriptor, GRANULARITY)
    os.close(descriptor)


def test_extents_are_found_by_their_name_in_proc(driver: HostDriver) -> None:
    mapped(driver)
    assert "/memfd:membroker-extent" in Path("/proc/self/maps").read_text()


# Views


def test_a_view_shows_the_mapped_bytes_across_mappings(driver: HostDriver) -> None:
    address = driver.reserve(2 * GRANULARITY)
    for number in range(2):
        driver.map(address + number * GRANULARITY, driver.create(GRANULARITY))
    driver.set_access(address, 2 * GRANULARITY, AccessFlags.READ_WRITE)
    view = driver.view(address + GRANULARITY - 2, 4)
    view[:] = b"both"
    assert (view.format, view.readonly) == ("B", False)
    assert driver.read(address + GRANULARITY, 2) == b"th"


def test_a_view_is_as_weak_as_its_weakest_mapping(driver: HostDriver) -> None:
    address = driver.reserve(3 * GRANULARITY)
    for number in range(2):
        driver.map(address + number * GRANULARITY, driver.create(GRANULARITY))
    driver.set_access(address, GRANULARITY, AccessFlags.READ_WRITE)
    with pytest.raises(DriverError, match="EACCES"):
        driver.view(address, GRANULARITY + 1)
    driver.set_access(address + GRANULARITY, GRANULARITY, AccessFlags.READ)
    assert driver.view(address, GRANULARITY + 1).readonly
    assert not driver.view(address, GRANULARITY).readonly
    for size in (0, -1, 2 * GRANULARITY + 1):
        with pytest.raises(DriverError, match="EINVAL"):
            driver.view(address, size)


# Failures undo themselves, and limits have names


def test_access_is_set_on_whole_mappings_only(driver: HostDriver) -> None:
    address, _handle = mapped(driver, 2 * GRANULARITY)
    for place, size in ((address, GRANULARITY), (address + GRANULARITY, GRANULARITY), (address, 0)):
        with pytest.raises(DriverError, match="EINVAL"):
            driver.set_access(place, size, AccessFlags.NONE)
    driver.write(address, b"still writable")


def test_access_that_fails_half_way_is_as_before(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    address = driver.reserve(2 * GRANULARITY)
    for number in range(2):
        driver.map(address + number * GRANULARITY, driver.create(GRANULARITY))
    real = _libc.mprotect

    def second_fails(place: int, size: int, protection: int) -> None:
        if place != address:
            raise OSError(errno.EACCES, "Permission denied")
        real(place, size, protection)

    with monkeypatch.context() as patch:
        patch.setattr(_libc, "mprotect", second_fails)
        with pytest.raises(DriverError, match="mprotect failed: EACCES"):
            driver.set_access(address, 2 * GRANULARITY, AccessFlags.READ_WRITE)
    with pytest.raises(DriverError, match="EACCES"):
        driver.read(address, 1)
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert "---s" in next(line for line in lines if line.startswith(f"{address:x}-"))


def test_a_read_only_descriptor_fails_at_set_access_and_unmaps_cleanly(driver: HostDriver) -> None:
    """A descriptor that was opened again for reading only can be mapped, and never written through."""
    descriptor = driver.export(driver.create(GRANULARITY))
    read_only = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    handle, address = driver.import_extent(read_only, GRANULARITY), driver.reserve(GRANULARITY)
    driver.map(address, handle)
    with pytest.raises(DriverError, match="mprotect failed: EACCES"):
        driver.set_access(address, GRANULARITY, AccessFlags.READ_WRITE)
    driver.set_access(address, GRANULARITY, AccessFlags.READ)
    driver.unmap(address, GRANULARITY)
    driver.unreserve(address, GRANULARITY)
    for each in (descriptor, read_only):
        os.close(each)


@pytest.mark.parametrize(
    ("call", "code", "limit"),
    [
        ("inotify_add_watch", errno.ENOSPC, "fs.inotify.max_user_watches"),
        ("inotify_init", errno.EMFILE, "fs.inotify.max_user_instances"),
    ],
)
def test_too_few_watches_is_a_limit_with_a_name(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch, call: str, code: int, limit: str
) -> None:
    """On a machine with 128 inotify instances a user, the reason must not read as out of memory."""

    def refuse(*_arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(_libc, call, refuse)
        with pytest.raises(DriverLimit, match=limit):
            driver.create(GRANULARITY)
    assert open_descriptors() == before
    assert used(driver) == 0
    driver.create(GRANULARITY)
    assert used(driver) == GRANULARITY


def test_too_few_descriptors_is_a_limit_with_a_name(driver: HostDriver) -> None:
    handle = driver.create(GRANULARITY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        for call in (partial(driver.create, GRANULARITY), partial(driver.export, handle)):
            with pytest.raises(DriverLimit, match="RLIMIT_NOFILE"):
                call()
    assert used(driver) == GRANULARITY


def test_a_table_that_cannot_be_made_leaves_no_inotify_instance(driver: HostDriver) -> None:
    """One descriptor is left, and a driver needs two before its first extent."""
    before, lowest = open_descriptors(), os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        with pytest.raises(DriverLimit, match="memfd_create failed: EMFILE"):
            driver.survivors()
    assert open_descriptors() == before


def test_too_many_mappings_is_a_limit_with_a_name_and_a_way_back(driver: HostDriver) -> None:
    """A pool of small pages grows to vm.max_map_count: it is told why, and can still give everything back."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 100_000:
        pytest.skip(f"vm.max_map_count is {limit}: this would map for too long")
    handle, address = driver.create(GRANULARITY), driver.reserve(limit * 2 * GRANULARITY)
    places = [address + 2 * GRANULARITY * number for number in range(limit)]
    done = []

    def map_all() -> None:
        for place in places:
            driver.map(place, handle)
            done.append(place)

    with pytest.raises(DriverLimit, match=r"vm\.max_map_count"):
        map_all()
    assert len(done) > limit // 2 - 1000
    assert mapping_count() <= limit - MARGIN + 8, "nothing is left for the interpreter to work with"
    for place in done:
        driver.unmap(place, GRANULARITY)
    driver.unreserve(address, limit * 2 * GRANULARITY)


def test_a_move_is_undone_where_no_mapping_may_be_made_any_more(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process reaches vm.max_map_count with one of two extents moved: both are where they were, and readable."""
    address = driver.reserve(8 * GRANULARITY)
    driver.map_descriptors(address + 4 * GRANULARITY, descriptors := driver.lend(GRANULARITY, 2), GRANULARITY)
    for descriptor in descriptors:
        os.close(descriptor)
    driver.write(address + 4 * GRANULARITY, b"first")
    driver.write(address + 5 * GRANULARITY, b"second")
    with monkeypatch.context() as patch:
        patch.setattr("membroker.vmm.mappings.mapping_limit", lambda: MARGIN)
        driver._process.budget._left = 1
        with pytest.raises(DriverLimit, match=r"vm\.max_map_count"):
            driver.move(address + 4 * GRANULARITY, address, GRANULARITY, 2)
    assert driver.read(address + 4 * GRANULARITY, 5) == b"first"
    assert driver.read(address + 5 * GRANULARITY, 6) == b"second"
    driver.unmap(address + 4 * GRANULARITY, 2 * GRANULARITY)
    driver.unreserve(address, 8 * GRANULARITY)


@pytest.mark.parametrize("need", [HostDriver.survivors, lambda driver: driver.create(GRANULARITY)])
def test_the_inotify_instance_is_made_when_it_is_needed(need: Callable[[HostDriver], object]) -> None:
    """A worker that only imports takes none of its user's 128 instances."""

    def instances() -> int:
        return sum(link == "anon_inode:inotify" for link in links())

    before = instances()
    driver = HostDriver(survivors={})
    assert used(driver) == 0
    assert instances() == before
    need(driver)
    survivors = driver.survivors()
    driver.create(GRANULARITY)
    assert driver.survivors() == survivors
    assert instances() == before + 1
    driver.close()
    assert instances() == before


def test_closing_leaves_mappings_and_exported_descriptors(driver: HostDriver) -> None:
    before = open_descriptors()
    first = HostDriver()
    address, handle = mapped(first)
    first.write(address, b"kept")
    descriptor = first.export(handle)
    first.close()
    assert open_descriptors() == before + 1
    imported, alias = driver.import_extent(descriptor, GRANULARITY), driver.reserve(GRANULARITY)
    driver.map(alias, imported)
    driver.set_access(alias, GRANULARITY, AccessFlags.READ)
    assert driver.read(alias, 4) == b"kept"
    os.close(descriptor)
    driver.unmap(address, GRANULARITY)
    driver.unreserve(address, GRANULARITY)


# Opening


def test_open_driver_knows_two_kinds() -> None:
    with pytest.raises(ValueError, match="rocm"):
        open_driver("rocm")
    with pytest.raises(TypeError, match="total_bytes"):
        open_driver("cuda", total_bytes=1)
    with pytest.raises(TypeError, match="watches"):
        open_driver("cuda", survivors={"watches": 0})
    driver = open_driver("host", total_bytes=GRANULARITY, stranger_bytes=0)
    assert driver.memory(Location.DEVICE) is not None
    driver.close()


def test_the_package_imports_no_cuda() -> None:
    """A worker on a machine without a card, or a test, pays nothing for CUDA."""
    code = (
        "import sys, membroker.vmm, membroker.testing.driver_suite; membroker.vmm.open_driver('host').close(); "
        "sys.exit(any(name.split('.')[0] in ('cuda', 'pynvml', 'torch', 'grpc') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
