"""The header with which a segment describes its tensors: the same as that of a safetensors file.

Owns reading and writing that header, and the step from an entry to a NumPy array. It must trust no byte that it reads,
and must not import NumPy before an array is asked for.

An image is 8 bytes with the header's length (little-endian), the header (JSON), and the tensors' bytes without a hole:
https://github.com/huggingface/safetensors#format. Dtypes, their order and the limit of the header are those of the
reference implementation, version 0.8.0 (`safetensors/src/tensor.rs`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

from .arguments import shape_of
from .dtypes import DTYPES, RANKS, numpy_dtype, quoted, word_of
from .errors import InvalidRequest, MembrokerError
from .vmm.sizes import MAX_BYTES, is_power_of_two, round_up

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_HEADER_BYTES = 100_000_000
"""The longest header of the format, without the 8 bytes of its length (`MAX_HEADER_SIZE` of the reference)."""

_LENGTH_BYTES = 8
ALIGNMENT = 256
"""Each tensor of a segment begins at a multiple of this: kernels for fp8 and bf16 require 16 to 128, and JAX 64."""
_PADDING = re.compile("![0-9]+")
"""The names of the tensors that fill the gaps before aligned ones, because the format allows no gap."""
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_LONGEST_NUMBER = len(str(MAX_BYTES)) + 1
_SURROGATE = re.compile("[\ud800-\udfff]")


class InvalidTensorIndex(MembrokerError, ValueError):
    """The bytes do not begin with a valid safetensors header. The message says what is wrong, and where."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of an image: `size` bytes, row by row and little-endian, from byte `offset` of the image.

    `offset` counts from the image's first byte, the header included. `dtype` is safetensors' word (`F32`, `BF16`),
    `shape` counts elements, and is () for a scalar; elements of F4 and F6 are packed, several to a byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TensorIndex(Mapping[str, TensorInfo]):
    """A header: the tensors by name, in the order of their bytes.

    `metadata` is the file's own text. `header_size` counts the bytes before the first tensor, including the 8 of the
    length; `size` counts the bytes of the whole image. What `write_index` has put between tensors to align them is not
    among these.
    """

    _tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    header_size: int
    size: int

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


# --- reading ---


def read_index(
    view: memoryview | bytes, *, max_header_bytes: int = MAX_HEADER_BYTES, total: int | None = None
) -> TensorIndex:
    """Return the index at the beginning of `view`, which may be longer than the image: a segment is rounded up.

    `total` is the number of bytes of the image and what follows it, if `view` has only the header.

    The bytes may be hostile. Each tensor that this returns lies within `view`, without overlap or hole, and the
    reference implementation reads the same. This refuses more than the reference: names that occur twice, unknown
    fields, null metadata, and a shape whose other dimensions overflow beside a 0. The header is copied before it is
    parsed, so it does not matter if another process changes it meanwhile.

    A hostile header of the full 100 MB takes up to 30 seconds and 3 GB (measured). To read other processes' segments,
    give a lower `max_header_bytes`. A tensor takes some 100 bytes of header.

    Raises `InvalidTensorIndex`.
    """
    with memoryview(view).cast("B") as image:
        header, available = _header(image, max_header_bytes), len(image) if total is None else total
    header_size = _LENGTH_BYTES + len(header)
    document = _parse(header)
    metadata = _metadata(document.pop(_METADATA, {}))
    tensors = sorted((_entry(name, fields, header_size) for name, fields in document.items()), key=_place)
    _check_places(tensors, header_size, available)
    return _index(tensors, metadata, header_size)


