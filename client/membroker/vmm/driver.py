"""The contract of a driver: physical memory, descriptors, addresses, mappings, and what the device says it has.

`CudaDriver` and `HostDriver` both obey it and pass one conformance suite (`membroker.testing.check_driver`).
It follows CUDA's virtual memory management, with CUDA's limits: an extent is mapped whole, at offset 0, and
whole mappings are unmapped. This module owns names and types only; it must never import a driver.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from membroker.vmm._copies import Copier


class Location(enum.Enum):
    """Where an extent's memory stands."""

    DEVICE = "device"
    HOST = "host"


class AccessFlags(enum.Enum):
    """What a device may do with a mapping (`CUmemAccess_flags`); NONE until something is granted.

    READ guards against accidents; it is no security boundary.
    """

    NONE = 0
    READ = 1
    READ_WRITE = 3

    def __str__(self) -> str:
        """Return `None`, `Read` or `ReadWrite`."""
        return self.name.title().replace("_", "")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a driver knows of its device.

    `uuid` is NVML's text for a card and `host` for the twin; `driver` is `cuda` or `host`; `granularity` is in bytes
    and every extent and every reservation is a multiple of it; `index` is NVML's; `driver_version` is NVIDIA's;
    `ordinal` is the card's number in this process, where CUDA_VISIBLE_DEVICES counts; `recommended_granularity` is the
    multiple that the card works best with, or 0 where none is recommended.
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
    """What a location has, in bytes, as the device itself shows it: `used` is by anybody, not only by us."""

    total: int
    free: int

    @property
    def used(self) -> int:
        """Bytes of the location that are in use by anybody."""
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

    def __init__(self, call: str, name: str, code: int, hint: str = "") -> None:
        self.call, self.name, self.code, self.hint = call, name, code, hint
        super().__init__(f"{call} failed: {name} ({code})" + (f": {hint}" if hint else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickle and copy call the class with its sentence alone.
        return type(self), (self.call, self.name, self.code, self.hint), self.__dict__


class DriverOutOfMemory(DriverError):
    """The device or the system has no memory for this call."""


class DriverLimit(DriverError):
    """The driver or the kernel ran out of something that is not memory: mappings, descriptors, watches.

    Freeing memory does not help; raising the limit that `hint` names does.
    """


class DriverUnavailable(DriverError):
    """There is no such device, or it cannot do what a broker needs. `hint` says what to do about it."""


class Driver(Protocol):
    """One device, seen from one process. Every method may be called from any thread.

    Sizes, addresses and alignments are in bytes. Every failure is a `DriverError` and leaves nothing behind.

    Addresses and mappings are the process's: each driver of a kind maps its own extents into any reservation, and
    unmaps and gives back what another reserved or mapped. Handles are one driver's. Access is a device's: each driver
    sets and uses that of its own, so what one may read another may not even see.
    """

    @property
    def device(self) -> DeviceInfo:
        """The device that this driver speaks to."""
        ...

    def create(self, size: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> Handle:
        """Create an extent of `size` bytes (a multiple of the granularity), zero-filled and exportable.

        `sealable` is for memory that one process writes and others read: `seal` may be asked for later.
        """
        ...

    def export(self, handle: Handle) -> int:
        """Return a new descriptor (CLOEXEC, the caller closes it) that keeps the extent and can be sent on."""
        ...

    def lend(self, size: int, count: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> list[int]:
        """Create `count` extents of `size` bytes and return a descriptor of each, which alone keeps it. All or none.

        As create, export and release for each; one call, because a broker lends by hundreds.
        """
        ...

    def map_descriptors(
        self, address: int, descriptors: Sequence[int], size: int, access: AccessFlags = AccessFlags.READ_WRITE
    ) -> None:
        """Bind the extents behind `descriptors`, each of `size` bytes, side by side from `address` on. All or none.

        As import, map, set access and release for each: the mappings alone keep the memory. The descriptors stay the
        caller's.
        """
        ...

    def seal(self, descriptor: int) -> None:
        """Let nobody map the extent behind `descriptor` writable any more; mappings that are writable stay so.

        The twin holds that for extents that were created `sealable`, and does nothing twice. A card cannot: there
        read-only is what each mapper asks for (`set_access`), a guard against accidents.
        """
        ...

    def import_extent(self, descriptor: int, size: int, location: Location = Location.DEVICE) -> Handle:
        """Return a handle to the extent behind `descriptor`, which stays open and the caller's.

        `size` is what the broker said; a descriptor of another size, or of no extent, is refused where the
        driver can tell (CUDA tells at `map`).
        """
        ...

    def release(self, handle: Handle) -> None:
        """Drop this reference. The memory lives while a descriptor or a mapping keeps it, in any process."""
        ...

    def reserve(self, size: int, alignment: int = 0) -> int:
        """Reserve `size` bytes of addresses with nothing behind them and return the first."""
        ...

    def unreserve(self, address: int, size: int) -> None:
        """Give a whole reservation back. Nothing in it may be mapped."""
        ...

    def map(self, address: int, handle: Handle) -> None:
        """Bind the whole extent to `address`, inside a reservation and over nothing mapped. No access yet.

        The reservation may be another driver's: extents of several devices can stand side by side in one.
        """
        ...

    def set_access(self, address: int, size: int, access: AccessFlags) -> None:
        """Set what this device may do with [address, address + size): whole mappings, side by side, of any device.

        What other devices may do stays as it is. A card refuses the memory of one that it cannot reach.
        """
        ...

    def get_access(self, address: int) -> AccessFlags:
        """Return what this device may do with the mapped byte at `address`."""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Unbind the whole mappings that fill [address, address + size). Never part of one.

        Where nothing is mapped the twin refuses; a card does nothing and says nothing (seen on an H200, 580.159).

        Does not wait for work that uses the memory: `synchronize` first.
        """
        ...

    def move(self, address: int, new_address: int, size: int, count: int = 1) -> None:
        """Bind `count` extents of `size` bytes, side by side from `address` on, at `new_address` instead. All or none.

        Not a byte is copied, and what each allows this device stays as it is. The new addresses lie in a reservation
        and over nothing mapped but the extents themselves, at least `size` from the old ones, which are free
        afterwards. Needs neither handles nor descriptors, and as `unmap` it does not wait for work.
        """
        ...

    def write(self, address: int, data: bytes | memoryview) -> None:
        """Copy `data` to mapped bytes, and return when it is there.

        A `DriverError` where this device's access does not allow it.
        """
        ...

    def read(self, address: int, size: int) -> bytes:
        """Return a copy of mapped bytes. A `DriverError` where this device's access does not allow it."""
        ...

    def synchronize(self) -> None:
        """Wait for all the work this process has given to the device."""
        ...

    def pin(self, size: int) -> int:
        """Allocate `size` bytes of the host, any number of them, for this process's copies; return the address.

        They are locked in memory where the device copies faster so. Nobody's books know of them, nor does `memory`.
        """
        ...

    def unpin(self, address: int) -> None:
        """Free what `pin` returned. Nothing may be copying there."""
        ...

    def copier(self) -> Copier:
        """Return a queue of copies of its own, to be closed by the caller."""
        ...

    def memory(self, location: Location) -> MemoryInfo | None:
        """Return what the location has, or None where the driver cannot say.

        The figure is the device's own: it follows the birth and death of every extent, in whatever process.
        """
        ...

    def processes(self) -> list[tuple[int, int]]:
        """Return (pid, bytes) of the processes that the driver sees using the device's memory.

        It names suspects and is never booked: whom the driver cannot see is left out, and what a process has besides
        extents (on a card its context) is counted where the driver counts it.
        """
        ...

    def survivors(self) -> dict[str, int]:
        """Return the descriptors, by name, without which nobody knows what this driver's extents use after its end.

        They stay the driver's, and the same. Another process keeps copies, and never reads them; a successor's driver
        is made with those (`open_driver(..., survivors=...)`) when this one's process is dead. A card needs none.
        """
        ...

    def abandon(self) -> None:
        """In a forked child: drop every mapping, address and descriptor inherited from the parent.

        A child that keeps them keeps its dead parent's memory. The driver is unusable afterwards.
        """
        ...

    def close(self) -> None:
        """Release what the driver itself holds. Extents that are mapped or exported stay."""
        ...
