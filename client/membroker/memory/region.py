"""`Region`: a range of addresses with extents bound into it, in this process.

Owns one reservation, and the table of extents in it: offset -> (id, size). An extent is in the table before it is
mapped, and until it is unmapped and released, so the table never lacks what is mapped. It knows a driver, and never a
broker or a page. It must never wait for work on the device: its caller has synchronized before an unmap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import repeat

from ..interrupts import device_failures as device_failures
from ..vmm.driver import AccessFlags, Driver, Handle


class Region:
    """`size` bytes of addresses from `address`, a multiple of `alignment` and the granularity.

    They are reserved from `reserve` to `close`. Offsets and sizes are in bytes. Two threads may work in different parts
    at once, and never in the same part. Errors are the driver's (`DriverError`), and leave nothing behind.
    """

    def __init__(self, driver: Driver, size: int, alignment: int = 0) -> None:
        self._driver = driver
        self._alignment = alignment
        self._reserved = False
        self.extents: dict[int, tuple[int, int]] = {}
        """By offset: the id and the size."""
        self.size = size
        self.address = 0

    def reserve(self) -> None:
        """Reserve the addresses."""
        self.address = self._driver.reserve(self.size, self._alignment)
        self._reserved = True

    def bind(
        self,
        offset: int,
        ids: Sequence[int],
        handles: Sequence[Handle],
        access: AccessFlags = AccessFlags.READ_WRITE,
    ) -> None:
        """Map whole extents side by side from `offset` on: all or none."""
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
        """Map the extents behind descriptors, each of `size` bytes, at `offsets`; side by side if these are a range."""
        assert self.extents.keys().isdisjoint(offsets), "an extent is mapped there"
        self.extents.update(zip(offsets, zip(ids, repeat(size))))  # noqa: B905 - strict, it would be slower
        if isinstance(offsets, range):
            self._driver.map_descriptors(self.address + offsets.start, descriptors, size)
            return
        for offset, descriptor in zip(offsets, descriptors, strict=True):
            self._driver.map_descriptors(self.address + offset, [descriptor], size)

    def protect(self, access: AccessFlags, offset: int = 0, size: int | None = None) -> None:
        """Set what all that is mapped allows, or the whole extents that fill [offset, offset + size)."""
        for start, length in self.runs() if size is None else [(offset, size)]:
            self._driver.set_access(self.address + start, length, access)

    def move(self, offset: int, new_offset: int, size: int, count: int) -> None:
        """Map `count` extents of `size` bytes from `offset` on at `new_offset` instead, as they are. All or none."""
        self._driver.move(self.address + offset, self.address + new_offset, size, count)
        places = range(offset, offset + size * count, size)
        moved = {place + new_offset - offset: self.extents[place] for place in places}
        self.forget(places)
        self.extents.update(moved)

    def unbind(self, offset: int, size: int) -> None:
        """Unmap the whole extents that fill [offset, offset + size), in one call of the driver; they stay in the table.

        To unmap them again does nothing, as on a GPU.
        """
        self._driver.unmap(self.address + offset, size)

    def forget(self, offsets: Iterable[int]) -> None:
        """Remove extents from the table, those that are there."""
        for offset in offsets:
            self.extents.pop(offset, None)

    def offsets(self, offset: int, size: int) -> list[int]:
        """Return where the extents begin that fill [offset, offset + size) side by side."""
        found, end = [], offset + size
        while offset < end and offset in self.extents:
            found.append(offset)
            offset += self.extents[offset][1]
        return found

    def ids(self, offsets: Iterable[int]) -> list[int]:
        """Return the ids of extents that are in the table, by their offsets."""
        return [self.extents[offset][0] for offset in offsets]

    def runs(self) -> list[tuple[int, int]]:
        """Return what is in the table as (offset, size) of each run without a gap, in order."""
        runs: list[tuple[int, int]] = []
        for offset, size in self._sizes():
            if runs and sum(runs[-1]) == offset:
                runs[-1] = (runs[-1][0], runs[-1][1] + size)
            else:
                runs.append((offset, size))
        return runs

    def _sizes(self) -> Iterator[tuple[int, int]]:
        return ((offset, size) for offset, (_, size) in sorted(self.extents.items()))

    def close(self) -> None:
        """Release the addresses, once nothing is mapped there."""
        if self._reserved:
            self._reserved = False  # before the call: after an interrupt, another reservation may be there
            try:
                self._driver.unreserve(self.address, self.size)
            except Exception:
                self._reserved = True
                raise
