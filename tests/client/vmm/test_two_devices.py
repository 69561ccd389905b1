"""Two twins in one process, two devices: whose memory, whose access, and addresses that belong to neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from tests.support.driver_errors import named
from tests.support.forks import in_a_child

from membroker.testing import TWO_DEVICE_CHECKS, MakeDriver
from membroker.vmm import AccessFlags, AddressRange, DriverError, MappedRange, PhysicalMemory, open_driver
from membroker.vmm.host.driver import GRANULARITY, HostDriver

make_first, make_second = (partial(open_driver, "host", ordinal=ordinal) for ordinal in range(2))


@pytest.fixture
def first() -> Iterator[HostDriver]:
    driver = HostDriver()
    yield driver
    driver.abandon()


@pytest.fixture
def second() -> Iterator[HostDriver]:
    driver = HostDriver(ordinal=1)
    yield driver
    driver.abandon()


@pytest.mark.parametrize("check", TWO_DEVICE_CHECKS, ids=lambda check: check.__name__)
def test_two_twins_keep_their_promises(check: Callable[[MakeDriver, MakeDriver], None]) -> None:
    check(make_first, make_second)


def test_closing_waits_for_every_device_that_was_granted_access(
    first: HostDriver, second: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of the second card may still read the first's memory when the first card is idle."""
    waited: list[int] = []
    third = HostDriver(ordinal=2)
    drivers = (first, second, third)
    with AddressRange(first, GRANULARITY) as addresses, PhysicalMemory.create(first, GRANULARITY) as memory:
        mapping = MappedRange(addresses, memory)
        mapping.set_access(AccessFlags.READ, third)
        for number, driver in enumerate(drivers):
            monkeypatch.setattr(driver, "synchronize", partial(waited.append, number))
        mapping.close()
    assert sorted(waited) == [0, 2]
    third.close()


def test_one_drivers_end_leaves_the_others_mappings(first: HostDriver, second: HostDriver) -> None:
    """The second closes: its extent stays where the first uses it, and the first gives all back."""
    address = first.reserve(GRANULARITY)
    second.map(address, second.create(GRANULARITY))
    first.set_access(address, GRANULARITY, AccessFlags.READ_WRITE)
    first.write(address, b"kept")
    second.close()
    assert first.read(address, 4) == b"kept"
    first.unmap(address, GRANULARITY)
    first.unreserve(address, GRANULARITY)


def test_abandoning_one_leaves_the_others_addresses(first: HostDriver, second: HostDriver) -> None:
    """What the first reserved goes, with what the second mapped there; what the second reserved stays."""
    gone, kept = first.reserve(GRANULARITY), second.reserve(GRANULARITY)
    handle = second.create(GRANULARITY)
    for address in (gone, kept):
        second.map(address, handle)
        second.set_access(address, GRANULARITY, AccessFlags.READ_WRITE)
    second.write(kept, b"alive")
    first.abandon()
    with pytest.raises(DriverError, check=named("EINVAL")):
        second.read(gone, 1)
    with pytest.raises(DriverError, check=named("EINVAL")):
        second.unreserve(gone, GRANULARITY)
    assert second.read(kept, 5) == b"alive"


def test_a_child_begins_with_addresses_of_its_own(first: HostDriver) -> None:
    """A worker forks in the middle of a reservation of another thread: the child's own twin works all the same."""

    def body() -> None:
        own = HostDriver()
        with AddressRange(own, GRANULARITY) as addresses, PhysicalMemory.create(own, GRANULARITY) as memory:
            with MappedRange(addresses, memory) as mapping:
                own.write(mapping.address, b"child")
            with pytest.raises(DriverError, check=named("EINVAL")):
                own.map(inherited.base, memory.handle)
        first.abandon()

    with AddressRange(first, GRANULARITY) as inherited, first._process.lock:
        in_a_child(body)