def _header(image: memoryview, most: int) -> bytes:
    if len(image) < _LENGTH_BYTES:
        raise InvalidTensorIndex(f"{len(image)} bytes are too short: the header's length alone takes {_LENGTH_BYTES}")
    length = int.from_bytes(image[:_LENGTH_BYTES], "little")
    if length == 0:
        raise InvalidTensorIndex("the header's length is 0: no index was written here")
    if length > min(most, MAX_HEADER_BYTES):
        raise InvalidTensorIndex(f"the header's length is {length} bytes, more than {min(most, MAX_HEADER_BYTES)}")
    if length > len(image) - _LENGTH_BYTES:
        raise InvalidTensorIndex(
            f"the header's length is {length} bytes, of which {len(image) - _LENGTH_BYTES} are there"
        )
    header = bytes(image[_LENGTH_BYTES : _LENGTH_BYTES + length])
    if not header.startswith(b"{"):
        raise InvalidTensorIndex(f"the header begins with {header[:1]!r}, not with a brace")
    return header


def _parse(header: bytes) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(
            header.decode(),
            object_pairs_hook=_object,
            parse_int=_whole_number,
            parse_float=_no_number,
            parse_constant=_no_number,
        )
    except UnicodeDecodeError as error:
        place = _LENGTH_BYTES + error.start
        raise InvalidTensorIndex(f"the header is not UTF-8: {error.reason} at byte {place}") from None
    except json.JSONDecodeError as error:
        raise InvalidTensorIndex(f"the header is not JSON: {error.msg}, at its character {error.pos}") from None
    except RecursionError:
        raise InvalidTensorIndex("the header is nested too deeply") from None
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict, and refuse a name that occurs twice: json itself would keep the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        ((double, times),) = Counter(name for name, _ in pairs).most_common(1)
        raise InvalidTensorIndex(f"the header has the name {quoted(double)} {times} times in one object")
    return found


def _whole_number(text: str) -> int:
    """Return a number. A long one is refused first: Python would take long, or raise an error of its own."""
    if len(text) > _LONGEST_NUMBER or text == "-0":
        _no_number(text)
    return int(text)


def _no_number(text: str) -> NoReturn:
    raise InvalidTensorIndex(f"the header has the number {quoted(text)}; its numbers are whole, from 0 to 2^63-1")


def _metadata(found: object) -> dict[str, str]:
    if not (isinstance(found, dict) and all(_is_text(key) and _is_text(value) for key, value in found.items())):
        raise InvalidTensorIndex(f"{_METADATA} must be an object of text, not {quoted(found)}")
    return found


def _entry(name: str, fields: object, header_size: int) -> TensorInfo:
    if not _is_text(name):
        raise InvalidTensorIndex(f"the name {quoted(name)} has half a surrogate pair: UTF-8 cannot encode it")
    if not (isinstance(fields, dict) and fields.keys() == _FIELDS):
        raise InvalidTensorIndex(
            f"tensor {quoted(name)} must have exactly dtype, shape and data_offsets, not {quoted(fields)}"
        )
    size = _size_of(name, fields["dtype"], fields["shape"], InvalidTensorIndex)
    offsets = fields["data_offsets"]
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))):
        raise InvalidTensorIndex(
            f"tensor {quoted(name)} has data_offsets {quoted(offsets)}: they are two whole numbers from 0 to 2^63-1"
        )
    begin, end = offsets
    if end - begin != size:
        raise InvalidTensorIndex(
            f"tensor {quoted(name)} has {end - begin} bytes by its data_offsets {begin} and {end}, "
            f"and {size} by its dtype {fields['dtype']} and shape {quoted(fields['shape'])}"
        )
    return TensorInfo(name, fields["dtype"], tuple(fields["shape"]), header_size + begin, size)


def _place(tensor: TensorInfo) -> tuple[int, int]:
    return tensor.offset, tensor.size


