"""`SparseArray`: an array with addresses for every row, and memory for the tiles of rows that were written.

Owns the table of backed tiles and their extents. It knows a `Source` and a `Region`, never a broker, and must never
hold its lock during a call of the source or the driver.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..arguments import (
    check_range,
    check_total,
    contiguous_bytes,
    deadline_of,
    location_of,
    shape_of,
    whole_number,
)
from ..dlpack import DlpackTensor, export, size_of
from ..dtypes import word_of
from ..errors import InvalidOffset, InvalidPageSize, InvalidRequest, NotMapped
from ..interrupts import KeyedLocks, Operation, device_failures
from ..safetensors import TensorInfo, numpy_array
from ..tracebacks import ends_at_the_caller
from ..views import Span
from ..vmm.driver import Location
from ..vmm.sizes import MAX_BYTES, format_exact, format_size
from .lender import Lender, Source, source_of
from .lifetime import AtAddress, MappedMemory, Placing

if TYPE_CHECKING:
    import numpy.typing as npt


@ends_at_the_caller()
class SparseArray(AtAddress):
    """`shape` elements of `dtype`, of which only tiles that were written have memory. Thread-safe, a context manager.

    A tile is `tile_rows` rows, whole entries of the first axis: ids of an embedding table, blocks of a KV cache. So the
    array is one C-ordered range of addresses, and a kernel that gets the first address finds element [i, j] where it
    would be in a dense array. With tiles along several axes, every kernel would need their layout. In return, the rows
    of a tile must fill whole granules of the device (2 MiB on a GPU). The default is the smallest number of rows that
    does.

    `dtype` is NumPy's, ml_dtypes' or torch's, its name, or its safetensors name (`"BF16"`). `absent` says how reads
    treat a tile without memory: `"error"` raises `NotMapped`, `"zero"` returns zeros. A tile is one extent. Its
    unwritten parts are zero (the drivers' contract for new memory).

    Bytes and NumPy arrays are copied in and out (`write`, `read`, `array[rows]`), on a GPU too. `tensor` returns a tile
    itself, for any framework. While one call borrows memory for a tile, other calls for the same tile wait.

    `Model.sparse_array` makes it, and borrows no memory yet. Raises `InvalidRequest` for an invalid shape, dtype or
    `absent`, `InvalidPageSize` for tiles that do not fill granules, `DeviceFailure` when the addresses cannot be
    reserved.
    """

    def __init__(
        self,
        source: Source | Lender,
        shape: Sequence[int],
        dtype: Any,
        tile_rows: int | None = None,
        absent: str = "error",
        location: Location | str = Location.DEVICE,
    ) -> None:
        if absent not in ("error", "zero"):
            raise InvalidRequest(f'reading an absent tile is "error" or "zero", not {absent!r}')
        self._dtype = word_of(dtype)
        self._shape = _checked_shape(shape, self._dtype)
        self._row_size = size_of(self._shape[1:], self._dtype)
        granularity = source.driver.device.granularity
        if tile_rows is None:
            tile_rows = _smallest_tile(self._row_size, granularity)
        self._tile_rows = _checked_tile(tile_rows, self._row_size, granularity)
        self._tile_size = self._tile_rows * self._row_size
        self._tile_count = -(-self._shape[0] // self._tile_rows)
        check_total(f"an array of shape {self._shape}", self._tile_count * self._tile_size)
        self._zero = absent == "zero"
        self._location = location_of(location)
        self._turns = KeyedLocks()
        # Held while a span is created, and while tiles are hidden before a drop.
        self._lock = threading.Lock()
        # The offsets of tiles that are being borrowed or dropped. They count as absent, although they may be mapped.
        self._hidden: set[int] = set()
        self._source = source_of(source)
        self._lender = source  # keeps the callbacks of its recalls
        with device_failures():
            self._holding = MappedMemory(self._source, self, self._tile_count * self._tile_size, "sparse array")

    # What it is

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements in each dimension. The first dimension is the rows."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The safetensors name of the element type, such as `"BF16"`."""
        return self._dtype

    @property
    def size(self) -> int:
        """The bytes of all rows, including absent ones."""
        return self._shape[0] * self._row_size

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: row r is in tile r // `tile_rows`. The last tile may have fewer."""
        return self._tile_rows

    @property
    def tile_size(self) -> int:
        """The bytes of a tile. A backed tile is charged this much, also the last one."""
        return self._tile_size

    @property
    def tile_count(self) -> int:
        """The number of tiles, including absent ones."""
        return self._tile_count

    @property
    def physical_usage_bytes(self) -> int:
        """Bytes that are mapped and charged: whole tiles."""
        return len(self._holding.region.extents) * self._tile_size

    def tiles(self) -> list[int]:
        """Return the numbers of the tiles that have memory, in order."""
        self._holding.check_open()
        with self._lock:
            present = self._holding.region.extents.keys() - self._hidden
        return sorted(offset // self._tile_size for offset in present)

    # Copies in and out

    def write(self, row: int, data: Any, *, timeout: float | None = None) -> None:
        """Copy whole rows, from any object with contiguous bytes, to `row` and the following rows.

        All absent tiles get memory in one request, or none does. `timeout` is how many seconds the call may wait for
        that memory, as in `Model.allocate`. Raises `InvalidOffset` for rows outside of the array, `InvalidRequest` for
        a part of a row, `OutOfMemory`, `DescriptorLimit`, `BrokerUnavailable`, `ClosedError`; the array is unchanged
        then. Raises `DeviceFailure`, after which some of the rows may have been written.
        """
        source, until = contiguous_bytes("what rows are written from", data), deadline_of(timeout)
        rows, rest = divmod(len(source), self._row_size)
        if rest or not rows:
            raise InvalidRequest(f"{len(source)} bytes are no whole rows of {self._row_size} bytes")
        offset = self._offset(row, rows)
        span = self._backed(offset, len(source), until)
        with device_failures():
            self._source.driver.write(span.address, source)

    def read(self, row: int, rows: int = 1) -> bytes:
        """Return a copy of the bytes of `rows` rows from `row` on.

        For an absent tile it returns zeros or raises `NotMapped`, as `absent` says. Raises `InvalidOffset`,
        `DeviceFailure` and `ClosedError`.
        """
        offset = self._offset(row, rows)
        if not self._zero:
            return self._copied(self.span(offset, rows * self._row_size))
        return b"".join(self._tile_or_zeros(*part) for part in self._parts(offset, rows * self._row_size))

    def __getitem__(self, rows: int | slice) -> npt.NDArray[Any]:
        """Return a copy as a NumPy array. It is read-only, because writing to it would not change this array.

        Raises what `read` raises, `IndexError` for a row outside of the array, `InvalidRequest` if NumPy needs
        ml_dtypes for the dtype, and `ImportError` without NumPy.
        """
        first, count, shape = self._indexed(rows)
        return self._as_array(self.read(first, count) if count else b"", shape)

    def __setitem__(self, rows: int | slice, values: Any) -> None:
        """Write `values`, cast and broadcast as NumPy does. Raises what `write` raises, and what NumPy does."""
        first, count, shape = self._indexed(rows)
        data = bytearray(count * self._row_size)
        self._as_array(data, shape)[...] = values
        if count:
            self.write(first, data)

    # The memory itself

    def tensor(self, tile: int) -> DlpackTensor:
        """Return a backed tile's rows for `from_dlpack` of any framework; nothing is copied.

        The tile keeps its memory, and `drop` refuses it, while the result or a tensor made from it lives. To write a
        new tile this way, `back` it first. Raises `NotMapped`, `InvalidOffset`, `ClosedError`, and `ImportError`
        without NumPy.
        """
        (number,) = self._numbers([tile])
        rows = min(self._tile_rows, self._shape[0] - number * self._tile_rows)
        return export(self, (rows, *self._shape[1:]), self._dtype, number * self._tile_size)

    def span(self, offset: int, size: int) -> Span:
        """Keep the memory while the result lives: for code that passes on addresses in [offset, offset + size), bytes.

        Meanwhile `drop` refuses these tiles, and a closed array keeps its memory. Raises `NotMapped` when a tile is
        absent, `InvalidRequest` for a range that does not lie in the array, and `ClosedError`.
        """
        offset, size = check_range(offset, size, self.size, "a sparse array")
        self._holding.check_open()
        with self._lock:
            for missing in self._missing(self._touched(offset, size)):
                raise NotMapped(f"tile {missing} has no memory: nothing was written there")
            return self._holding.span(self, offset, size)

    def back(self, *tiles: int, timeout: float | None = None) -> None:
        """Borrow memory for those of these tiles that have none, in one request. All or nothing.

        `timeout` is that of `write`. Raises `InvalidOffset` for a tile outside of the array, `OutOfMemory`,
        `DeviceFailure`, `DescriptorLimit`, `BrokerUnavailable` and `ClosedError`.
        """
        self._borrow_missing(self._numbers(tiles), deadline_of(timeout))

    def drop(self, *tiles: int) -> None:
        """Release tiles, after waiting for all work that this process has submitted to the device.

        Raises `NotMapped` when one is absent, `BufferError` while a tensor, a span or another thread uses one,
        `InvalidOffset`, `ClosedError`; all tiles stay then. After `DeviceFailure` some may be released, and `tiles`
        lists the others. The memory is also released while the broker is unreachable.
        """
        numbers = self._numbers(tiles)
        with Operation(self._holding) as operation:
            self._turns.take(numbers, operation)
            offsets = self._hide(numbers, operation)
            self._source.driver.synchronize()
            for offset in offsets:
                operation.forward(partial(self._holding.remove, [(offset, self._tile_size)]))

    def _hide(self, tiles: Sequence[int], operation: Operation) -> list[int]:
        """Check that the tiles are backed and unused, hide them until the operation ends, and return their offsets."""
        offsets = [tile * self._tile_size for tile in tiles]
        operation.ends.append(lambda: self._show(offsets))
        with self._lock:
            for missing in self._missing(tiles):
                raise NotMapped(f"tile {missing} has no memory: drop only what tiles() lists")
            for offset in offsets:
                if held := self._holding.views.held_in(self._holding.region.address + offset, self._tile_size):
                    raise BufferError(f"tile {offset // self._tile_size} is still used by {held}: release that first")
            self._hidden.update(offsets)
        return offsets

    def _show(self, offsets: Sequence[int]) -> None:
        with self._lock:
            self._hidden.difference_update(offsets)

    def _backed(self, offset: int, size: int, until: float | None) -> Span:
        """Return a span of bytes, after borrowing memory for absent tiles."""
        while True:
            try:
                return self.span(offset, size)
            except NotMapped:
                self._borrow_missing(self._touched(offset, size), until)

    def _borrow_missing(self, tiles: Sequence[int], until: float | None) -> None:
        with Operation(self._holding) as operation:
            self._turns.take(tiles, operation)
            self._holding.check_open()  # another thread may have closed it while this call waited
            offsets = [tile * self._tile_size for tile in self._missing(tiles)]
            if offsets:
                placing = Placing(self._holding, offsets)
                operation.ends.append(lambda: self._show(offsets))
                operation.undo.append(placing.take_back)
                self._hidden.update(offsets)
                self._source.borrow(self._tile_size, len(offsets), self._location, placing, until)
                operation.undo.clear()

    # Its end

    def __repr__(self) -> str:
        backed = format_size(self.physical_usage_bytes)
        what = f"{self._dtype} {list(self._shape)}, {backed} backed{', closed' * self.closed}"
        what += self._holding.views.held_by(", kept by ")
        return f"<membroker.SparseArray of {what}>"

    # Rows, tiles and bytes

    def _offset(self, row: int, rows: int) -> int:
        """Return the offset in bytes of row `row`, after checking that all `rows` rows lie in the array."""
        first, count = (whole_number("a number of rows", value, InvalidOffset) for value in (row, rows))
        if count < 1 or not 0 <= first < self._shape[0] or count > self._shape[0] - first:
            raise InvalidOffset(f"{count} rows from row {first} do not lie in an array of {self._shape[0]} rows")
        return first * self._row_size

    def _indexed(self, rows: int | slice) -> tuple[int, int, tuple[int, ...]]:
        """Return the first row, the number of rows, and the shape of the result for an index, as NumPy does."""
        if isinstance(rows, slice):
            first, stop, step = rows.indices(self._shape[0])
            if step != 1:
                raise InvalidRequest(f"rows are read and written side by side, not in steps of {step}")
            count = max(0, stop - first)
            return first, count, (count, *self._shape[1:])
        row = operator.index(rows)
        if not -self._shape[0] <= row < self._shape[0]:
            raise IndexError(f"row {row} does not lie in an array of {self._shape[0]} rows")
        return row % self._shape[0], 1, self._shape[1:]

    def _numbers(self, tiles: Iterable[int]) -> list[int]:
        """Return each tile once, in order, after checking that all lie in the array."""
        numbers = sorted({whole_number("a tile's number", tile, InvalidOffset) for tile in tiles})
        for number in (*numbers[:1], *numbers[-1:]):
            if not 0 <= number < self._tile_count:
                raise InvalidOffset(f"there are tiles 0 to {self._tile_count - 1}, and no tile {number}")
        return numbers

    def _touched(self, offset: int, size: int) -> range:
        return range(offset // self._tile_size, -(-(offset + size) // self._tile_size) if size else 0)

    def _missing(self, tiles: Iterable[int]) -> Iterator[int]:
        there, hidden = self._holding.region.extents, self._hidden
        return (tile for tile in tiles if (offset := tile * self._tile_size) not in there or offset in hidden)

    def _parts(self, offset: int, size: int) -> Iterable[tuple[int, int]]:
        """Split a range at the tiles' boundaries, and yield (offset, size) of each part."""
        for tile in self._touched(offset, size):
            first = max(offset, tile * self._tile_size)
            yield first, min(offset + size, (tile + 1) * self._tile_size) - first

    def _tile_or_zeros(self, offset: int, size: int) -> bytes:
        try:
            return self._copied(self.span(offset, size))
        except NotMapped:
            return bytes(size)

    def _copied(self, span: Span) -> bytes:
        with device_failures():
            return self._source.driver.read(span.address, span.size)

    def _as_array(self, data: bytes | bytearray, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return numpy_array(memoryview(data), TensorInfo("rows", self._dtype, shape, 0, len(data)))


def _checked_shape(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """Return the shape as a tuple. Raises `InvalidRequest` for one without dimensions or elements."""
    dimensions = shape_of(shape)
    if not dimensions:
        raise InvalidRequest(f"a shape has at least one dimension, as in (1000, 64), not {shape!r}")
    if not size_of(dimensions, dtype):
        raise InvalidRequest(f"a sparse array has elements, and one of shape {shape!r} has none")
    return dimensions


def _smallest_tile(row_size: int, granularity: int) -> int:
    """Return the smallest number of rows that fills whole granules. Sizes are in bytes."""
    return granularity // math.gcd(row_size, granularity)


def _checked_tile(tile_rows: object, row_size: int, granularity: int) -> int:
    """Return the rows of a tile. Raises `InvalidPageSize` unless they fill whole granules."""
    rows = whole_number("a tile's number of rows", tile_rows, InvalidPageSize)
    if not 1 <= rows <= MAX_BYTES // row_size:
        raise InvalidPageSize(f"a tile has at least one row, and less than 2^63 bytes, not {rows} rows")
    if rows * row_size % granularity:
        step = _smallest_tile(row_size, granularity)
        raise InvalidPageSize(
            f"a tile fills whole granules of {format_exact(granularity)}, and {rows} rows of {row_size} bytes do not: "
            f"take a multiple of {step} rows ({format_exact(step * row_size)}), or rows of another size"
        )
    return rows
