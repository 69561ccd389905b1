"""The addresses of this process: what its host drivers reserve, map and protect, under CUDA's rules.

As with CUDA, addresses belong to the process and not to a device: each driver sets the access of its own device, by its
ordinal. `AddressTable` has the tables and the rules, and makes no system call: a broken rule raises `DriverError` with
`EINVAL` and changes nothing. `HostProcess` has the lock and the budget of mappings: it checks a rule in the table, does
what it allows, and records it. This must never know which extents a driver has.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar

from .. import libc as _libc
from ..driver import AccessFlags, DriverError, DriverOutOfMemory, no_addresses
from ..errno import driver_call, invalid, translated
from ..mappings import MappingBudget
from . import extents

_address = attrgetter("address")
_PROTECTIONS = {
    AccessFlags.NONE: _libc.PROT_NONE,
    AccessFlags.READ: _libc.PROT_READ,
    AccessFlags.READ_WRITE: _libc.PROT_READ_WRITE,
}


@dataclass(slots=True)
class Mapping:
    """One extent mapped at [address, address + size), in bytes, and what each device may do with it, by ordinal."""

    address: int
    size: int
    access: dict[int, AccessFlags] = field(default_factory=dict)

    def allows(self, device: int) -> AccessFlags:
        """Return what a device may do: nothing until access is granted."""
        return self.access.get(device, AccessFlags.NONE)

    def most(self) -> AccessFlags:
        """Return the most that any device may do."""
        return AccessFlags(max((access.value for access in self.access.values()), default=0))


class AddressTable:
    """Reservations and mappings, both kept in order of their addresses. Not thread-safe: `HostProcess` locks.

    They belong to the process. Each reservation has an `owner` (any number), so that a driver can abandon its own.
    Mappings change by one statement, so Ctrl-C finds a change made or not made.
    """

    def __init__(self) -> None:
        self._reserved: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._reserved_order: list[int] = []
        self._mapped: list[Mapping] = []

    def reservations(self, owner: int) -> list[tuple[int, int]]:
        """Return the reservations of one owner as (address, size in bytes)."""
        return [(address, self._reserved[address]) for address, other in self._owners.items() if other == owner]

    def add_reservation(self, address: int, size: int, owner: int) -> None:
        """Record a reservation that the kernel has made."""
        self._reserved[address] = size
        self._owners[address] = owner
        insort(self._reserved_order, address)

    def check_reservation(self, address: int, size: int, call: str) -> None:
        """Raise unless [address, address + size) is one whole reservation with nothing mapped in it."""
        if self._reserved.get(address) != size:
            raise invalid(call, f"no reservation of {size} bytes begins at {address:#x}")
        if self.overlapping(address, size) is not None:
            raise invalid(call, f"something is still mapped in the reservation at {address:#x}: unmap it first")

    def drop_reservation(self, address: int) -> None:
        """Forget a reservation that the kernel has released."""
        del self._reserved[address], self._owners[address]
        del self._reserved_order[bisect_left(self._reserved_order, address)]

    def forget_reservations(self, owner: int) -> list[tuple[int, int]]:
        """Forget and return the reservations of one owner, with everything that is mapped in them."""
        reservations = self.reservations(owner)
        for address, size in reservations:
            if mappings := self._beginning_in(address, size):
                self.drop(mappings[0].address, len(mappings))
            self.drop_reservation(address)
        return reservations

    def check_free(self, address: int, size: int, call: str) -> None:
        """Raise unless [address, address + size) lies in one reservation and overlaps no mapping."""
        place = bisect_right(self._reserved_order, address) - 1
        start = self._reserved_order[place] if place >= 0 else 0
        if place < 0 or address + size > start + self._reserved[start]:
            raise invalid(call, f"{size} bytes at {address:#x} do not lie inside one reservation")
        other = self.overlapping(address, size)
        if other is not None:
            raise invalid(call, f"{size} bytes at {address:#x} lie over the mapping at {other.address:#x}")

    def add_mappings(self, address: int, size: int, count: int, access: dict[int, AccessFlags] | None = None) -> None:
        """Record `count` mappings of `size` bytes side by side, and what each device may do with them: nothing yet."""
        place = bisect_left(self._mapped, address, key=_address)
        new = [Mapping(address + size * number, size, dict(access or ())) for number in range(count)]
        self._mapped[place:place] = new

    def whole_mappings(self, address: int, size: int, call: str) -> list[Mapping]:
        """Return the mappings that fill [address, address + size) side by side; raise unless they do."""
        found, at = [], address
        for place in range(bisect_left(self._mapped, address, key=_address), len(self._mapped)):
            mapping = self._mapped[place]
            if at >= address + size or mapping.address != at:
                break
            found.append(mapping)
            at += mapping.size
        if at != address + size:
            raise invalid(call, f"{size} bytes at {address:#x} are not whole mappings side by side")
        if not found:
            raise invalid(call, f"{size} bytes are not a range")
        return found

    def drop(self, address: int, count: int) -> None:
        """Forget `count` mappings side by side, if the first of them is there."""
        first = bisect_left(self._mapped, address, key=_address)
        if first < len(self._mapped) and self._mapped[first].address == address:
            del self._mapped[first : first + count]

    def move_mapping(self, mapping: Mapping, address: int) -> None:
        """Record that the kernel has moved a mapping."""
        self.drop(mapping.address, 1)
        mapping.address = address
        insort(self._mapped, mapping, key=_address)

    def allows(self, address: int, size: int, device: int, call: str) -> AccessFlags:
        """Return the weakest access that a device has in [address, address + size); raise if a byte is not mapped.

        The range may begin and end inside a mapping, because bytes can be read and written in pieces.
        """
        if size <= 0:
            raise invalid(call, f"{size} bytes are not a range")
        weakest, at = AccessFlags.READ_WRITE, address
        while at < address + size:
            mapping = self.overlapping(at, 1)
            if mapping is None:
                raise invalid(call, f"nothing is mapped at {at:#x}")
            weakest = min(weakest, mapping.allows(device), key=lambda access: access.value)
            at = mapping.address + mapping.size
        return weakest

    def _beginning_in(self, address: int, size: int) -> list[Mapping]:
        first, last = (bisect_left(self._mapped, edge, key=_address) for edge in (address, address + size))
        return self._mapped[first:last]

    def overlapping(self, address: int, size: int) -> Mapping | None:
        """Return a mapping of which some bytes lie in [address, address + size), or None."""
        place = bisect_left(self._mapped, address + size, key=_address) - 1
        last = self._mapped[place] if place >= 0 else None
        return last if last is not None and last.address + last.size > address else None


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
        count, protection, call = len(descriptors), _PROTECTIONS[access], "open"
        for descriptor in descriptors:
            extents.check(descriptor, size)
        with self.lock:
            self.addresses.check_free(address, size * count, "mmap")
            try:
                self.budget.spend("mmap", count)  # it reads files in /proc now and then
                call = "mmap"
                # Before they are mapped: what Ctrl-C leaves here can be unmapped.
                self.addresses.add_mappings(address, size, count, {ordinal: access})
                for number, descriptor in enumerate(descriptors):
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
