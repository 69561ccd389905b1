"""Regions: addresses with extents in them, bound all or none."""

from __future__ import annotations

import pytest
from tests.support.fake_lender import PAGE

from membroker.memory.buffer import Buffer
from membroker.memory.local_source import LocalSource
from membroker.memory.region import Region
from membroker.vmm.driver import DriverError, Handle, Location
from membroker.vmm.host.driver import HostDriver


def created(driver: HostDriver, *pages: int) -> list[Handle]:
    return [driver.create(count * PAGE) for count in pages]


def release(driver: HostDriver, handles: list[Handle]) -> None:
    for handle in handles:
        driver.release(handle)


def reserved(driver: HostDriver, size: int) -> Region:
    region = Region(driver, size)
    region.reserve()
    return region


def bind(region: Region, offset: int, handles: list[Handle]) -> None:
    region.bind(offset, [handle.value for handle in handles], handles)


def clear(region: Region) -> None:
    """Unmap and forget everything, and do it all again: that does nothing."""
    for offset, size in region.runs():
        region.unbind(offset, size)
        region.unbind(offset, size)
        region.forget(region.offsets(offset, size))
    region.close()
    region.close()


def test_memory_that_has_no_spare_pages_is_asked_for_some(driver: HostDriver) -> None:
    """A recall asks all memory of a session: a buffer has none to give."""
    source = LocalSource(driver)
    buffer = Buffer(source, PAGE)
    buffer._holding.give_spare(PAGE, lambda extent: True)
    assert source.physical_usage_bytes == PAGE
    buffer.close()


def test_extents_side_by_side(driver: HostDriver) -> None:
    """Extents of different sizes stand side by side and are one range of bytes; the mapping alone keeps them."""
    region, handles = reserved(driver, 8 * PAGE), created(driver, 1, 2)
    bind(region, PAGE, handles)
    release(driver, handles)
    driver.write(region.address + 2 * PAGE - 2, b"over the edge")
    assert driver.read(region.address + 2 * PAGE - 2, 13) == b"over the edge"
    assert region.runs() == [(PAGE, 3 * PAGE)]
    assert region.offsets(PAGE, 3 * PAGE) == [PAGE, 2 * PAGE]
    assert region.extents[2 * PAGE][0] == handles[1].value
    region.unbind(2 * PAGE, 2 * PAGE)
    assert region.runs() == [(PAGE, 3 * PAGE)], "an extent is in the table until it is released"
    region.forget([2 * PAGE])
    assert region.runs() == [(PAGE, PAGE)]
    assert driver.memory(Location.DEVICE).used == PAGE
    clear(region)


def test_a_failed_bind_leaves_nothing(driver: HostDriver) -> None:
    """The third extent does not fit: the first two are unmapped again, and their place is free for others."""
    region, handles = reserved(driver, 2 * PAGE), created(driver, 1, 1, 1)
    with pytest.raises(DriverError):
        bind(region, 0, handles)
    assert region.runs() == []
    bind(region, 0, handles[:2])
    release(driver, handles)
    clear(region)


def test_over_something_mapped(driver: HostDriver) -> None:
    """Binding over a mapping is a bug of the caller, and the mapping keeps its bytes and its entry."""
    region, handles = reserved(driver, 4 * PAGE), created(driver, 1, 1, 1)
    bind(region, PAGE, handles[:1])
    driver.write(region.address + PAGE, b"mine")
    with pytest.raises(AssertionError):
        bind(region, 0, handles[1:])
    with pytest.raises(AssertionError):
        region.bind_descriptors(range(0, 2 * PAGE, PAGE), [1, 2], [0, 0], PAGE)
    assert driver.read(region.address + PAGE, 4) == b"mine"
    assert region.runs() == [(PAGE, PAGE)]
    release(driver, handles)
    clear(region)
