"""The addresses of one process under CUDA's rules: what is reserved, what is mapped where, what it allows.

Owns the tables and the rules and is pure: it must never make a system call, so that it can be asked first
and told afterwards. A broken rule raises `DriverError` with `EINVAL` and changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

from membroker.vmm._errors import invalid
from membroker.vmm.driver import AccessFlags


@dataclass(slots=True)
class Mapping:
    """One extent bound to [address, address + size), in bytes, and what each device may do with it, by its ordinal."""

    address: int
    size: int
    access: dict[int, AccessFlags] = field(default_factory=dict)

    def allows(self, device: int) -> AccessFlags:
        """Return what a device may do; nothing until it was granted something."""
        return self.access.get(device, AccessFlags.NONE)

    def most(self) -> AccessFlags:
        """Return the most that any device may do."""
        return AccessFlags(max((access.value for access in self.access.values()), default=0))


class AddressTable:
    """Reservations and mappings, both kept in order of their addresses. Not thread-safe: the driver locks.

    They belong to the process. Whose a reservation is (`owner`, any number) is kept for who abandons what it made.
    """

    def __init__(self) -> None:
        self._reserved: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._reserved_order: list[int] = []
        self._mapped: dict[int, Mapping] = {}
        self._mapped_order: list[int] = []

    def reservations(self, owner: int) -> list[tuple[int, int]]:
        """Return the reservations of one owner as (address, size in bytes)."""
        return [(address, self._reserved[address]) for address, other in self._owners.items() if other == owner]

    def add_reservation(self, address: int, size: int, owner: int) -> None:
        """Book a reservation that the kernel has made."""
        self._reserved[address] = size
        self._owners[address] = owner
        insort(self._reserved_order, address)

    def check_reservation(self, address: int, size: int, call: str) -> None:
        """Raise unless [address, address + size) is one whole reservation with nothing mapped in it."""
        if self._reserved.get(address) != size:
            raise invalid(call, f"no reservation of {size} bytes begins at {address:#x}")
        if self._overlapping(address, size) is not None:
            raise invalid(call, f"something is still mapped in the reservation at {address:#x}: unmap it first")

    def drop_reservation(self, address: int) -> None:
        """Forget a reservation that the kernel has given back."""
        del self._reserved[address], self._owners[address]
        del self._reserved_order[bisect_left(self._reserved_order, address)]

    def forget_reservations(self, owner: int) -> list[tuple[int, int]]:
        """Forget the reservations of one owner, with all that is mapped in them, and return them."""
        reservations = self.reservations(owner)
        for address, size in reservations:
            if mappings := self._beginning_in(address, size):
                self.drop_mappings(mappings)
            self.drop_reservation(address)
        return reservations

    def check_free(self, address: int, size: int, call: str) -> None:
        """Raise unless [address, address + size) lies in one reservation and over no mapping."""
        place = bisect_right(self._reserved_order, address) - 1
        start = self._reserved_order[place] if place >= 0 else 0
        if place < 0 or address + size > start + self._reserved[start]:
            raise invalid(call, f"{size} bytes at {address:#x} do not lie inside one reservation")
        other = self._overlapping(address, size)
        if other is not None:
            raise invalid(call, f"{size} bytes at {address:#x} lie over the mapping at {other.address:#x}")

    def add_mapping(self, address: int, size: int) -> None:
        """Book a mapping that the kernel has made; it allows nothing yet."""
        self._mapped[address] = Mapping(address, size)
        insort(self._mapped_order, address)

    def whole_mappings(self, address: int, size: int, call: str) -> list[Mapping]:
        """Return the mappings that fill [address, address + size) side by side; raise unless they do."""
        found, at = [], address
        while at < address + size:
            mapping = self._mapped.get(at)
            if mapping is None or at + mapping.size > address + size:
                raise invalid(call, f"{size} bytes at {address:#x} are not whole mappings side by side")
            found.append(mapping)
            at += mapping.size
        if not found:
            raise invalid(call, f"{size} bytes are not a range")
        return found

    def drop_mappings(self, mappings: list[Mapping]) -> None:
        """Forget mappings that lie side by side, in the order of their addresses."""
        first = bisect_left(self._mapped_order, mappings[0].address)
        del self._mapped_order[first : first + len(mappings)]
        for mapping in mappings:
            del self._mapped[mapping.address]

    def move_mapping(self, mapping: Mapping, address: int) -> None:
        """Book a mapping that the kernel has at another address now."""
        self.drop_mappings([mapping])
        mapping.address = address
        self._mapped[address] = mapping
        insort(self._mapped_order, address)

    def allows(self, address: int, size: int, device: int, call: str) -> AccessFlags:
        """Return what every byte of [address, address + size) allows a device; raise where nothing is mapped.

        The range may begin and end inside a mapping: bytes are read and written in pieces, unlike mappings.
        """
        if size <= 0:
            raise invalid(call, f"{size} bytes are not a range")
        weakest, at = AccessFlags.READ_WRITE, address
        while at < address + size:
            mapping = self._overlapping(at, 1)
            if mapping is None:
                raise invalid(call, f"nothing is mapped at {at:#x}")
            weakest = min(weakest, mapping.allows(device), key=lambda access: access.value)
            at = mapping.address + mapping.size
        return weakest

    def _beginning_in(self, address: int, size: int) -> list[Mapping]:
        first, last = (bisect_left(self._mapped_order, edge) for edge in (address, address + size))
        return [self._mapped[start] for start in self._mapped_order[first:last]]

    def _overlapping(self, address: int, size: int) -> Mapping | None:
        place = bisect_left(self._mapped_order, address + size) - 1
        last = self._mapped[self._mapped_order[place]] if place >= 0 else None
        return last if last is not None and last.address + last.size > address else None
