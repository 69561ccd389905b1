"""`Paged`: the offsets, sizes and addresses that a user gives, checked and converted to pages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from ..arguments import bytes_of, whole_number
from ..errors import InvalidOffset, InvalidRequest, NotMapped
from ..memory.lifetime import Resource
from .backing import Backing
from .page_table import PageTable


class Paged(Resource):
    """`capacity` bytes of addresses in pages."""

    _backing: Backing
    _capacity: int
    _page_size: int

    def _touched(self, offset: int, size: int | str) -> range:
        """Return the numbers of the pages that [offset, offset + size) touches, after checking both."""
        length = bytes_of("a size", size, at_least=1)
        offset = whole_number("an offset", offset, InvalidOffset)
        # The comparison has no sum, so that it is also right in a language with 64-bit integers.
        if not 0 <= offset < self._capacity or length > self._capacity - offset:
            raise InvalidOffset(
                f"{length} bytes at offset {offset} do not lie in the pool's virtual capacity of {self._capacity} bytes"
            )
        return range(offset // self._page_size, (offset + length - 1) // self._page_size + 1)

    def _touched_by(self, ranges: Iterable[tuple[int, int | str]]) -> tuple[list[int], list[range]]:
        """Return the offsets of ranges and the pages that each touches, both by address, after checking them."""
        found: list[tuple[int, range]] = []
        for one in ranges:
            if not isinstance(one, tuple) or len(one) != 2:
                raise InvalidRequest(f"a range is an offset and a size, not {one!r}")
            pages = self._touched(*one)
            found.append((whole_number("an offset", one[0], InvalidOffset), pages))
        found.sort(key=lambda one: one[0])
        for (_, before), (offset, pages) in pairwise(found):
            if pages.start < before.stop:
                raise InvalidRequest(f"two of the ranges touch the page of offset {offset}")
        return [offset for offset, _ in found], [pages for _, pages in found]

    def _touched_or_all(self, offset: int, size: int | str | None) -> range:
        """Return the pages of a range. Without a size the range ends at the end of the pool."""
        pages = self._touched(offset, 1 if size is None else size)
        return pages if size is not None else range(pages.start, self._capacity // self._page_size)

    def _begun_at(self, table: PageTable, address: int) -> range:
        """Return the pages of the allocation that begins at an address. The caller holds the lock."""
        offset = address - self._holding.region.address
        page, within = divmod(offset, self._page_size)
        if not 0 <= offset < self._capacity:
            raise InvalidOffset(f"the address {address:#x} is not one of this pool's")
        if table.begins.get(page) != within:
            raise NotMapped(f"no allocation begins at the address {address:#x}: deallocate() takes any offset and size")
        return table.allocation(page)
