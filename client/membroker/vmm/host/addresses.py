"""The addresses of one process under CUDA's rules: reservations, mappings, and the access to each.

Owns the tables and the rules and is pure: it must never make a system call. The driver checks a rule here, makes the
system call, and then records it here. A broken rule raises `DriverError` with `EINVAL` and changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from operator import attrgetter

from ..driver import AccessFlags
from ..errno import invalid

_address = attrgetter("address")


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
    """Reservations and mappings, both kept in order of their addresses. Not thread-safe: the driver locks.

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