def _check_places(tensors: list[TensorInfo], header_size: int, available: int) -> None:
    """Raise if sorted tensors overlap, leave a hole, or end after `available` bytes."""
    before = TensorInfo("the header", "", (), 0, header_size)
    for left, right in pairwise([before, *tensors]):
        end = left.offset + left.size
        if right.offset != end:
            what = "overlaps" if right.offset < end else "leaves a hole after"
            raise InvalidTensorIndex(
                f"tensor {quoted(right.name)} {what} {quoted(left.name)}: it begins at byte {right.offset}, not {end}"
            )
        if right.offset + right.size > available:
            raise InvalidTensorIndex(
                f"tensor {quoted(right.name)} ends at byte {right.offset + right.size}; there are {available}"
            )


# --- writing ---


def write_index(
    tensors: Mapping[str, tuple[Any, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    alignment: int | None = None,
) -> tuple[bytes, TensorIndex]:
    """Return the header's bytes, including its length, and the index that says where each tensor's bytes belong.

    `tensors` gives each name its dtype (as `word_of` takes it) and its shape. The order is the reference's: larger
    elements first, then by name. So each tensor begins at a multiple of its element's size.

    `alignment` makes each tensor begin at a multiple of so many bytes, a power of two of at least 8. The format has no
    gaps, so tensors of bytes with names such as `!1` fill them. `read_index` leaves these out; other readers show them.

    Raises `InvalidRequest` for an unknown dtype, for a shape, name or metadata that the format cannot hold, for a
    header of more than 100 MB, and for an image of more than 2^63-1 bytes.
    """
    if alignment is not None and not (is_power_of_two(alignment) and alignment >= _LENGTH_BYTES):
        raise InvalidRequest(f"an alignment is a power of two of at least {_LENGTH_BYTES} bytes, not {alignment!r}")
    placed = _placed(tensors, alignment or 1)
    document: dict[str, Any] = {} if metadata is None else {_METADATA: _checked_metadata(metadata)}
    for info in placed:
        offsets = [info.offset, info.offset + info.size]
        document[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": offsets}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    header_size = round_up(_LENGTH_BYTES + len(text), alignment or _LENGTH_BYTES)
    length = header_size - _LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise InvalidRequest(f"the header would have {length} bytes; the format allows {MAX_HEADER_BYTES}")
    moved = [TensorInfo(info.name, info.dtype, info.shape, header_size + info.offset, info.size) for info in placed]
    index = _index(moved, dict(metadata or {}), header_size)
    if index.size > MAX_BYTES:
        raise InvalidRequest("the image would have more than 2^63-1 bytes")
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length), index


def _placed(tensors: Mapping[str, tuple[Any, Sequence[int]]], alignment: int) -> list[TensorInfo]:
    """Return the tensors in their order, and what fills the gaps, with offsets from the first of them."""
    found = []
    for name, entry in tensors.items():
        if not _is_text(name) or name == _METADATA or _PADDING.fullmatch(name):
            raise InvalidRequest(f"a tensor cannot have the name {quoted(name)}")
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise InvalidRequest(f"tensor {quoted(name)} is a dtype and a shape, not {quoted(entry)}")
        dtype, dimensions = entry
        try:
            dtype, shape = word_of(dtype), shape_of(dimensions)
        except InvalidRequest as error:
            raise InvalidRequest(f"tensor {quoted(name)}: {error}") from None
        found.append((name, dtype, shape, _size_of(name, dtype, shape, InvalidRequest)))
    found.sort(key=lambda each: (-RANKS[each[1]], each[0]))
    placed: list[TensorInfo] = []
    offset = 0
    for name, dtype, shape, size in found:
        if gap := -offset % alignment:
            placed.append(TensorInfo(f"!{len(placed)}", "U8", (gap,), offset, gap))
            offset += gap
        placed.append(TensorInfo(name, dtype, shape, offset, size))
        offset += size
    return placed


def _checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not (_is_text(key) and _is_text(value)):
            raise InvalidRequest(f"metadata is text by text, not {quoted(value)} by {quoted(key)}")
    return dict(metadata)


# --- both ---


def _index(tensors: Sequence[TensorInfo], metadata: dict[str, str], header_size: int) -> TensorIndex:
    """Return the index of sorted tensors without those that fill a gap."""
    size = tensors[-1].offset + tensors[-1].size if tensors else header_size
    by_name = {info.name: info for info in tensors if not (info.dtype == "U8" and _PADDING.fullmatch(info.name))}
    return TensorIndex(by_name, metadata, header_size, size)


def _size_of(name: str, dtype: object, shape: object, wrong: type[MembrokerError]) -> int:
    """Return the bytes of a tensor, or raise `wrong`, also beside a dimension of 0, as NumPy does."""
    known = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if known is None:
        raise wrong(f"tensor {quoted(name)} has the dtype {quoted(dtype)}, which safetensors does not have")
    if not (isinstance(shape, list | tuple) and all(map(_is_count, shape))):
        raise wrong(f"tensor {quoted(name)} has the shape {quoted(shape)}: a list of whole numbers from 0 to 2^63-1")
    bits = known.bits
    for dimension in shape:
        bits *= max(dimension, 1)
        if bits > 8 * MAX_BYTES:
            raise wrong(f"tensor {quoted(name)} of shape {quoted(shape)} has more than 2^63-1 bytes")
    if 0 in shape:
        return 0
    if bits % 8:
        raise wrong(f"tensor {quoted(name)} has {bits} bits, packed: not a whole number of bytes")
    return bits // 8


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_BYTES


def _is_text(value: object) -> bool:
    """Say whether it is text that UTF-8 can encode: JSON can escape half a surrogate pair."""
    return isinstance(value, str) and not _SURROGATE.search(value)


# --- arrays ---


def numpy_array(view: memoryview, info: TensorInfo, *, raw: bool = False) -> npt.NDArray[Any]:
    """Return the tensor in `view`, the image's bytes, as a NumPy array: no copy, writable exactly when `view` is.

    The array keeps `view`'s memory alive. Its shape is `info.shape`. If the image, such as a file of another program,
    has the tensor at an unaligned place, the array is unaligned, too (`flags.aligned` is False); NumPy handles that.

    BF16 and F8 are dtypes of the package `ml_dtypes`; with `raw` they are uint16 and uint8, without that package. F4
    and F6 are packed, which NumPy does not support: with `raw` the array is `info.size` elements of uint8, and without
    it they are refused.

    Raises `InvalidRequest` if the dtype needs `raw`, if the tensor lies outside `view`, or if NumPy does not support
    the shape (more than 64 dimensions). Raises `ImportError` without NumPy.
    """
    try:
        import numpy as np
    except ImportError as error:
        raise ImportError("numpy_array needs NumPy: pip install numpy") from error
    image = memoryview(view).cast("B")
    if _size_of(info.name, info.dtype, info.shape, InvalidRequest) != info.size:
        raise InvalidRequest(f"tensor {quoted(info.name)}: {info.size} bytes do not match its dtype and shape")
    if not 0 <= info.offset <= len(image) - info.size:
        raise InvalidRequest(
            f"tensor {quoted(info.name)} has {info.size} bytes from byte {info.offset}; there are {len(image)}"
        )
    dtype, shape = numpy_dtype(info.dtype, raw), info.shape
    if raw and not DTYPES[info.dtype].name:
        shape = (info.size,)
    # np.ndarray(buffer=…) keeps the owner of the memory, but no export of it: a bytearray could shrink under it.
    flat = np.asarray(image[info.offset : info.offset + info.size]).view(dtype)
    try:
        array: npt.NDArray[Any] = flat.reshape(shape)
    except ValueError as error:
        raise InvalidRequest(f"tensor {quoted(info.name)} cannot be a NumPy array: {error}") from None
    return array


def segment_size(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> int:
    """Return how many bytes a segment needs for these tensors, name -> (dtype, shape), and their header."""
    return write_index(tensors, metadata, alignment=ALIGNMENT)[1].size
