"""Regions: addresses with extents in them, bound all or none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.fake_lender import PAGE, FlakyDriver

from membroker.memory.region import Region
from membroker.vmm.driver import DriverError, Handle, Location
from membroker.vmm.host.driver import HostDriver


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver()
    yield driver
    assert driver.memory(Location.DEVICE).used == 0
    driver.close()


def created(driver: HostDriver, *pages: int) -> list[Handle]:
    return [driver.create(count * PAGE) for count in pages]


def release(driver: HostDriver, handles: list[Handle]) -> None:
    for handle in handles:
        driver.release(handle)


def test_extents_side_by_side(driver: HostDriver) -> None:
    """Extents of different sizes stand side by side and are one range of bytes; the mapping alone keeps them."""
    region, handles = Region(driver, 8 * PAGE), created(driver, 1, 2)
    assert region.bind(PAGE, handles) == 3 * PAGE
    release(driver, handles)
    driver.write(region.address + 2 * PAGE - 2, b"over the edge")
    assert driver.read(region.address + 2 * PAGE - 2, 13) == b"over the edge"
    assert region.runs() == [(PAGE, 3 * PAGE)]
    region.unbind(2 * PAGE, 2 * PAGE)
    assert region.runs() == [(PAGE, PAGE)]
    assert driver.memory(Location.DEVICE).used == PAGE
    region.close()


def test_close_unmaps_every_run(driver: HostDriver) -> None:
    region, handles = Region(driver, 8 * PAGE), created(driver, 1, 1, 1)
    for place, handle in zip((0, 1, 5), handles, strict=True):
        region.bind(place * PAGE, [handle])
    release(driver, handles)
    assert region.runs() == [(0, 2 * PAGE), (5 * PAGE, PAGE)]
    region.close()
    with pytest.raises(DriverError):
        driver.unreserve(region.address, region.size)


def test_a_failed_bind_leaves_nothing(driver: HostDriver) -> None:
    """The third extent does not fit: the first two are unmapped again, and their place is free for others."""
    region, handles = Region(driver, 2 * PAGE), created(driver, 1, 1, 1)
    with pytest.raises(DriverError):
        region.bind(0, handles)
    assert region.runs() == []
    assert region.bind(0, handles[:2]) == 2 * PAGE
    release(driver, handles)
    region.close()


def test_access_refused_leaves_nothing() -> None:
    """The device cannot give access: what was mapped for it is unmapped."""
    driver = FlakyDriver()
    region, handles = Region(driver, 2 * PAGE), created(driver, 1, 1)
    driver.lost = True
    with pytest.raises(DriverError):
        region.bind(0, handles)
    release(driver, handles)
    assert driver.memory(Location.DEVICE).used == 0
    region.close()
    driver.close()


def test_over_something_mapped(driver: HostDriver) -> None:
    """Binding over a mapping is refused, and the mapping keeps its bytes."""
    region, handles = Region(driver, 4 * PAGE), created(driver, 1, 1, 1)
    region.bind(PAGE, handles[:1])
    driver.write(region.address + PAGE, b"mine")
    with pytest.raises(DriverError):
        region.bind(0, handles[1:])
    assert driver.read(region.address + PAGE, 4) == b"mine"
    assert region.runs() == [(PAGE, PAGE)]
    release(driver, handles)
    region.close()
