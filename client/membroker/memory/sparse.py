"""`SparseArray`: an array with addresses for every row, and memory for the tiles of rows that were written.

Owns which tile is backed by which extent. It knows a `Source` and a `Region`, never a broker, and must never hold its
lock during a call of the source or the driver.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..arguments import check_range, check_total, contiguous_bytes, location_of, shape_of, whole_number
from ..deprecated import renamed
from ..dtypes import word_of
from ..errors import InvalidOffset, InvalidPageSize, InvalidRequest, NotMapped
from ..interrupts import Operation, Turns
from ..safetensors import TensorInfo, numpy_array
from ..vmm.driver import Location
from ..vmm.sizes import MAX_BYTES, format_size
from .dlpack import DlpackTensor, export, size_of
from .lender import Lender, Source, source_of
from .lifetime import MappedMemory, Placing, Resource
from .region import device_failures
from .views import Span

if TYPE_CHECKING:
    import numpy.typing as npt


@renamed(physical_memory_usage="physical_usage_bytes")
class SparseArray(Resource):
    """`shape` elements of `dtype`, of which only tiles that were written have memory. Thread-safe, a context manager.

    A tile is `tile_rows` rows, whole entries of the first axis: ids of an embedding table, blocks of a KV cache. So the
    array is one C-ordered range of addresses, and a kernel that gets the first address reaches element [i, j] where it
    would in a dense one; with tiles along several axes every kernel would have to know of them. The price: rows of a
    tile fill whole granules of the device (2 MiB on a card), so the number of rows must fit; by default it is the
    smallest that does.

    `dtype` is NumPy's, ml_dtypes' or torch's, its name, or safetensors' word for it (`"BF16"`). `absent` is what
    reading finds where nothing was written: `"error"` (`NotMapped`), or `"zero"`. A tile is one extent; what of it was
    not written is zero (the drivers' contract for what is new).

    Bytes and NumPy arrays go in and out by copies (`write`, `read`, `array[rows]`), on a card too; `tensor` is a tile
    itself, in any framework. When one call gives a tile memory, others that want the same tile wait for it.

    `Model.sparse_array` makes it, and no memory is borrowed yet. Raises `InvalidRequest` for a shape, a dtype or a
    choice that is none, `InvalidPageSize` for tiles that do not fill granules, `DeviceFailure` when the addresses
    cannot be had.
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
        self._row_size = size_of(self._dtype, self._shape[1:])
        granularity = source.driver.device.granularity
        if tile_rows is None:
            tile_rows = _smallest_tile(self._row_size, granularity)
        self._tile_rows = _checked_tile(tile_rows, self._row_size, granularity)
        self._tile_size = self._tile_rows * self._row_size
        self._tile_count = -(-self._shape[0] // self._tile_rows)
        check_total(f"an array of shape {self._shape}", self._tile_count * self._tile_size)
        self._zero = absent == "zero"
        self._location = location_of(location)
        self._turns = Turns()
        # Guards what is read or seen against tiles that are just being dropped.
        self._lock = threading.Lock()
        # Tiles that are being dropped: nothing finds them, although they are still mapped.
        self._hidden: set[int] = set()
        self._source = source_of(source)
        with device_failures():
            self._holding = MappedMemory(self._source, self, self._tile_count * self._tile_size, "sparse array")

    # What it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements by dimension; the first one counts rows."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The word for an element."""
        return self._dtype

    @property
    def size(self) -> int:
        """Bytes from the first row to the last, absent ones included."""
        return self._shape[0] * self._row_size

    @property
    def address(self) -> int:
        """The first row's address, in this process, whether it is there or not. Raises `ClosedError`."""
        self._holding.check_open()
        return self._holding.region.address

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: row r is in tile r // `tile_rows`. The last tile may have fewer."""
        return self._tile_rows

    @property
    def tile_size(self) -> int:
        """Bytes of a tile: what is charged for it, the last one too."""
        return self._tile_size

    @property
    def tile_count(self) -> int:
        """How many tiles there are, absent ones included."""
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

    def write(self, row: int, data: Any) -> None:
        """Copy whole rows, anything with contiguous bytes, to `row` and the ones behind it; absent tiles get memory.

        All tiles that are missing come in one request, or none. Raises `InvalidOffset` for rows outside of the array,
        `InvalidRequest` for no whole rows, `OutOfMemory`, `DescriptorLimit`, `BrokerUnavailable`, `ClosedError`, and
        nothing has changed; and `DeviceFailure`, after which the rows may have been written in part.
        """
        source = contiguous_bytes("what rows are written from", data)
        rows, rest = divmod(len(source), self._row_size)
        if rest or not rows:
            raise InvalidRequest(f"{len(source)} bytes are no whole rows of {self._row_size} bytes")
        offset = self._offset(row, rows)
        span = self._backed(offset, len(source))
        with device_failures():
            self._source.driver.write(span.address, source)

    def read(self, row: int, rows: int = 1) -> bytes:
        """Return a copy of `rows` rows from `row` on.

        Of an absent tile it is zeros, or raises `NotMapped`, as the array was made. Raises `InvalidOffset`,
        `DeviceFailure` and `ClosedError`.
        """
        offset = self._offset(row, rows)
        if not self._zero:
            return self._copied(self.span(offset, rows * self._row_size))
        return b"".join(self._tile_or_zeros(*part) for part in self._parts(offset, rows * self._row_size))

    def __getitem__(self, rows: int | slice) -> npt.NDArray[Any]:
        """Return a copy as a NumPy array, which is read-only because writing to it would not write to this.

        Raises what `read` raises, `IndexError` for a row that there is not, `InvalidRequest` where NumPy needs
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
        """Return a present tile's rows for `from_dlpack` of any framework; nothing is copied.

        It is there, and `drop` refuses, as long as the result and every tensor made of it live. To write a new tile
        this way, `back` it first. Raises `NotMapped`, `InvalidOffset`, `ClosedError`, and `ImportError` without NumPy.
        """
        (number,) = self._numbers([tile])
        rows = min(self._tile_rows, self._shape[0] - number * self._tile_rows)
        return export(self, self._dtype, (rows, *self._shape[1:]), number * self._tile_size)

    def span(self, offset: int, size: int) -> Span:
        """Keep bytes as long as the result lives: for whoever gives addresses in [offset, offset + size) away.

        `drop` of these tiles refuses meanwhile, and a closed array keeps its memory. Raises `NotMapped` when a tile is
        absent, `InvalidRequest` for a range that does not lie in the array, and `ClosedError`.
        """
        offset, size = check_range(offset, size, self.size, "a sparse array")
        self._holding.check_open()
        with self._lock:
            for missing in self._missing(self._touched(offset, size)):
                raise NotMapped(f"tile {missing} has no memory: nothing was written there")
            return self._holding.span(self, offset, size)

    def back(self, *tiles: int) -> None:
        """Give tiles memory, as a first write does: all that are absent in one request, or none.

        Raises `InvalidOffset` for a tile that there is not, and otherwise as `write`.
        """
        self._borrow_missing(self._numbers(tiles))

    def drop(self, *tiles: int) -> None:
        """Give tiles back, after all work that this process has given to the device; they are absent then.

        Raises `NotMapped` when one is absent, `BufferError` while a tensor, a span or another thread uses one,
        `InvalidOffset`, `ClosedError`; then all of them stay. After `DeviceFailure` some may be gone, and `tiles` has
        the others. When the broker is away the memory is given back all the same.
        """
        numbers = self._numbers(tiles)
        with Operation(self._holding) as operation:
            self._turns.take(numbers, operation)
            offsets = self._hide(numbers, operation)
            self._source.driver.synchronize()
            for offset in offsets:
                operation.forward(partial(self._holding.remove, [(offset, self._tile_size)]))

    def _hide(self, tiles: Sequence[int], operation: Operation) -> list[int]:
        """Let nothing find tiles that nothing uses, until the operation ends, and return their offsets."""
        offsets = [tile * self._tile_size for tile in tiles]
        operation.ends.append(lambda: self._show(offsets))
        with self._lock:
            for missing in self._missing(tiles):
                raise NotMapped(f"tile {missing} has no memory: drop only what tiles() lists")
            for offset in offsets:
                if self._holding.views.any_in(self._holding.region.address + offset, self._tile_size):
                    raise BufferError(f"tile {offset // self._tile_size} is still used: release its tensors first")
            self._hidden.update(offsets)
        return offsets

    def _show(self, offsets: Sequence[int]) -> None:
        with self._lock:
            self._hidden.difference_update(offsets)

    def _backed(self, offset: int, size: int) -> Span:
        """Return a span of bytes whose tiles got memory where they had none."""
        while True:
            try:
                return self.span(offset, size)
            except NotMapped:
                self._borrow_missing(self._touched(offset, size))

    def _borrow_missing(self, tiles: Sequence[int]) -> None:
        with Operation(self._holding) as operation:
            self._turns.take(tiles, operation)
            self._holding.check_open()  # it may have been closed while this call waited for its turn
            offsets = [tile * self._tile_size for tile in self._missing(tiles)]
            if offsets:
                placing = Placing(self._holding, offsets)
                operation.ends.append(lambda: self._show(offsets))
                operation.undo.append(placing.take_back)
                self._hidden.update(offsets)
                self._source.borrow(self._tile_size, len(offsets), self._location, placing)
                operation.undo.clear()

    # Its end

    def __repr__(self) -> str:
        backed = format_size(self.physical_usage_bytes)
        what = f"{self._dtype} {list(self._shape)}, {backed} backed{', closed' * self.closed}"
        return f"<membroker.SparseArray of {what}>"

    # Rows, tiles and bytes

    def _offset(self, row: int, rows: int) -> int:
        """Return the first byte of `rows` rows, after checking both."""
        first, count = (whole_number("a number of rows", value, InvalidOffset) for value in (row, rows))
        if count < 1 or not 0 <= first < self._shape[0] or count > self._shape[0] - first:
            raise InvalidOffset(f"{count} rows from row {first} do not lie in an array of {self._shape[0]} rows")
        return first * self._row_size

    def _indexed(self, rows: int | slice) -> tuple[int, int, tuple[int, ...]]:
        """Return an index as the first row, how many, and the shape of the result, as NumPy understands it."""
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
        """Return each tile once, in order, after checking that there is such a tile."""
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
        """Cut a range where tiles begin, and return (offset, size) of each part."""
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
    """Return the shape of an array that has elements. Raises `InvalidRequest`."""
    dimensions = shape_of(shape)
    if not dimensions:
        raise InvalidRequest(f"a shape has at least one dimension, as in (1000, 64), not {shape!r}")
    if not size_of(dtype, dimensions):
        raise InvalidRequest(f"a sparse array has elements, and one of shape {shape!r} has none")
    return dimensions


def _smallest_tile(row_size: int, granularity: int) -> int:
    """Return the smallest number of rows that fills whole granules."""
    return granularity // math.gcd(row_size, granularity)


def _checked_tile(tile_rows: object, row_size: int, granularity: int) -> int:
    """Return the rows of a tile, which fill whole granules. Raises `InvalidPageSize`."""
    rows = whole_number("a tile's number of rows", tile_rows, InvalidPageSize)
    if not 1 <= rows <= MAX_BYTES // row_size:
        raise InvalidPageSize(f"a tile has at least one row, and less than 2^63 bytes, not {rows} rows")
    if rows * row_size % granularity:
        step = _smallest_tile(row_size, granularity)
        raise InvalidPageSize(
            f"a tile fills whole granules of {format_size(granularity)}, and {rows} rows of {row_size} bytes do not: "
            f"take a multiple of {step} rows ({format_size(step * row_size)}), or rows of another size"
        )
    return rows
