"""The host driver after a restart of the daemon: a successor finds what was lent."""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack, closing

import pytest
from tests.support.host_driver import copies, lent, make_host, mapped, used
from tests.support.processes import descriptors

from membroker.testing import wait_until
from membroker.testing.harness import TRUTH_BYTES, child_process, create_and_hand_over, keep_mapping
from membroker.vmm import DriverError, Location
from membroker.vmm.host import table as _table
from membroker.vmm.host.driver import GRANULARITY, HostDriver
from membroker.vmm.host.extents import holders


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
        with pytest.raises(DriverError, match=" 0 of 2"):
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
    before = descriptors()
    second = HostDriver(survivors={name: os.dup(each) for name, each in kept.items()})
    also = second.lend(GRANULARITY, 1)[0]
    assert used(second) == TRUTH_BYTES + GRANULARITY
    second.close()
    assert descriptors() == before + 1
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
    before = descriptors()
    for wrong, message in (
        ({"watches": watches}, "are watches and table, not watches"),
        ({**good, "memory": end}, "not watches, table, memory"),
        ({"watches": table, "table": watches}, r"`watches` .* is /memfd:membroker-table"),
        ({"watches": watches, "table": extents[0]}, "`table` .* is /memfd:membroker-extent"),
        ({"watches": watches, "table": 1 << 20}, "`table` .* is closed"),
        ({"watches": watches, "table": junk}, "entry 2 .* 0x200002, "),
    ):
        with pytest.raises(DriverError, match=message):
            HostDriver(survivors=wrong)
    for entry in (1, 1 << 63):
        os.pwrite(junk, entry.to_bytes(8, "little"), 16)
        with pytest.raises(DriverError, match=f"entry 2 .* {entry:#x}, "):
            HostDriver(survivors={"watches": watches, "table": junk})
    os.ftruncate(junk, 0)
    with pytest.raises(DriverError):
        HostDriver(survivors={"watches": watches, "table": junk})
    assert descriptors() == before
    os.close(extents[0])
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


def test_processes_are_named_with_the_bytes_they_map(driver: HostDriver) -> None:
    """An operator asks how much of the device each process maps. An extent that one maps twice counts once."""
    descriptor = driver.export(driver.create(TRUTH_BYTES))
    with child_process(keep_mapping, make_host) as child:
        child.wait_for_reply()
        child.send_descriptor(descriptor)
        child.wait_for_reply()
        assert (child.pid, TRUTH_BYTES) in driver.processes()
        successor = HostDriver(survivors=copies(driver))
        assert (child.pid, TRUTH_BYTES) in successor.processes()
        successor.close()
        with closing(HostDriver()) as other, lent(other):
            assert child.pid not in dict(other.processes()), "another broker of this machine did not lend it"
        assert holders(os.getuid() + 1, driver._watch.inodes()) == []
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
