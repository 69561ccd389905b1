"""The addresses of this process: what its host drivers reserve, map and protect, in the kernel and in the table.

Owns the lock of both, and the budget of mappings. As with CUDA, addresses belong to the process and not to a device:
each driver sets the access of its own device, by its ordinal. It must never know which extents a driver has.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import ClassVar

from .. import libc as _libc
from ..driver import AccessFlags, DriverError, DriverOutOfMemory, no_addresses
from ..errno import driver_call, invalid, translated
from ..mappings import MappingBudget
from . import extents
from .addresses import AddressTable, Mapping

_PROTECTIONS = {
    AccessFlags.NONE: _libc.PROT_NONE,
    AccessFlags.READ: _libc.PROT_READ,
    AccessFlags.READ_WRITE: _libc.PROT_READ_WRITE,
}


class HostProcess:
    """The addresses of one process. Its drivers share them; `owner` is the driver that made a reservation.

    Each method does what the driver's method of that name promises. It raises `DriverError`, and changes nothing then.
    """

    here: ClassVar[HostProcess]

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        self.lock: threading.Lock = threading.Lock()
        self.addresses: AddressTable = AddressTable()
        self.budget: MappingBudget = MappingBudget()

    @classmethod
    def begin(cls) -> None:
        """Start with no addresses: at the import, and in a forked child.

        In a child, a thread of the parent may have held the lock, and that thread does not exist there. The old table
        describes the parent; inherited drivers keep it, to know what to abandon.
        """
        cls.here = cls()

    def reserve(self, size: int, alignment: int, owner: int) -> int:
        """Reserve addresses."""
        try:
            with driver_call("mmap"):
                address = _reserve_aligned(size, alignment)
        except DriverOutOfMemory as error:
            raise no_addresses(error, size) from error
        with self.lock:
            self.addresses.add_reservation(address, size, owner)
        return address

    def unreserve(self, address: int, size: int, owner: int) -> None:
        """Release a whole reservation."""
        with self.lock:
            self.addresses.check_reservation(address, size, "munmap")
            self.addresses.drop_reservation(address)
            try:
                with driver_call("munmap"):
                    _libc.munmap(address, size)
            except DriverError:
                self.addresses.add_reservation(address, size, owner)
                raise

    def unreserve_all(self, owner: int) -> None:
        """Release all reservations of one driver, and what is mapped in them."""
        if self.pid != os.getpid():  # in a forked child, where `begin` may not have run yet
            # The table of the parent, which a thread of the parent may have been changing. Only this line reads it.
            reservations = self.addresses.reservations(owner)
        else:
            with self.lock:
                reservations = self.addresses.forget_reservations(owner)
        for address, size in reservations:
            _libc.munmap(address, size)

    def map(self, address: int, descriptors: Sequence[int], size: int, ordinal: int, access: AccessFlags) -> None:
        """Map extents side by side."""
        count, protection, call = len(descriptors), _PROTECTIONS[access], "mmap"
        with self.lock:
            self.addresses.check_free(address, size * count, "mmap")
            try:
                # Before they are mapped: what Ctrl-C leaves here can be unmapped.
                self.addresses.add_mappings(address, size, count, {ordinal: access})
                for number, descriptor in enumerate(descriptors):
                    extents.check(descriptor, size)
                    call = "open"  # it reads files in /proc now and then
                    self.budget.spend("mmap")
                    call = "mmap"
                    _libc.mmap_file(address + number * size, size, descriptor, protection)
            except BaseException as error:
                _libc.mmap_nothing(size * count, address)
                self.addresses.drop(address, count)
                if isinstance(error, OSError):
                    raise translated(call, error) from error
                raise

    def unmap(self, address: int, size: int) -> None:
        """Unmap whole mappings, or do nothing where nothing is mapped."""
        with self.lock:
            if self.addresses.overlapping(address, size) is None:
                self.addresses.check_free(address, size, "mmap")
                return
            mappings = self.addresses.whole_mappings(address, size, "mmap")
            try:
                _libc.mmap_nothing(size, address)
            except OSError as error:
                raise translated("mmap", error) from error
            self.addresses.drop(address, len(mappings))

    def move(self, address: int, new_address: int, size: int, count: int) -> None:
        """Move mappings, one after the other, starting at the end towards which they move."""
        with self.lock, ExitStack() as undo:
            mappings = self.addresses.whole_mappings(address, size * count, "mremap")
            if len(mappings) != count:
                raise invalid("mremap", f"{address:#x} and what follows are not {count} extents of {size} bytes")
            for mapping in mappings if new_address < address else reversed(mappings):
                before = mapping.address
                self.addresses.check_free(before + new_address - address, size, "mremap")
                with driver_call("open"):  # it reads files in /proc now and then
                    self.budget.spend("mremap")
                self._move(mapping, before + new_address - address)
                # Without the budget: undoing a move needs no more mappings than there were before.
                undo.callback(self._move, mapping, before)
            undo.pop_all()

    def _move(self, mapping: Mapping, address: int) -> None:
        with driver_call("mremap"):
            _libc.mmap_again(mapping.address, mapping.size, address)
            _libc.mmap_nothing(mapping.size, mapping.address)
        self.addresses.move_mapping(mapping, address)

    def set_access(self, address: int, size: int, ordinal: int, access: AccessFlags) -> None:
        """Set what a device may do with whole mappings."""
        with self.lock, driver_call("mprotect"):
            mappings = self.addresses.whole_mappings(address, size, "mprotect")
            before = [mapping.access for mapping in mappings]
            try:
                for mapping in mappings:
                    _protect(mapping, {**mapping.access, ordinal: access})
            except BaseException:
                with ExitStack() as undo:
                    for mapping, allowed in zip(mappings, before, strict=True):
                        undo.callback(_protect, mapping, allowed)
                raise

    def allows(self, address: int, size: int, ordinal: int, call: str) -> AccessFlags:
        """Return the weakest access that a device has to a range; raise if a byte is not mapped."""
        with self.lock:
            return self.addresses.allows(address, size, ordinal, call)


HostProcess.begin()
os.register_at_fork(after_in_child=HostProcess.begin)


def _protect(mapping: Mapping, access: dict[int, AccessFlags]) -> None:
    """Set the access of each device, by ordinal, to a mapping. After an error it may be the old or the new access."""
    mapping.access = access
    _libc.mprotect(mapping.address, mapping.size, _PROTECTIONS[mapping.most()])


def _reserve_aligned(size: int, alignment: int) -> int:
    """Reserve more than needed, then release what is before the aligned address and after the end."""
    with ExitStack() as undo:
        start = _libc.mmap_nothing(size + alignment)
        undo.callback(_libc.munmap, start, size + alignment)
        address = -(-start // alignment) * alignment
        if address > start:
            _libc.munmap(start, address - start)
        if start + alignment > address:
            _libc.munmap(address + size, start + alignment - address)
        undo.pop_all()
    return address
