"""A lender in this process: a `Source` whose extents come from a second host driver, as a broker's would.

It keeps books of its own, so that a test can compare what is lent with what the device shows. No broker, no socket.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence

from membroker.errors import OutOfMemory
from membroker.memory.lender import Placement
from membroker.memory.lifetime import MappedMemory
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm.driver import AccessFlags, DriverError, Handle, Location
from membroker.vmm.host.driver import HostDriver
from tests.support.sizes import PAGE


class FlakyDriver(HostDriver):
    """A device that can be made to fail: after `maps_left` more mappings, or at `synchronize`, or at `set_access`."""

    def __init__(self) -> None:
        super().__init__()
        self.maps_left: int | None = None
        self.lost = False
        self.before_synchronize: Callable[[], None] = lambda: None
        self.map_failure: BaseException = DriverError("mmap", "ENOMEM", errno.ENOMEM, "vm.max_map_count")

    def map(self, address: int, handle: Handle) -> None:
        self._spend_maps(1)
        super().map(address, handle)

    def map_descriptors(
        self, address: int, descriptors: Sequence[int], size: int, access: AccessFlags = AccessFlags.READ_WRITE
    ) -> None:
        if self.lost:
            self._check_alive("cuMemSetAccess")
        self._spend_maps(len(descriptors))
        super().map_descriptors(address, descriptors, size, access)

    def _spend_maps(self, count: int) -> None:
        if self.maps_left is not None:
            if self.maps_left < count:
                raise self.map_failure
            self.maps_left -= count

    def set_access(self, address: int, size: int, access: AccessFlags) -> None:
        self._check_alive("cuMemSetAccess")
        super().set_access(address, size, access)

    def synchronize(self) -> None:
        self.before_synchronize()
        self._check_alive("cuCtxSynchronize")
        super().synchronize()

    def _check_alive(self, call: str) -> None:
        if self.lost:
            raise DriverError(call, "CUDA_ERROR_ILLEGAL_ADDRESS", 700)


class Lender:
    """Lends up to `capacity` bytes; `fails_after` extents of one request it raises `failure`, as a broker may."""

    def __init__(self, capacity: int = 1 << 40, part: int = 64) -> None:
        self.device = HostDriver()
        self.driver = FlakyDriver()
        self.capacity = capacity
        self.part = part
        self.lent: dict[int, int] = {}
        self.host_capacity = 1 << 40
        self.declared_bytes = 0
        self.holdings: set[MappedMemory] = set()
        self.fails_after: int | None = None
        self.failure: BaseException = OutOfMemory("the GPU is full")
        self.before_borrow: Callable[[], None] = lambda: None
        self.work: deque[Callable[[], None]] = deque()
        self._ids = itertools.count(1)

    @property
    def lent_bytes(self) -> int:
        return sum(self.lent.values())

    @property
    def used_bytes(self) -> int:
        """What the device shows in use: extents that live anywhere."""
        return self.device.memory(Location.DEVICE).used

    def track(self, holding: MappedMemory) -> None:
        self.holdings.add(holding)

    def untrack(self, holding: MappedMemory) -> None:
        self.holdings.discard(holding)

    def later(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def settle(self) -> None:
        """Do what finalizers left, as the library's background thread does."""
        while self.work:
            self.work.popleft()()

    def borrow(
        self,
        extent_bytes: int,
        count: int,
        location: Location,
        placement: Placement,
        until: float | None = None,
        *,
        ahead: bool = False,
        wanted_bytes: int = 0,
    ) -> None:
        self.before_borrow()
        if self.lent_bytes + extent_bytes * count > self.capacity:
            raise OutOfMemory("the lender's capacity", "CAPACITY", {"level": "capacity"})
        ids: list[int] = []
        try:
            for first in range(0, count, self.part):
                self._deliver(min(self.part, count - first), extent_bytes, location, placement, ids)
        except BaseException:
            placement.undo()
            self.give_back(ids)
            raise

    def _deliver(self, count: int, size: int, location: Location, placement: Placement, ids: list[int]) -> None:
        descriptors: list[int] = []
        try:
            for _ in range(count):
                if self.fails_after is not None and len(ids) >= self.fails_after:
                    raise self.failure
                descriptors += self.device.lend(size, 1, location)
                ids.append(next(self._ids))
                self.lent[ids[-1]] = size
            placement.place(ids[-count:], descriptors, size)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def charge(self, size: int, location: Location) -> None:
        assert location is Location.HOST
        if self.declared_bytes + size > self.host_capacity:
            raise OutOfMemory("the lender's host")
        self.declared_bytes += size

    def credit(self, size: int, location: Location) -> None:
        self.declared_bytes -= size
        assert self.declared_bytes >= 0

    def give_back(self, extent_ids: Sequence[int]) -> None:
        for extent_id in extent_ids:
            self.lent.pop(extent_id, None)

    def interrupted(self) -> None:
        pass


def state(pool: VirtualMemoryPool, lender: Lender) -> tuple[object, ...]:
    """All that a refusal must leave as it was, of a pool with 64 pages."""
    pages = [pool.is_mapped(page * PAGE) for page in range(64)]
    return pool.stats(), pages, pool.mappings(by_page=True), dict(lender.lent), lender.used_bytes


def put(pool: VirtualMemoryPool, page: int, text: bytes) -> None:
    pool.view(page * PAGE, len(text))[:] = text


def text(pool: VirtualMemoryPool, page: int, size: int = 4) -> bytes:
    return bytes(pool.view(page * PAGE, size))
