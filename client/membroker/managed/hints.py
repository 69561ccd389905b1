"""Managed memory: hints about the location of bytes that CUDA migrates automatically between the host and its GPUs.

    from membroker.managed import ManagedMemoryHints, MigrationPolicy, UnifiedBuffer

    with UnifiedBuffer(driver, "16MiB") as buffer:
        hints = ManagedMemoryHints.from_unified(buffer)
        hints.apply_policy(MigrationPolicy.PreferDevice(0))
        hints.prefetch_to(0)

Owns the checks before each hint. It must never lend or charge memory: the broker does not know of managed memory. A
worker declares it (`Model.declare`), or it appears as unaccounted.

A location is a device's ordinal in this process, `"host"`, or `"device"`, the driver's own. A stream is a CUstream's
handle, an object that has it as `cuda_stream` or `ptr`, or 0, the default stream of the driver's context. CUDA applies
a hint to whole pages of the CPU.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import InvalidRequest, ManagedMemoryUnavailable, MembrokerError
from ..ext import arguments, device_failures
from ..vmm.cuda.managed import HOST, CudaManaged
from ..vmm.driver import Driver, DriverError, Location
from ..vmm.sizes import Size
from .buffer import UnifiedBuffer, managed_calls

_LAST_ADDRESS = (1 << 64) - 1
_LAST_ORDINAL = (1 << 31) - 1


class MemAdvice(enum.Enum):
    """An advice about a range. The values are those of CUDA's `CUmem_advise`."""

    SET_READ_MOSTLY = 1
    UNSET_READ_MOSTLY = 2
    SET_PREFERRED_LOCATION = 3
    UNSET_PREFERRED_LOCATION = 4
    SET_ACCESSED_BY = 5
    UNSET_ACCESSED_BY = 6


AdvicePair = tuple[MemAdvice, int | Location | None]
"""An advice and its location: an ordinal, a `Location`, or None for an advice without a location."""


@dataclass(frozen=True, slots=True, repr=False)
class MigrationPolicy:
    """A set of advice about where pages should be: `Default`, `ReadMostly`, `PreferDevice(n)` or `PreferHost`.

    A policy adds to earlier advice. `Default` gives no advice, so it does not remove any: `unset_read_mostly` and the
    other `unset_` methods do.
    """

    name: str
    _pairs: tuple[AdvicePair, ...] = ()

    Default: ClassVar[MigrationPolicy]
    """No advice: CUDA decides."""
    ReadMostly: ClassVar[MigrationPolicy]
    """Each device that reads a page gets a copy of it, and a write invalidates all other copies."""
    PreferHost: ClassVar[MigrationPolicy]
    """Pages stay in the host's memory while the devices that use them can access them there."""

    @classmethod
    def PreferDevice(cls, ordinal: int) -> MigrationPolicy:
        """Pages stay on the device `ordinal` of this process. Raises `InvalidRequest` for an invalid ordinal."""
        if not isinstance(_location(ordinal), int):
            raise InvalidRequest(f"PreferDevice takes a device's ordinal, not {ordinal!r}")
        return cls(f"PreferDevice({ordinal})", ((MemAdvice.SET_PREFERRED_LOCATION, ordinal),))

    def to_advice_pairs(self) -> list[AdvicePair]:
        """Return the policy's advice, in order. The list is empty for `Default`."""
        return list(self._pairs)

    def is_default(self) -> bool:
        """Return whether the policy gives no advice."""
        return not self._pairs

    def __repr__(self) -> str:
        return f"MigrationPolicy.{self.name}"


MigrationPolicy.Default = MigrationPolicy("Default")
MigrationPolicy.ReadMostly = MigrationPolicy("ReadMostly", ((MemAdvice.SET_READ_MOSTLY, None),))
MigrationPolicy.PreferHost = MigrationPolicy("PreferHost", ((MemAdvice.SET_PREFERRED_LOCATION, Location.HOST),))


