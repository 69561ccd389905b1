"""`LocalSource`: extents from this process's own driver, for pools and buffers without a broker.

Owns the driver, the accounts of lent memory, and the thread that runs the finalizers' work. It must never keep a handle
or a descriptor of an extent that it lends: as with a broker's extents, only the mapping keeps the memory.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..arguments import bytes_of
from ..closing import Closing
from ..errors import DeviceFailure, InvalidRequest, OutOfMemory
from ..interrupts import device_failures
from ..threads import start_thread
from ..vmm import open_driver
from ..vmm.driver import Driver, DriverOutOfMemory, DriverUnavailable, Location
from ..vmm.sizes import Size, format_exact
from ..wire.descriptors import close_each
from .lender import Placement
from .owner import MemoryOwner


class Budget:
    """An account of at most `limit` bytes, or of any number if that is None. Thread-safe.

    `level` is the one that `OutOfMemory` names. Each debit has a key, so that a credit can be repeated. The figure and
    the entry change without a call in between, so an interrupt finds both changed or neither.
    """

    def __init__(self, limit: int | None, level: str) -> None:
        self.limit = limit
        self._level = level
        self._used = 0
        self._debits: dict[object, int] = {}
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes that are debited."""
        return self._used

    @staticmethod
    def key() -> int:
        """Return the key of this thread's debit until it is assigned to extents. It is negative; ids are above 0."""
        return -threading.get_ident()

    def debit(self, size: int, key: object = None) -> None:
        """Debit `size` bytes, under a new key if one is given. Raises `OutOfMemory`, and nothing is debited then."""
        with self._lock:
            if self.limit is not None and size > self.limit - self._used:
                raise out_of_memory(self._level, size, max(0, self.limit - self._used), self.limit)
            self._used += size
            if key is not None:
                self._debits[key] = size

    def assign(self, key: object, extent_ids: Iterable[int], size: int) -> None:
        """Move parts of the debit under `key`, `size` bytes each, to the extents: each id becomes a key."""
        with self._lock:
            for extent_id in extent_ids:
                self._debits[key] -= size
                self._debits[extent_id] = size

    def unassign(self, key: object, extent_ids: Iterable[int]) -> None:
        """Undo `assign`: move the extents' debits back to `key`."""
        with self._lock:
            for extent_id in extent_ids:
                if extent_id in self._debits and key in self._debits:
                    self._debits[key] += self._debits[extent_id]
                    del self._debits[extent_id]

    def less(self, size: int) -> None:
        """Credit `size` bytes that were debited without a key."""
        with self._lock:
            self._used -= size

    def credit(self, keys: Iterable[object]) -> None:
        """Credit the debits under `keys`. Ignores keys without a debit."""
        with self._lock:
            for key in keys:
                if key in self._debits:
                    self._used -= self._debits[key]
                    del self._debits[key]


def out_of_memory(level: str, requested: int, available: int, limit: int | None = None) -> OutOfMemory:
    """Return the error of a lender in this process, with the numbers that a broker's error has. Sizes are in bytes."""
    numbers = {"level": level, "requested_bytes": str(requested), "available_bytes": str(available)}
    if limit is not None:
        numbers["limit_bytes"] = str(limit)
    of = f" of {format_exact(limit)}" if limit is not None else ""
    message = f"the {level}{of} has {format_exact(available)} left: {format_exact(requested)} more do not fit"
    return OutOfMemory(message, "DEVICE_FULL" if level == "device" else "CAPACITY", numbers)


def add_asked(error: OutOfMemory, asked: Size, parts: str, part_bytes: int) -> None:
    """Add to the error the size that the user asked for, and that it was rounded up to whole `parts`."""
    size = bytes_of("a size", asked)
    if error.requested_bytes and error.requested_bytes != size:
        error.metadata["asked_bytes"] = str(size)
        left = f", {format_exact(error.available_bytes)} are available" if "available_bytes" in error.metadata else ""
        rounded = f"{format_exact(error.requested_bytes)} in {parts} of {format_exact(part_bytes)}"
        error.args = (f"{format_exact(size)} ({rounded}) were asked for{left}: {error}",)


logger: logging.Logger = logging.getLogger("membroker")

PACKET = 64
"""Extents are created and mapped in packets of this many, which limits the descriptors open at a time."""


