"""Offloading: the bytes of a pool's pages are copied to the host, and the pages' memory is released to its lender.

Owns the place of each offloaded page's bytes. Some chunks are copied (`copying`) while others are unmapped or borrowed.
The pool claims the pages and has waited for the device's work. This module must never use a page that it was not
given, nor hold the pool's lock during a copy or a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..arguments import Progress
from ..errors import InvalidRequest, MembrokerError
from ..interrupts import device_failures, let_through
from ..memory.lender import Source
from ..memory.lifetime import Placing
from ..vmm.driver import AccessFlags, DriverError, Location
from ..vmm.sizes import MIB, format_exact
from .copying import Copying
from .page_store import PageStore, check_segment, name_of, shapes
from .page_table import FREE, OFFLOADED, USED, PageTable

CHUNK_BYTES = 64 * MIB
"""The most bytes of a chunk, in whole pages: large enough for the link's full speed, small enough to release early."""
BLOCK_BYTES = 256 * MIB
"""The most bytes pinned in one call, in whole pages. A block is freed when its last page has left it."""


@dataclass(slots=True, eq=False)
class Block:
    """Host memory with the bytes of `pages` pages, or reserved for them. `give_up` frees it after the last has left.

    Pinned memory begins at `address` and has room for `room` pages, so it can be kept for others. A segment has none.
    """

    pages: int
    give_up: Callable[[], None]
    address: int = 0
    room: int = 0


class Place(NamedTuple):
    """The place of one page's bytes on the host."""

    address: int
    block: Block


Places = dict[int, Place]
"""The place of each page, by page number."""