class ManagedMemoryHints:
    """Hints about `size` bytes at `address` of managed memory. `for_buffer` or `from_unified` makes it.

    Every hint raises `InvalidRequest` for a device that does not exist, `ManagedMemoryUnavailable` for one without
    concurrent managed access, `ClosedError` after the end of the `UnifiedBuffer`, and `DeviceFailure` with CUDA's
    message, for example for memory that is not managed. Nothing has changed then.
    """

    def __init__(
        self, calls: CudaManaged, address: int, size: int, in_use: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._calls, self._address, self._size, self._in_use = calls, address, size, in_use

    @classmethod
    def for_buffer(cls, driver: Driver, address: int, size: Size) -> ManagedMemoryHints:
        """Return hints about memory that other code allocated (`cudaMallocManaged`) and keeps allocated.

        Raises `InvalidRequest` for an invalid range, and `ManagedMemoryUnavailable` on the host driver.
        """
        checked = _range(address, size)
        with device_failures():
            return cls(managed_calls(driver), *checked, nullcontext)

    @classmethod
    def from_unified(cls, buffer: UnifiedBuffer) -> ManagedMemoryHints:
        """Return hints about a whole buffer. Raises `ClosedError`."""
        with device_failures():
            return cls(managed_calls(buffer.driver), buffer.address, buffer.size, buffer.in_use)

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return self._address

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._size

    def set_read_mostly(self) -> None:
        """Advise all devices that the bytes are mostly read: each reader gets a copy, which a write invalidates."""
        self._advise(MemAdvice.SET_READ_MOSTLY, None)

    def unset_read_mostly(self) -> None:
        """Undo `set_read_mostly`. CUDA reduces the copies of each page to one."""
        self._advise(MemAdvice.UNSET_READ_MOSTLY, None)

    def set_preferred_location(self, location: int | Location | str) -> None:
        """Advise where pages should stay. It replaces the previous location, and does not move pages by itself."""
        self._advise(MemAdvice.SET_PREFERRED_LOCATION, location)

    def unset_preferred_location(self) -> None:
        """Undo `set_preferred_location`."""
        self._advise(MemAdvice.UNSET_PREFERRED_LOCATION, None)

    def set_accessed_by(self, location: int | Location | str) -> None:
        """Keep the pages mapped for `location` wherever they are, so that accesses from there cause fewer faults."""
        self._advise(MemAdvice.SET_ACCESSED_BY, location)

    def unset_accessed_by(self, location: int | Location | str) -> None:
        """Undo `set_accessed_by` for this location."""
        self._advise(MemAdvice.UNSET_ACCESSED_BY, location)

    def prefetch_to(self, location: int | Location | str, stream: Any = 0) -> None:
        """Queue on `stream` a move of all bytes to `location`. It returns before the move is complete."""
        self.prefetch_range(0, self._size, location, stream)

    def prefetch_range(self, offset: int | str, size: Size, location: int | Location | str, stream: Any = 0) -> None:
        """Prefetch `size` bytes at `offset`, as `prefetch_to` does. Raises `InvalidRequest` for a range outside."""
        start, length = arguments.bytes_of("an offset", offset), arguments.bytes_of("a prefetch", size, at_least=1)
        if start > self._size or length > self._size - start:
            raise InvalidRequest(f"{length} bytes at {start} do not lie in {self._size} bytes of managed memory")
        handle = _stream(stream)
        with self._in_use(), device_failures():
            self._calls.prefetch(self._address + start, length, _device(self._calls, location), handle)

    def apply_policy(self, policy: MigrationPolicy) -> None:
        """Give the policy's advice. `MigrationPolicy.Default` does nothing."""
        for advice, location in policy.to_advice_pairs():
            self._advise(advice, location)

    def _advise(self, advice: MemAdvice, location: int | Location | str | None) -> None:
        with self._in_use(), device_failures():
            self._calls.advise(self._address, self._size, advice.value, _device(self._calls, location))

    def __repr__(self) -> str:
        return f"<membroker.ManagedMemoryHints for {self._size} bytes at {self._address:#x}>"


def apply_migration_policy(driver: Driver, address: int, size: Size, policy: MigrationPolicy) -> None:
    """Give a policy's advice about `size` bytes at `address`, as `ManagedMemoryHints.apply_policy` does.

    `MigrationPolicy.Default` does not use `driver`, so it works with any.
    """
    checked = _range(address, size)
    if not policy.is_default():
        ManagedMemoryHints.for_buffer(driver, *checked).apply_policy(policy)


@dataclass(frozen=True, slots=True)
class PrefetchEntry:
    """A move of `size` bytes at `address` to `location`."""

    address: int
    size: int
    location: int | Location

    def __str__(self) -> str:
        return f"{self.size} bytes at {self.address:#x} to {_location_text(self.location)}"


class PrefetchFailed(MembrokerError):
    """A plan could not be queued completely.

    `entry` is the one that failed, and `index` is its position in the plan. `queued` has the entries that were queued
    before it, in order. It is empty if a check refused the entry. `__cause__` is the reason.
    """

    queued: tuple[PrefetchEntry, ...]
    entry: PrefetchEntry
    index: int

    def __init__(self, index: int, entry: PrefetchEntry, queued: tuple[PrefetchEntry, ...], why: Exception) -> None:
        super().__init__(f"entry {index} ({entry}) failed, with {len(queued)} queued before it: {why}")
        self.index, self.entry, self.queued = index, entry, queued


class PrefetchPlan:
    """Prefetches that are queued together, on one stream, in the order they were added. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: list[PrefetchEntry] = []

    def add(self, address: int, size: Size, location: int | Location | str) -> PrefetchPlan:
        """Add a move of `size` bytes at `address` to `location`, and return the plan. Raises `InvalidRequest`.

        The caller must keep the memory allocated until the plan is executed.
        """
        self._entries.append(PrefetchEntry(*_range(address, size), _location(location)))
        return self

    @property
    def entries(self) -> tuple[PrefetchEntry, ...]:
        """The entries, in the order they were added."""
        return tuple(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def execute(self, driver: Driver, stream: Any = 0) -> None:
        """Queue every entry on `stream`. The plan keeps its entries and can be executed again.

        All locations are checked before the first entry is queued. Raises `PrefetchFailed` with the entry that failed
        and the entries queued before it, `ManagedMemoryUnavailable` on the host driver, `InvalidRequest` for an invalid
        stream.
        """
        handle = _stream(stream)
        with device_failures():
            calls = managed_calls(driver)
        entries = self.entries
        devices: list[int] = []
        for index, entry in enumerate(entries):
            try:
                devices.append(_device(calls, entry.location))
            except (MembrokerError, DriverError) as error:
                raise PrefetchFailed(index, entry, (), error) from error
        for index, (entry, device) in enumerate(zip(entries, devices, strict=True)):
            try:
                calls.prefetch(entry.address, entry.size, device, handle)
            except DriverError as error:
                raise PrefetchFailed(index, entry, entries[:index], error) from error


# Checks


def _range(address: int, size: Size) -> tuple[int, int]:
    """Return a range as (address, bytes). Raises `InvalidRequest` unless it has a byte, and its last is below 2^64."""
    length = arguments.bytes_of("managed memory", size, at_least=1)
    address = arguments.whole_number("an address", address)
    if not 0 < address <= _LAST_ADDRESS or length - 1 > _LAST_ADDRESS - address:
        raise InvalidRequest(f"{length} bytes at {address:#x} are no range of memory")
    return address, length


def _location(location: int | Location | str) -> int | Location:
    """Return a location as an ordinal, whose device may not exist, or as a `Location`. Raises `InvalidRequest`."""
    if type(location) is int:
        if 0 <= location <= _LAST_ORDINAL:
            return location
    elif isinstance(location, Location | str):
        try:
            return Location(location)
        except ValueError:
            pass
    raise InvalidRequest(f'a location is a device\'s ordinal (0, 1, …), "host" or "device", not {location!r}')


def _location_text(location: int | Location) -> str:
    return f"device {location}" if isinstance(location, int) else f"the {location.value}"


def _device(calls: CudaManaged, location: int | Location | str | None) -> int:
    """Return CUDA's number for a location, after checking that its device takes hints.

    For the host, and for None, the driver's own device is checked.
    """
    checked = Location.HOST if location is None else _location(location)
    ordinal = checked if isinstance(checked, int) else calls.ordinal
    count = calls.devices()
    if ordinal >= count:
        raise InvalidRequest(f"there is no device {ordinal}: this process sees {count}, numbered from 0")
    if not calls.has_concurrent_access(ordinal):
        raise ManagedMemoryUnavailable(
            f"device {ordinal} has no concurrent managed access (CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS is 0): "
            "pages cannot move while it works, so CUDA takes neither advice nor prefetches for it"
        )
    return HOST if checked is Location.HOST else ordinal


def _stream(stream: Any) -> int:
    """Return the handle of a stream: an int, or an object with `cuda_stream` (PyTorch) or `ptr` (CuPy)."""
    handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    if type(handle) is not int or not 0 <= handle <= _LAST_ADDRESS:
        raise InvalidRequest(f"a stream is a handle, an object with `cuda_stream` or `ptr`, or 0, not {stream!r}")
    return handle