class LocalSource(MemoryOwner["_LocalLink"], Closing):
    """Lends the device's memory to this process: `VirtualMemoryPool(LocalSource(), "64GiB")`. A context manager.

    `driver` is `"cuda"`, `"host"` (for a machine without a GPU: `LocalSource("host")`), or a driver that the caller
    closes. `device` is the GPU's ordinal or UUID. `limit` and `host_limit` are the most that is lent at a time, of the
    device and of the host, in bytes or as text such as `"8GiB"`; with None only the device limits it. Memory that other
    processes use is not counted.

    Raises `DeviceFailure` if the device does not exist, and `InvalidRequest`.
    """

    _name, _instead = "source", "make another"

    def __init__(
        self,
        driver: Driver | str = "cuda",
        device: int | str = 0,
        *,
        limit: Size | None = None,
        host_limit: Size | None = None,
    ) -> None:
        limits = {Location.DEVICE: ("limit", limit), Location.HOST: ("host_limit", host_limit)}
        self._budgets = {
            location: Budget(None if size is None else bytes_of(what, size), "capacity")
            for location, (what, size) in limits.items()
        }
        self._ids = itertools.count(1)
        owned = isinstance(driver, str)
        super().__init__(_LocalLink(_open(driver, device) if isinstance(driver, str) else driver, owned=owned))

    @property
    def limit(self) -> int | None:
        """The most bytes of the device that are lent at a time; None if only the device limits it."""
        return self._budgets[Location.DEVICE].limit

    @property
    def physical_usage_bytes(self) -> int:
        """The bytes of the device that are lent."""
        return self._budgets[Location.DEVICE].used

    def close(self) -> None:
        """Unmap and release all memory that pools and buffers hold from this source. Idempotent.

        Memory with living views, and the driver, stay until the last view is gone. When the driver fails to unmap, the
        failure is logged, and the memory is held until this source is closed again.
        """
        self._close()

    def __repr__(self) -> str:
        return f"<membroker.LocalSource of {self._link.driver.device.name}{', closed' * self.closed}>"

    # The source of pools and buffers

    @property
    def driver(self) -> Driver:
        """The driver of the device. Raises `ClosedError` once the source has ended."""
        if self._forked or self._ended:
            self.check_open()
        return self._link.driver

    def borrow(
        self,
        extent_bytes: int,
        count: int,
        location: Location,
        placement: Placement,
        until: float | None = None,
        **hints: Any,
    ) -> None:
        """Create `count` extents of `extent_bytes` each, and place them in packets. All or nothing. It never waits.

        Raises `ClosedError`, what `placement` raises, `DriverError`, and `OutOfMemory` with the level `capacity` for
        the limit or `device` for the device itself.
        """
        self.check_open()
        budget, key, extent_ids, descriptors = self._budgets[location], Budget.key(), list[int](), list[int]()
        try:
            budget.debit(extent_bytes * count, key)
            while len(extent_ids) < count:
                # Take ids one packet at a time: `count` may be too large for a list.
                packet = list(itertools.islice(self._ids, min(PACKET, count - len(extent_ids))))
                descriptors += self._lend(extent_bytes, len(packet), count, len(extent_ids), location)
                placement.place(packet, descriptors, extent_bytes)
                close_each(descriptors)
                extent_ids += packet
                budget.assign(key, packet, extent_bytes)
        except BaseException:
            placement.undo()
            budget.credit(extent_ids)
            raise
        finally:
            close_each(descriptors)
            budget.credit([key])

    def _lend(self, size: int, packet: int, count: int, placed: int, location: Location) -> list[int]:
        """Return descriptors of `packet` new extents; `placed` of the `count` requested ones exist already."""
        try:
            self._link.drop_anchor()
            return self._link.driver.lend(size, packet, location)
        except DriverOutOfMemory as error:
            memory = self._link.driver.memory(location)
            available = placed * size + (memory.free // size * size if memory is not None else 0)
            raise out_of_memory("device", count * size, available) from error

    def give_back(self, extent_ids: Sequence[int]) -> None:
        """Credit extents that are unmapped. The device has their memory again."""
        for budget in self._budgets.values():
            budget.credit(extent_ids)

    def interrupted(self) -> None:
        """Credit the rest of this thread's interrupted borrowing."""
        for budget in self._budgets.values():
            budget.credit([Budget.key()])

    def charge(self, size: int, location: Location) -> None:
        """Count `size` bytes that this process allocates itself against the limit. Raises `OutOfMemory`."""
        self.check_open()
        self._budgets[location].debit(size)

    def credit(self, size: int, location: Location) -> None:
        """Stop counting `size` bytes that were charged."""
        self._budgets[location].less(size)


class _LocalLink:
    """The driver and the thread of a source. It does not refer to the source, so a finalizer can end it."""

    def __init__(self, driver: Driver, *, owned: bool) -> None:
        self.driver = driver
        self._owned = owned
        self._anchor: int | None = None
        self._lock = threading.Lock()
        # A finalizer may call its put() in any thread, and also during another put() (Python's documentation).
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.later: Callable[[Callable[[], None]], None] = self._work.put
        try:
            self._thread = start_thread(_work_off, "membroker", self._work)
        except BaseException:
            if owned:
                driver.close()
            raise

    def drop_anchor(self) -> None:
        """Keep one granule of a GPU exported: an export then takes 30 us, and otherwise a millisecond (H200)."""
        device = self.driver.device
        with self._lock:
            if self._anchor is None and device.driver == "cuda":
                (self._anchor,) = self.driver.lend(device.granularity, 1)

    def end(self, *, wait: bool = True) -> None:
        """Close an owned driver, and let the thread end after the work that is queued."""
        self._close_anchor()
        if self._owned:
            self.driver.close()
        self._work.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: close what was inherited. The thread exists only in the parent."""
        self._close_anchor()
        self.driver.abandon()

    def _close_anchor(self) -> None:
        anchor, self._anchor = self._anchor, None
        if anchor is not None:
            os.close(anchor)


def _work_off(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (piece := work.get()) is not None:
        try:
            piece()
        except BaseException:  # without this thread, no later work would run
            logger.exception("work in the background has failed")
        # Do not keep it until the next piece of work: it may be the last reference to a source.
        del piece


def _open(kind: str, device: int | str) -> Driver:
    try:
        with device_failures():
            return open_driver(kind, device, context=True)
    except DeviceFailure as error:
        if kind == "cuda" and isinstance(error.__cause__, DriverUnavailable):
            raise DeviceFailure(f'{error}; LocalSource("host") takes the host driver') from error.__cause__
        raise
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
