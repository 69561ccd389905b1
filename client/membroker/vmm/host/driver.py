"""`HostDriver`: a device made of host memory. Extents are memfds, addresses are mmaps, the rules are CUDA's.

Owns the driver's handles and the figures of its device; `addresses` has those of the process, which all host drivers
share. It enforces in code what CUDA enforces in its driver, so that a program that works here works on a GPU. It must
never be more lenient than a GPU: no sub-range maps, no partial unmaps, no second export of an imported extent, no
overcommitment.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ...wire.descriptors import close_each
from .. import imports
from .. import libc as _libc
from ..copies import HostCopier, is_pinned
from ..driver import AccessFlags, Copier, DeviceInfo, DriverError, DriverOutOfMemory, Handle, Location, MemoryInfo
from ..errno import driver_call, invalid
from ..sizes import GIB, MAX_BYTES, MIB, is_power_of_two
from . import extents
from .addresses import HostProcess
from .watch import ExtentWatch

GRANULARITY = 2 * MIB
"""A GPU's granularity, in bytes, so that the host driver refuses the same sizes."""

# One counter for all drivers of the process: a handle of one driver is unknown to every other.
_handle_values = itertools.count(1)
_driver_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _Extent:
    descriptor: int
    imported: bool


class HostDriver:
    """A device of `total_bytes` and a host of `host_bytes`, both made of this machine's ordinary memory.

    `ordinal` distinguishes the host devices of a process. Drivers of one ordinal are one device, as with CUDA: access
    that one of them grants holds for the others. Each knows its own extents and its own figures.

    Each driver's `view`, `read` and `write` enforce the access of its device. The page protection of a mapping is the
    widest access that any device has. Only that protects bytes that are accessed without the driver, through an earlier
    view or a plain address.

    The totals are figures, not reservations: memory is taken when it is first written. `stranger_bytes` of the device
    count as used by other processes, and may be changed at any time. `survivors` are those of a dead process's driver:
    this driver takes them over, and counts the extents that the other created. If they do not come from a host driver,
    this raises `DriverError`, and the caller still owns them.
    """

    def __init__(
        self,
        total_bytes: int = 16 * GIB,
        host_bytes: int = 16 * GIB,
        stranger_bytes: int = 0,
        *,
        ordinal: int = 0,
        survivors: Mapping[str, int] | None = None,
    ) -> None:
        if ordinal < 0:
            raise ValueError(f"an ordinal is 0 or more, not {ordinal}")
        self.stranger_bytes = stranger_bytes
        self._watch = ExtentWatch(GRANULARITY, survivors)
        self._totals = {Location.DEVICE: total_bytes, Location.HOST: host_bytes}
        uuid = f"host-{ordinal}" if ordinal else "host"
        self._device = DeviceInfo(uuid, "host memory", "host", GRANULARITY, index=ordinal, ordinal=ordinal)
        self._ordinal, self._number = ordinal, next(_driver_numbers)
        self._handles: dict[Handle, _Extent] = {}
        self._process = HostProcess.here
        self._pinned: dict[int, int] = {}
        """The size of each pinned block, by its address."""
        self._closed = False
        # Creating and counting extents has a separate lock, so that it never waits for a long unmap.
        self._lock, self._birth_lock = threading.Lock(), threading.Lock()

    @property
    def device(self) -> DeviceInfo:
        """The host device: uuid `host`, or `host-1` for ordinal 1; granularity 2 MiB."""
        return self._device

    # Extents and descriptors

    def create(self, size: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> Handle:
        """Create a zero-filled memfd of `size` bytes, whose size is sealed.

        Raises `DriverOutOfMemory` if the location has less than `size` left, as a GPU does.
        """
        made: list[int] = []
        with ExitStack() as undo:
            undo.callback(close_each, made)
            self._create(made, size, location, sealable=sealable)
            handle = self._book(undo, made[0], size, location, imported=False)
            undo.pop_all()
        return handle

    def _create(self, made: list[int], size: int, location: Location, *, sealable: bool) -> None:
        """Append the descriptor of a new extent to `made`, which the watch counts from now on."""
        self._check_usable("memfd_create", size)
        extents.make(made, size, location, sealable=sealable)
        with self._birth_lock:
            self._check_room(size, location)
            self._watch.add(made[-1], size, location)

    def export(self, handle: Handle) -> int:
        """Return a new descriptor of the extent. An imported extent cannot be exported again, as with CUDA."""
        self._check_usable("dup")
        with self._lock:
            extent = self._extent(handle, "dup")
            if extent.imported:
                raise invalid("dup", "an imported extent cannot be exported again: pass its descriptor on instead")
            return extents.duplicate(extent.descriptor)

    def lend(self, size: int, count: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> list[int]:
        """Create `count` memfds of `size` bytes and return their descriptors."""
        made: list[int] = []
        try:
            for _ in range(count):
                self._create(made, size, location, sealable=sealable)
        except BaseException:
            close_each(made)
            raise
        return made

    def map_descriptors(
        self, address: int, descriptors: Sequence[int], size: int, access: AccessFlags = AccessFlags.READ_WRITE
    ) -> None:
        """Map the memfds behind `descriptors` side by side from `address` on."""
        self._check_usable("mmap", size, address)
        if not descriptors:
            raise invalid("mmap", "0 bytes are not a range")
        imports.mark()
        self._process.map(address, descriptors, size, self._ordinal, access)

    def seal(self, descriptor: int) -> None:
        """Seal the memfd: a later writable map of it fails with EPERM, and `set_access` with EACCES."""
        self._check_usable("fcntl")
        extents.seal(descriptor)

    def import_extent(self, descriptor: int, size: int, location: Location = Location.DEVICE) -> Handle:
        """Return a handle to the memfd behind `descriptor`, which must be sealed at exactly `size` bytes."""
        self._check_usable("dup", size)
        imports.mark()
        with ExitStack() as undo:
            own = extents.duplicate(descriptor)
            undo.callback(os.close, own)
            extents.check(own, size)
            handle = self._book(undo, own, size, location, imported=True)
            undo.pop_all()
        return handle

    def release(self, handle: Handle) -> None:
        """Close this reference. The kernel frees the memory with the last descriptor and mapping in any process."""
        self._check_usable("close")
        with self._lock:
            extent = self._extent(handle, "close")
            del self._handles[handle]
        os.close(extent.descriptor)

    # Addresses and mappings

    def reserve(self, size: int, alignment: int = 0) -> int:
        """Reserve `size` bytes of addresses at a multiple of `alignment` (at least the granularity)."""
        self._check_usable("mmap", size)
        if alignment and not (is_power_of_two(alignment) and alignment <= MAX_BYTES):
            raise invalid("mmap", f"an alignment is a power of two below 2^63, not {alignment}")
        return self._process.reserve(size, max(alignment, GRANULARITY), self._number)

    def unreserve(self, address: int, size: int) -> None:
        """Release a whole reservation."""
        self._check_usable("munmap")
        self._process.unreserve(address, size, self._number)

    def map(self, address: int, handle: Handle) -> None:
        """Map the extent at `address`; no device has access until `set_access`."""
        self._check_usable("mmap", handle.size, address)
        with self._lock:
            extent = self._extent(handle, "mmap")
            self._process.map(address, [extent.descriptor], handle.size, self._ordinal, AccessFlags.NONE)

    def set_access(self, address: int, size: int, access: AccessFlags) -> None:
        """Set what this device may do with whole mappings; after a failure their access is unchanged."""
        self._check_usable("mprotect")
        self._process.set_access(address, size, self._ordinal, access)

    def get_access(self, address: int) -> AccessFlags:
        """Return what this device may do with the mapped byte at `address`."""
        self._check_usable("get_access")
        return self._process.allows(address, 1, self._ordinal, "get_access")

    def unmap(self, address: int, size: int) -> None:
        """Unmap whole mappings; their addresses stay reserved. Where nothing is mapped, it does nothing."""
        self._check_usable("mmap")
        self._process.unmap(address, size)

    def move(self, address: int, new_address: int, size: int, count: int = 1) -> None:
        """Map memfds at other addresses, one after the other, starting at the end towards which they move."""
        self._check_usable("mremap", size)
        _check_move(address, new_address, size, count)
        self._process.move(address, new_address, size, count)

    # Bytes

    def view(self, address: int, size: int) -> memoryview:
        """Return the mapped bytes [address, address + size), writable if this device may write all of them.

        The view does not keep them mapped: an access after an unmap kills the process. The caller must keep the owner
        of the mapping alive while the view is used.
        """
        self._check_usable("view")
        access = self._process.allows(address, size, self._ordinal, "view")
        if access is AccessFlags.NONE:
            hint = f"[{address:#x}, +{size}) allows no access to device {self._ordinal}"
            raise DriverError("view", "EACCES", errno.EACCES, hint)
        view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        return view if access is AccessFlags.READ_WRITE else view.toreadonly()

    def write(self, address: int, data: bytes | memoryview) -> None:
        """Copy `data` to mapped bytes."""
        view = self.view(address, len(data))
        if view.readonly:
            raise DriverError("write", "EACCES", errno.EACCES, f"[{address:#x}, +{len(data)}) is read-only")
        view[:] = data

    def read(self, address: int, size: int) -> bytes:
        """Return a copy of mapped bytes."""
        return bytes(self.view(address, size))

    def synchronize(self) -> None:
        """Return at once: a host device has no concurrent work."""
        self._check_usable("synchronize")

    # Copies

    def pin(self, size: int) -> int:
        """Return ordinary memory: the CPU makes the copies of a host device."""
        self._check_usable("mmap")
        if not 0 < size <= MAX_BYTES:
            raise invalid("mmap", f"{size} bytes cannot be pinned")
        with driver_call("mmap"):
            address = _libc.mmap_memory(size)
        self._pinned[address] = size
        return address

    def unpin(self, address: int) -> None:
        """Unmap it."""
        self._check_usable("munmap")
        size = self._pinned.pop(address, None)
        if size is None:
            raise invalid("munmap", f"nothing is pinned at {address:#x}")
        with driver_call("munmap"):
            _libc.munmap(address, size)

    def copier(self) -> Copier:
        """Return a queue that makes its copies in `wait`."""
        self._check_usable("copier")
        return HostCopier(self._check_copy)

    def _check_copy(self, address: int, size: int, needed: AccessFlags) -> None:
        self._check_usable("memmove")
        if is_pinned(self._pinned, address, size):
            return
        access = self._process.allows(address, size, self._ordinal, "memmove")
        if access.value & needed.value != needed.value:
            hint = f"[{address:#x}, +{size}) does not allow {needed.name} to device {self._ordinal}"
            raise DriverError("memmove", "EACCES", errno.EACCES, hint)

    # The device's own figures

    def memory(self, location: Location) -> MemoryInfo:
        """Return the location's total, and the rest after all living extents of this driver and its predecessors."""
        self._check_usable("memory")
        with self._birth_lock:
            return self._memory(location)

    def survivors(self) -> dict[str, int]:
        """Return `watches`, an inotify descriptor, and `table`: the watched extents' sizes and locations."""
        self._check_usable("survivors")
        with self._birth_lock:
            return self._watch.survivors()

    def _memory(self, location: Location) -> MemoryInfo:
        used = self._watch.used(location)
        if location is Location.DEVICE:
            used += self.stranger_bytes
        total = self._totals[location]
        return MemoryInfo(total, max(0, total - used))

    def processes(self) -> list[tuple[int, int]]:
        """Return (pid, bytes) of the processes that map the device's extents. Only root sees those of other users.

        As in `memory`, these are the extents of this driver and its predecessors, and of no other on this machine.
        """
        self._check_usable("scandir")
        with driver_call("scandir"):
            return extents.holders(os.geteuid() or None, self._watch.inodes())

    def _check_room(self, size: int, location: Location) -> None:
        strangers = self.stranger_bytes if location is Location.DEVICE else 0
        if size <= self._totals[location] - strangers - self._watch.counted[location]:
            return  # what was freed since the last look makes more room, not less
        free = self._memory(location).free
        if size > free:
            hint = f"{size} bytes were requested of the {location.value}, {free} are free"
            raise DriverOutOfMemory("memfd_create", "ENOMEM", errno.ENOMEM, hint)

    # The end

    def abandon(self) -> None:
        """In a forked child: unmap and close what was inherited, under new locks.

        A thread of the parent may have held the old locks at the fork, and that thread does not exist in the child.
        """
        self._lock, self._birth_lock = threading.Lock(), threading.Lock()
        self._closed = True
        self._process.unreserve_all(self._number)
        self._unpin_all()
        self._close_handles()

    def close(self) -> None:
        """Drop every handle, the watch and the pinned memory. Mappings and exported descriptors keep their memory."""
        if self._closed:
            return
        self._check_usable("close")
        with self._lock, self._birth_lock:
            self._closed = True
            self._unpin_all()
            self._close_handles()

    def _unpin_all(self) -> None:
        pinned, self._pinned = self._pinned, {}
        for address, size in pinned.items():
            _libc.munmap(address, size)

    def _close_handles(self) -> None:
        extents, self._handles = self._handles, {}
        for extent in extents.values():
            os.close(extent.descriptor)
        self._watch.close()

    # Shared by the calls above

    def _check_usable(self, call: str, size: int = GRANULARITY, address: int = 0) -> None:
        """Raise unless this process may make the call, and its size and address, if it has any, are whole granules."""
        if self._closed:
            raise DriverError(call, "EBADF", errno.EBADF, "this driver is closed")
        if self._process.pid != os.getpid():  # the hook that begins a child's `HostProcess` may not have run yet
            hint = "this driver was made before a fork: abandon it in the child, and open a new one"
            raise DriverError(call, "ECHILD", errno.ECHILD, hint)
        if not 0 < size <= MAX_BYTES or size % GRANULARITY:
            raise invalid(call, f"a size is a positive multiple of {GRANULARITY} bytes, not {size}")
        if address % GRANULARITY:
            raise invalid(call, f"{address:#x} is not a multiple of {GRANULARITY} bytes")

    def _book(self, undo: ExitStack, descriptor: int, size: int, location: Location, *, imported: bool) -> Handle:
        handle = Handle(next(_handle_values), size, location)
        undo.callback(self._handles.pop, handle, None)  # before: Ctrl-C can come when it is booked
        with self._lock:
            self._handles[handle] = _Extent(descriptor, imported)
        return handle

    def _extent(self, handle: Handle, call: str) -> _Extent:
        extent = self._handles.get(handle)
        if extent is None:
            raise invalid(call, f"handle {handle.value} was released, or belongs to another driver")
        return extent


def _check_move(address: int, new_address: int, size: int, count: int) -> None:
    if not 0 < count <= MAX_BYTES // size or abs(new_address - address) < size or new_address % GRANULARITY:
        why = (
            f"cannot move {count} extents of {size} bytes from {address:#x} to {new_address:#x}: "
            f"the new address is a multiple of {GRANULARITY}, and at least {size} bytes away"
        )
        raise invalid("mremap", why)
