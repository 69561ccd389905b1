"""The host driver's descriptors, views, failures and limits."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from tests.support.driver_errors import named
from tests.support.host_driver import used
from tests.support.interrupts import interrupted_at
from tests.support.processes import EXTENT, descriptors, descriptors_limited

from membroker.vmm import AccessFlags, DriverError, DriverLimit
from membroker.vmm import libc as _libc
from membroker.vmm.host.driver import GRANULARITY, HostDriver
from membroker.vmm.mappings import MARGIN, mapping_count


def two_extents(driver: HostDriver, pages: int) -> int:
    """Return addresses with an extent at the first and at the second page, to which no access is given yet."""
    address = driver.reserve(pages * GRANULARITY)
    for number in range(2):
        driver.map(address + number * GRANULARITY, driver.create(GRANULARITY))
    return address


def links() -> dict[int, str]:
    """Return what each descriptor of this process is of, without the one of the listing itself."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


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
    with pytest.raises(DriverError, check=named("EPERM")):
        driver.seal(descriptor)
    mmap.mmap(descriptor, GRANULARITY).close()
    os.close(descriptor)


def test_a_memfd_that_could_shrink_is_refused(driver: HostDriver) -> None:
    """A liar passes a memfd of the right size, to cut it under the reader later."""
    descriptor = os.memfd_create("membroker-extent", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, GRANULARITY)
    before = descriptors()
    with pytest.raises(DriverError, check=named("EINVAL")):
        driver.import_extent(descriptor, GRANULARITY)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(DriverError, check=named("EINVAL")):
        driver.import_extent(descriptor, 2 * GRANULARITY)
    assert descriptors() == before
    driver.import_extent(descriptor, GRANULARITY)
    os.close(descriptor)


# Views


def test_a_view_is_as_weak_as_its_weakest_mapping(driver: HostDriver) -> None:
    address = two_extents(driver, 3)
    driver.set_access(address, GRANULARITY, AccessFlags.READ_WRITE)
    with pytest.raises(DriverError, check=named("EACCES")):
        driver.view(address, GRANULARITY + 1)
    driver.set_access(address + GRANULARITY, GRANULARITY, AccessFlags.READ)
    assert driver.view(address, GRANULARITY + 1).readonly
    assert not driver.view(address, GRANULARITY).readonly
    for size in (0, -1, 2 * GRANULARITY + 1):
        with pytest.raises(DriverError, check=named("EINVAL")):
            driver.view(address, size)


# Failures undo themselves, and limits have names


def test_access_that_fails_half_way_is_as_before(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    address = two_extents(driver, 2)
    real = _libc.mprotect

    def second_fails(place: int, size: int, protection: int) -> None:
        if place != address:
            raise OSError(errno.EACCES, "Permission denied")
        real(place, size, protection)

    with monkeypatch.context() as patch:
        patch.setattr(_libc, "mprotect", second_fails)
        with pytest.raises(DriverError, check=named("EACCES")):
            driver.set_access(address, 2 * GRANULARITY, AccessFlags.READ_WRITE)
    with pytest.raises(DriverError, check=named("EACCES")):
        driver.read(address, 1)
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert "---s" in next(line for line in lines if line.startswith(f"{address:x}-"))


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

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(_libc, call, refuse)
        with pytest.raises(DriverLimit, match=limit):
            driver.create(GRANULARITY)
    assert descriptors() == before
    assert used(driver) == 0
    driver.create(GRANULARITY)
    assert used(driver) == GRANULARITY


def test_too_few_descriptors_is_a_limit_with_a_name(driver: HostDriver) -> None:
    handle = driver.create(GRANULARITY)
    with descriptors_limited(3):
        for call in (partial(driver.create, GRANULARITY), partial(driver.export, handle)):
            with pytest.raises(DriverLimit, match="RLIMIT_NOFILE"):
                call()
    assert used(driver) == GRANULARITY


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
    driver.map_descriptors(address + 4 * GRANULARITY, lent := driver.lend(GRANULARITY, 2), GRANULARITY)
    for descriptor in lent:
        os.close(descriptor)
    driver.write(address + 4 * GRANULARITY, b"first")
    driver.write(address + 5 * GRANULARITY, b"second")
    with monkeypatch.context() as patch:
        patch.setattr("membroker.vmm.mappings.mapping_limit", lambda: MARGIN)
        driver._process.budget._left = 1
        with pytest.raises(DriverLimit):
            driver.move(address + 4 * GRANULARITY, address, GRANULARITY, 2)
    assert driver.read(address + 4 * GRANULARITY, 5) == b"first"
    assert driver.read(address + 5 * GRANULARITY, 6) == b"second"
    driver.unmap(address + 4 * GRANULARITY, 2 * GRANULARITY)
    driver.unreserve(address, 8 * GRANULARITY)


# Opening


@pytest.mark.parametrize("how", ["create", "import"])
def test_ctrl_c_leaves_no_handle_without_a_descriptor(driver: HostDriver, how: str) -> None:
    """Its number is soon another file's, which the end of the driver would close.

    At a few points a descriptor is open and no variable has its number yet. The test closes those: others count them.
    """
    source = driver.export(driver.create(GRANULARITY))
    before = links()
    calls = {"create": lambda: driver.create(GRANULARITY), "import": lambda: driver.import_extent(source, GRANULARITY)}
    point, struck = 0, True
    while struck:
        point += 1
        _, struck = interrupted_at(point, calls[how])
        for extent in driver._handles.values():
            os.fstat(extent.descriptor)
    os.close(source)
    known = before.keys() | {extent.descriptor for extent in driver._handles.values()}
    for lost, link in links().items():
        if EXTENT in link and lost not in known:
            os.close(lost)
    assert point > 20
