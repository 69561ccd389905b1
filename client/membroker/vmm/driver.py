"""The contract of a driver: physical memory, descriptors, addresses, mappings, and the device's own figures.

`CudaDriver` and `HostDriver` both implement it and pass one conformance suite (`membroker.testing.check_driver`). It
follows CUDA's virtual memory management, with CUDA's limits: an extent is mapped as a whole, at offset 0, and only
whole mappings are unmapped. This module owns names and types only; it must never import a driver.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .sizes import format_exact


class Location(enum.Enum):
    """Where an extent's memory is."""

    DEVICE = "device"
    HOST = "host"

    if not TYPE_CHECKING:  # an Enum's own hashes the name, by a call of Python
        __hash__ = object.__hash__


class AccessFlags(enum.Enum):
    """What a device may do with a mapping (`CUmemAccess_flags`); NONE until access is granted.

    READ prevents accidents; it is not a security boundary.
    """

    NONE = 0
    READ = 1
    READ_WRITE = 3

    if not TYPE_CHECKING:  # as above
        __hash__ = object.__hash__

    def __str__(self) -> str:
        """Return `None`, `Read` or `ReadWrite`."""
        return self.name.title().replace("_", "")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a driver knows about its device.

    `uuid` is NVML's text for a GPU, and `host` for the host driver. `driver` is `cuda` or `host`. `granularity` is in
    bytes; the size of every extent and reservation is a multiple of it. `index` is NVML's number of the GPU, and
    `ordinal` its number in this process, which depends on CUDA_VISIBLE_DEVICES. `driver_version` is NVIDIA's.
    `recommended_granularity` is the multiple that the GPU works best with, or 0 if it recommends nothing.
    """

    uuid: str
    name: str
    driver: str
    granularity: int
    index: int = 0
    driver_version: str = ""
    ordinal: int = 0
    recommended_granularity: int = 0


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of a location, as the device itself reports them: `used` includes every process, not only ours."""

    total: int
    free: int

    @property
    def used(self) -> int:
        """Bytes of the location that are in use, by any process."""
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class Handle:
    """A driver's reference to one extent inside this process. It keeps the memory until it is released."""

    value: int
    size: int
    location: Location