class OffloadedPages:
    """The offloaded pages of one pool. The lock of its table also guards the tables here.

    The caller has claimed the runs of pages that it passes, and they are not in use. If a method stops half way, its
    error says how many bytes are on the device and on the host.
    """

    def __init__(self, table: PageTable, source: Source, location: Location) -> None:
        self._holding, self._table, self._lock = table.holding, table, table.lock
        self._source = source
        self._location = location
        self._page_size = table.page_size
        self._places: Places = {}
        self._kept: list[Block] = []

    @property
    def size(self) -> int:
        """The bytes that are offloaded."""
        return len(self._places) * self._page_size

    # To the host

    def offload(self, runs: Sequence[range], segment: PageStore | None, progress: Progress | None) -> int:
        """Copy used pages to pinned memory, or to a segment that is then sealed, and release their memory.

        The memory of each chunk is released when its copy is complete. If it stops half way, the copied chunks are
        offloaded and the rest is unchanged. Returns the number of bytes copied.
        """
        if self._location is Location.HOST:
            raise InvalidRequest("this pool's memory is the host's already")
        self._holding.beside = self._give_up_all
        total = sum(map(len, runs)) * self._page_size
        # Seal a segment also if there are no pages to copy: other processes may wait for the seal.
        if not total and segment is None:
            return 0
        with ExitStack() as ends:
            places = self._pin(runs) if segment is None else self._lay_out(segment, runs)
            ends.callback(self._leave, places)
            gone = ends.enter_context(self._counting(total, "offloaded", "mapped"))
            ends.callback(self._allow, places, AccessFlags.NONE, AccessFlags.NONE)
            arrive = partial(self._arrive_on_host, places, gone)
            moving = ends.enter_context(Copying(self._source.driver, arrive, progress, total))
            for chunk in self._chunks(runs):
                self._holding.check_open()
                self._allow(chunk, AccessFlags.NONE, AccessFlags.READ)
                moving.begin(chunk, self._copies(chunk, places, to_host=True))
            moving.finish()
        if segment is not None:
            segment.seal()
        return total

    def _arrive_on_host(self, places: Places, gone: Places, chunk: range) -> int:
        """Unmap pages whose bytes are on the host, and release their memory; return its size in bytes."""
        start, size = chunk.start * self._page_size, len(chunk) * self._page_size
        self._holding.region.unbind(start, size)
        with self._lock:
            gone.update((page, places.pop(page)) for page in chunk)
            self._places.update((page, gone[page]) for page in chunk)
            self._table.set(chunk, OFFLOADED)
        self._holding.release(self._holding.region.offsets(start, size))
        return size

    # Back to the device

    def restore(
        self, runs: Sequence[range], progress: Progress | None, until: float | None, *, keep_pinned: bool = False
    ) -> int:
        """Borrow memory for offloaded pages, copy their bytes there, and free the host memory, or keep it pinned.

        If it stops half way, the copied pages are used again and the rest stays offloaded. Returns the number of bytes
        copied.
        """
        total = sum(map(len, runs)) * self._page_size
        if not total:
            return 0
        placings: dict[range, Placing] = {}
        with ExitStack() as ends:
            back = ends.enter_context(self._counting(total, "restored", "offloaded"))
            # Do this only at the end: freeing pinned memory waits for the GPU's work.
            ends.callback(self._leave, back, keep_pinned=keep_pinned)
            ends.callback(self._lose, placings)
            arrive = partial(self._arrive_on_device, placings, back)
            moving = ends.enter_context(Copying(self._source.driver, arrive, progress, total))
            for chunk in self._chunks(runs):
                self._holding.check_open()
                placings[chunk] = self._borrow(chunk, until)
                moving.begin(chunk, self._copies(chunk, self._places, to_host=False))
            moving.finish()
        return total

    def _borrow(self, chunk: range, until: float | None) -> Placing:
        start, end = chunk.start * self._page_size, chunk.stop * self._page_size
        placing = Placing(self._holding, range(start, end, self._page_size))
        self._source.borrow(self._page_size, len(chunk), self._location, placing, until)
        return placing

    def _arrive_on_device(self, placings: dict[range, Placing], back: Places, chunk: range) -> int:
        """Mark pages used whose bytes are on the device, and return their size in bytes."""
        for access in (AccessFlags.NONE, AccessFlags.READ):
            self._allow(chunk, access, access)
        with self._lock:
            del placings[chunk]
            self._table.set(chunk, USED)
            back.update((page, self._places.pop(page)) for page in chunk)
        return len(chunk) * self._page_size

    def _lose(self, placings: dict[range, Placing]) -> None:
        """Release memory that was borrowed but not filled: all of it, even if an interrupt ends one of the calls."""
        with ExitStack() as ends:
            for placing in placings.values():
                ends.callback(placing.take_back)

    # On the host

    def adopt(self, segment: PageStore, found: Mapping[range, int]) -> None:
        """Allocate free pages as offloaded ones: runs, with the offset of each run's bytes in a segment."""
        self._holding.beside = self._give_up_all
        keeping = ExitStack()
        keeping.enter_context(segment.kept())
        block = Block(sum(map(len, found)), keeping.close)
        places = self._side_by_side({run: segment.address + offset for run, offset in found.items()}, block)
        with self._lock:
            self._places.update(places)
            for run in found:
                self._table.set(run, OFFLOADED)
                self._table.begins[run.start] = 0

    def drop(self, pages: range) -> None:
        """Drop the bytes of the offloaded ones among these claimed pages."""
        with self._lock:
            runs = self._table.claimed_runs(OFFLOADED, pages)
            dropped = {page: self._places.pop(page) for run in runs for page in run}
            for run in runs:
                self._table.set(run, FREE)
        self._leave(dropped)

    def _pin(self, runs: Sequence[range]) -> Places:
        """Return places in pinned memory of this process, which the model is charged for."""
        pages = [page for run in runs for page in run]
        with self._lock:
            blocks, self._kept = self._kept, []
        with ExitStack() as undo:
            undo.callback(self._keep, blocks)
            self._pin_more(blocks, len(pages) - sum(block.room for block in blocks))
            undo.pop_all()
        places: Places = {}
        for block in blocks:
            some = pages[len(places) : len(places) + block.room]
            block.pages = len(some)
            places.update((page, Place(block.address + at * self._page_size, block)) for at, page in enumerate(some))
        self._keep([block for block in blocks if not block.pages])
        return places

    def _pin_more(self, blocks: list[Block], count: int) -> None:
        """Pin room for `count` more pages, and append the new blocks to `blocks`. All or nothing."""
        source, size, step = self._source, self._page_size, max(1, BLOCK_BYTES // self._page_size)
        if count <= 0:
            return
        with ExitStack() as undo:
            source.charge(count * size, Location.HOST)
            undo.callback(source.credit, count * size, Location.HOST)
            more = []
            for first in range(0, count, step):
                let_through()
                room = min(step, count - first)
                address = source.driver.pin(room * size)
                undo.callback(source.driver.unpin, address)
                more.append(Block(room, partial(_unpin, source, address, room * size), address, room))
            undo.pop_all()
        blocks += more

    def _keep(self, blocks: Iterable[Block]) -> None:
        """Keep empty blocks for the next offload."""
        with self._lock:
            self._kept.extend(blocks)

    def trim(self) -> None:
        """Free the blocks that were kept pinned."""
        with self._lock:
            blocks, self._kept = self._kept, []
        self._give_up(blocks)

    def _leave(self, places: Places, *, keep_pinned: bool = False) -> None:
        """Remove the pages of `places` from their blocks. Free the blocks that are then empty, or keep pinned ones."""
        empty: list[Block] = []
        with self._lock:
            for place in places.values():
                place.block.pages -= 1
                if not place.block.pages:
                    empty.append(place.block)
        kept = [block for block in empty if keep_pinned and block.room]
        self._keep(kept)
        self._give_up(block for block in empty if block not in kept)

    def _give_up(self, blocks: Iterable[Block]) -> None:
        """Free all blocks. A block that the driver fails to free stays pinned and charged, and `trim` retries."""
        with ExitStack() as ends:
            for block in blocks:
                ends.callback(self._give_one_up, block)

    def _give_one_up(self, block: Block) -> None:
        try:
            block.give_up()
        except DriverError:
            if block.room:
                self._keep([block])
            raise

    def _give_up_all(self) -> None:
        places, self._places = self._places, {}
        with ExitStack() as ends:
            ends.callback(self.trim)
            self._leave(places)

    def _lay_out(self, segment: PageStore, runs: Sequence[range]) -> Places:
        """Return places in a segment that this process writes, after writing the header with each run's offset."""
        check_segment(segment, self._source.driver)
        if segment.location != Location.HOST.value:
            raise InvalidRequest(f"{segment.resource_name} is of the device: it would keep as much there as it frees")
        with ExitStack() as keeping:
            keeping.enter_context(segment.filled())
            index = segment.lay_out(shapes(runs, self._page_size))
            if not runs:
                return {}
            addresses = {run: segment.address + index[name_of(run, self._page_size)].offset for run in runs}
            block = Block(sum(map(len, runs)), keeping.pop_all().close)
        return self._side_by_side(addresses, block)

    def _side_by_side(self, addresses: Mapping[range, int], block: Block) -> Places:
        return {
            page: Place(address + at * self._page_size, block)
            for run, address in addresses.items()
            for at, page in enumerate(run)
        }

    def _allow(self, pages: Iterable[int], noted: AccessFlags, access: AccessFlags) -> None:
        """Set `access` on the pages whose recorded access is `noted`."""
        for page in pages if self._table.restricted else ():
            if self._table.access(page) is noted:
                self._source.driver.set_access(self._address(page), self._page_size, access)

    # Chunks

    def _chunks(self, runs: Sequence[range]) -> Iterator[range]:
        step = max(1, CHUNK_BYTES // self._page_size)
        for run in runs:
            for first in range(run.start, run.stop, step):
                yield range(first, min(first + step, run.stop))

    def _copies(self, chunk: range, places: Places, *, to_host: bool) -> Iterator[tuple[int, int, int]]:
        """Yield (target address, source address, bytes): one for each run of pages that is contiguous on the host."""
        first = 0
        for at in range(1, len(chunk) + 1):
            host, block = places[chunk[first]]
            size = (at - first) * self._page_size
            # Two blocks may be adjacent by chance, and one copy must not span both.
            if at < len(chunk) and places[chunk[at]] == (host + size, block):
                continue
            device = self._address(chunk[first])
            yield (host, device, size) if to_host else (device, host, size)
            first = at

    def _address(self, page: int) -> int:
        return self._holding.region.address + page * self._page_size

    @contextmanager
    def _counting(self, total: int, done: str, rest: str) -> Iterator[Places]:
        """Yield a table for the completed pages. An error of the block gets the numbers of done and other bytes."""
        moved: Places = {}
        try:
            with device_failures():
                yield moved
        except MembrokerError as error:
            size = len(moved) * self._page_size
            numbers = {f"{done}_bytes": str(size), f"{rest}_bytes": str(total - size)}
            # Change the error in place: it may come from `progress`, and its class may have attributes of its own.
            error.args = (f"{error}; {format_exact(size)} of {format_exact(total)} are {done}, the others stay {rest}",)
            error.metadata.update(numbers)
            raise


def _unpin(source: Source, address: int, size: int) -> None:
    source.driver.unpin(address)
    source.credit(size, Location.HOST)
