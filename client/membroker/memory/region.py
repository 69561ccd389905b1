"""`Region`: a range of addresses with extents bound into it, in this process.

Owns one reservation, and the table of extents in it: offset -> (id, size). An extent is in the table before it is
mapped, and until it is unmapped and released, so the table has every mapped extent. It knows a driver, and never a
broker or a page. It must never wait for work on the device: its caller has synchronized before an unmap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import repeat

from ..vmm.driver import AccessFlags, Driver, Handle
from ..vmm.sizes import joined


class Region:
    """`size` bytes of addresses from `address`, which is a multiple of `alignment` and of the granularity.

    They are reserved from `reserve` to `close`. Offsets and sizes are in bytes. Two threads may work in different parts
    at once, but not in the same part. Errors are the driver's (`DriverError`).
    """

    def __init__(self, driver: Driver, size: int, alignment: int = 0) -> None:
        self._driver = driver
        self._alignment = alignment
        self._reserved = False
        self.extents: dict[int, tuple[int, int]] = {}
        """The id and the size in bytes of each extent, by its offset in bytes."""
        self.size = size
        self.address: int = 0

    def reserve(self) -> None:
        """Reserve the addresses. Raises `DriverError`."""
        self.address = self._driver.reserve(self.size, self._alignment)
        self._reserved = True

    def bind(
        self,
        offset: int,
        ids: Sequence[int],
        handles: Sequence[Handle],
        access: AccessFlags = AccessFlags.READ_WRITE,
    ) -> None:
        """Map whole extents one after the other, from `offset` on: all or none. Raises `DriverError`."""
        end, new = offset, {}
        for extent, handle in zip(ids, handles, strict=True):
            new[end] = extent, handle.size
            end += handle.size
        assert self.extents.keys().isdisjoint(new), "an extent is mapped there"
        self.extents.update(new)
        with ExitStack() as undo:
            undo.callback(self.forget, new)
            at = self.address + offset
            for handle in handles:
                self._driver.map(at, handle)
                undo.callback(self._driver.unmap, at, handle.size)
                at += handle.size
            self._driver.set_access(self.address + offset, end - offset, access)
            undo.pop_all()

    def bind_descriptors(
        self, offsets: Sequence[int], ids: Sequence[int], descriptors: Sequence[int], size: int
    ) -> None:
        """Map the extents of `descriptors`, `size` bytes each, at ascending `offsets`: neighbours by one driver call.

        Raises `DriverError`. The caller unmaps and forgets the extents that were mapped until then.
        """
        assert self.extents.keys().isdisjoint(offsets), "an extent is mapped there"
        self.extents.update(zip(offsets, zip(ids, repeat(size))))  # noqa: B905 - strict, it would be slower
        first, count = 0, len(descriptors)
        while first < count:
            end = first + 1
            while end < count and offsets[end] == offsets[end - 1] + size:
                end += 1
            self._driver.map_descriptors(self.address + offsets[first], descriptors[first:end], size)
            first = end

    def protect(self, access: AccessFlags, offset: int = 0, size: int | None = None) -> None:
        """Set the access of all mapped extents, or of the whole extents that fill [offset, offset + size)."""
        for start, length in self.runs() if size is None else [(offset, size)]:
            self._driver.set_access(self.address + start, length, access)

    def move(self, offset: int, new_offset: int, size: int, count: int) -> None:
        """Map `count` extents of `size` bytes at `new_offset` instead of `offset`, with their access. All or none."""
        self._driver.move(self.address + offset, self.address + new_offset, size, count)
        places = range(offset, offset + size * count, size)
        moved = {place + new_offset - offset: self.extents[place] for place in places}
        self.forget(places)
        self.extents.update(moved)

    def unbind(self, offset: int, size: int) -> None:
        """Unmap the whole extents that fill [offset, offset + size), in one driver call. They stay in the table.

        Unmapping them again does nothing, on a GPU too.
        """
        self._driver.unmap(self.address + offset, size)

    def forget(self, offsets: Iterable[int]) -> None:
        """Remove extents from the table. Ignores offsets that are not in it."""
        for offset in offsets:
            self.extents.pop(offset, None)

    def offsets(self, offset: int, size: int) -> list[int]:
        """Return the offsets of the contiguous extents in [offset, offset + size), up to the first gap."""
        found, end = [], offset + size
        while offset < end and offset in self.extents:
            found.append(offset)
            offset += self.extents[offset][1]
        return found

    def runs(self) -> list[tuple[int, int]]:
        """Return the contiguous runs of extents in the table, each as (offset, size), in order."""
        return joined((offset, size) for offset, (_, size) in sorted(self.extents.items()))

    def close(self) -> None:
        """Release the addresses. The caller has unmapped everything there. Raises `DriverError`."""
        if self._reserved:
            self._reserved = False  # before the call: after an interrupt, these addresses may be reserved for others
            try:
                self._driver.unreserve(self.address, self.size)
            except Exception:
                self._reserved = True
                raise