class DriverError(Exception):
    """A driver call failed.

    `call` is the call (`cuMemCreate`, `memfd_create`), `name` the driver's own name for the error
    (`CUDA_ERROR_OUT_OF_MEMORY`, `ENOMEM`), `code` its number.
    """

    hint: str
    code: int
    name: str
    call: str

    def __init__(self, call: str, name: str, code: int, hint: str = "") -> None:
        self.call, self.name, self.code, self.hint = call, name, code, hint
        super().__init__(f"{call} failed: {name} ({code})" + (f": {hint}" if hint else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickle and copy call the class with its message only.
        return type(self), (self.call, self.name, self.code, self.hint), self.__dict__


class DriverOutOfMemory(DriverError):
    """The device or the system has not enough memory for this call."""


def no_addresses(error: DriverOutOfMemory, size: int) -> DriverOutOfMemory:
    """Return the error of a reservation, which takes no memory, with what it ran out of."""
    hint = f"this process cannot reserve {format_exact(size)} of addresses: ask for less, or raise `ulimit -v`"
    return DriverOutOfMemory(error.call, error.name, error.code, hint)


class DriverLimit(DriverError):
    """The driver or the kernel ran out of a resource other than memory: mappings, descriptors, watches.

    Freeing memory does not help. Raise the limit that `hint` names.
    """


class DriverUnavailable(DriverError):
    """There is no such device, or it lacks a feature that a broker needs. `hint` says what to do about it."""


class Copier(Protocol):
    """A queue of copies, made one after another, concurrently with the caller and with other work on the device.

    For one thread at a time. Every failure is a `DriverError`.
    """

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy of `size` bytes between two addresses, each in pinned memory or in mapped extents.

        It does not wait for other work: call `synchronize` first. Refused if the access at one end does not allow it.
        """
        ...

    def mark(self) -> int:
        """Return a number for everything that is queued so far."""
        ...

    def wait(self, mark: int) -> None:
        """Return when everything before the mark has arrived. Wait for each mark once, in order."""
        ...

    def close(self) -> None:
        """Wait for the queued copies, and end."""
        ...


class Driver(Protocol):
    """One device, seen from one process. Every method may be called from any thread.

    Sizes, addresses and alignments are in bytes. Every failure is a `DriverError` and leaves nothing behind.

    Addresses and mappings belong to the process: each driver of a kind can map its own extents into any reservation,
    and can unmap and release what another driver mapped or reserved. A handle belongs to one driver. Access is granted
    to a device: each driver sets and uses the access of its own device, so one device may read what another cannot.
    """

    @property
    def device(self) -> DeviceInfo:
        """The device of this driver."""
        ...

    def create(self, size: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> Handle:
        """Create an extent of `size` bytes (a multiple of the granularity), zero-filled and exportable.

        `sealable` is for memory that one process writes and others read: it can be sealed later (`seal`).
        """
        ...

    def export(self, handle: Handle) -> int:
        """Return a new descriptor (CLOEXEC, the caller closes it) that keeps the extent and can be sent to others."""
        ...

    def lend(self, size: int, count: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> list[int]:
        """Create `count` extents of `size` bytes and return one descriptor for each, which alone keeps it. All or none.

        Equivalent to create, export and release for each extent. It is one call because a broker lends hundreds.
        """
        ...

    def map_descriptors(
        self, address: int, descriptors: Sequence[int], size: int, access: AccessFlags = AccessFlags.READ_WRITE
    ) -> None:
        """Map the extents behind `descriptors`, each of `size` bytes, side by side from `address` on. All or none.

        Equivalent to import, map, set access and release for each: only the mappings keep the memory. The caller still
        owns the descriptors.
        """
        ...

    def seal(self, descriptor: int) -> None:
        """Forbid new writable mappings of the extent behind `descriptor`; existing writable mappings stay writable.

        The host driver enforces this for extents that were created `sealable`; sealing again does nothing. A GPU cannot
        enforce it: there, each mapper asks for read-only access itself (`set_access`), which only prevents accidents.
        """
        ...

    def import_extent(self, descriptor: int, size: int, location: Location = Location.DEVICE) -> Handle:
        """Return a handle to the extent behind `descriptor`, which stays open and owned by the caller.

        `size` is what the broker reported. A descriptor of another size, or not of an extent, is refused as soon as the
        driver can tell (CUDA can at `map`).
        """
        ...

    def release(self, handle: Handle) -> None:
        """Drop this reference. The memory lives until no process has a descriptor or a mapping of it."""
        ...

    def reserve(self, size: int, alignment: int = 0) -> int:
        """Reserve `size` bytes of addresses without memory, and return the first address."""
        ...

    def unreserve(self, address: int, size: int) -> None:
        """Release a whole reservation. Nothing in it may be mapped."""
        ...

    def map(self, address: int, handle: Handle) -> None:
        """Map the whole extent at `address`, inside a reservation, where nothing is mapped. Grants no access yet.

        Another driver may have made the reservation: one reservation can contain extents of several devices.
        """
        ...

    def set_access(self, address: int, size: int, access: AccessFlags) -> None:
        """Set what this device may do with [address, address + size): whole mappings, side by side, of any device.

        The access of other devices does not change. A GPU refuses memory of a GPU that it cannot reach.
        """
        ...

    def get_access(self, address: int) -> AccessFlags:
        """Return what this device may do with the mapped byte at `address`."""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Unmap the whole mappings that fill [address, address + size), never a part of one.

        If nothing is mapped there, it does nothing, as CUDA does (observed on an H200, 580.159).

        Does not wait for work that uses the memory: call `synchronize` first.
        """
        ...

    def move(self, address: int, new_address: int, size: int, count: int = 1) -> None:
        """Move the mappings of `count` extents of `size` bytes from `address` to `new_address`. All or none.

        Copies nothing, and keeps the access of this device to each extent. The new addresses must lie in a reservation,
        at least `size` away from the old ones, and nothing but the extents themselves may be mapped there. The old
        addresses are free afterwards. Needs neither handles nor descriptors, and like `unmap` does not wait for work.
        """
        ...

    def write(self, address: int, data: bytes | memoryview) -> None:
        """Copy `data` to mapped bytes, and return when it has arrived.

        Raises `DriverError` if this device's access does not allow it.
        """
        ...

    def read(self, address: int, size: int) -> bytes:
        """Return a copy of mapped bytes. Raises `DriverError` if this device's access does not allow it."""
        ...

    def synchronize(self) -> None:
        """Wait for all work that this process has submitted to the device."""
        ...

    def pin(self, size: int) -> int:
        """Allocate `size` bytes (any number) of host memory for this process's copies, and return the address.

        The memory is pinned if that makes the device's copies faster. No books contain it, and `memory` does not show
        it.
        """
        ...

    def unpin(self, address: int) -> None:
        """Free what `pin` returned. No copy may be in progress there."""
        ...

    def copier(self) -> Copier:
        """Return a new queue of copies. The caller closes it."""
        ...

    def memory(self, location: Location) -> MemoryInfo | None:
        """Return the memory of the location, or None if the driver does not know it.

        The figures are the device's own: they reflect every extent that is created or freed, in any process.
        """
        ...

    def processes(self) -> list[tuple[int, int]]:
        """Return (pid, bytes) of the processes that the driver sees using the device's memory.

        The figures name suspects and are never booked. Processes that the driver cannot see are missing, and memory
        other than extents (such as a CUDA context) is included if the driver counts it.
        """
        ...

    def survivors(self) -> dict[str, int]:
        """Return the handover descriptors, by name: they show what this driver's extents use after its process ends.

        The driver keeps them, and always returns the same ones. Another process keeps copies, and never reads them.
        When this process is dead, the next daemon opens its driver with the copies (`open_driver(..., survivors=...)`).
        The CUDA driver needs no such descriptors.
        """
        ...

    def abandon(self) -> None:
        """In a forked child: drop every mapping, address and descriptor inherited from the parent.

        A child that kept them would keep the memory of its dead parent. The driver is unusable afterwards.
        """
        ...

    def close(self) -> None:
        """Release what the driver itself holds. Extents that are mapped or exported keep their memory."""
        ...
