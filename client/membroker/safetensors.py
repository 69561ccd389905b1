"""The tensor index: the header with which a segment describes itself, which is that of a safetensors file.

Owns the reading and the writing of that header, and the step from an entry to a NumPy array. It must never believe a
byte that it reads, and never import NumPy or a framework before an array is asked for.

An image is 8 bytes with the header's length (little-endian), the header (JSON), and the tensors' bytes without a hole:
https://github.com/huggingface/safetensors#format. Dtypes, their order and the bound of the header are those of its
reference implementation, version 0.8.0 (`safetensors/src/tensor.rs`).
"""

from __future__ import annotations

import json
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .arguments import shape_of
from .errors import InvalidRequest, MembrokerError
from .vmm.sizes import MAX_BYTES, is_power_of_two, round_up

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_HEADER_BYTES = 100_000_000
"""The longest header that the format has, without the 8 bytes of its length (`MAX_HEADER_SIZE` of the reference)."""

_LENGTH_BYTES = 8
ALIGNMENT = 256
"""Where a segment's first tensor begins, as kernels and JAX like it; the format allows no gap before the others."""
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_LONGEST_NUMBER = len(str(MAX_BYTES)) + 1
_SURROGATE = re.compile("[\ud800-\udfff]")

# A stranger's name can have 100 MB: messages have the beginning and the end of it, and little of what is nested.
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlevel = 60, 2
_quoted = _SHORT.repr


class _Dtype(NamedTuple):
    """What an element is: `bits` of it, its `name` in NumPy ("" when it is packed), or in ml_dtypes (`extension`)."""

    bits: int
    name: str = ""
    extension: bool = False


# In the order of the reference's enum: its writer places the last of these first.
_DTYPES = {
    "BOOL": _Dtype(8, "bool"),
    "F4": _Dtype(4),
    "F6_E2M3": _Dtype(6),
    "F6_E3M2": _Dtype(6),
    "U8": _Dtype(8, "uint8"),
    "I8": _Dtype(8, "int8"),
    "F8_E5M2": _Dtype(8, "float8_e5m2", extension=True),
    "F8_E4M3": _Dtype(8, "float8_e4m3fn", extension=True),
    "F8_E8M0": _Dtype(8, "float8_e8m0fnu", extension=True),
    "F8_E4M3FNUZ": _Dtype(8, "float8_e4m3fnuz", extension=True),
    "F8_E5M2FNUZ": _Dtype(8, "float8_e5m2fnuz", extension=True),
    "I16": _Dtype(16, "int16"),
    "U16": _Dtype(16, "uint16"),
    "F16": _Dtype(16, "float16"),
    "BF16": _Dtype(16, "bfloat16", extension=True),
    "I32": _Dtype(32, "int32"),
    "U32": _Dtype(32, "uint32"),
    "F32": _Dtype(32, "float32"),
    "C64": _Dtype(64, "complex64"),
    "F64": _Dtype(64, "float64"),
    "I64": _Dtype(64, "int64"),
    "U64": _Dtype(64, "uint64"),
}
_RANKS = {text: rank for rank, text in enumerate(_DTYPES)}
_TEXTS = {dtype.name: text for text, dtype in _DTYPES.items() if dtype.name}


class InvalidTensorIndex(MembrokerError, ValueError):
    """The bytes do not begin with a safetensors header, or it promises what is not there. The message says where."""


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
    """A header that was read or written: the tensors by name, in the order of their bytes.

    `metadata` is the file's own text, `header_size` the bytes before the first tensor (the 8 of the length
    included), `size` the bytes of the whole image.
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

    `total` is how many bytes there are, where `view` is no more than the header of them.

    The bytes are a stranger's. Whatever this returns lies within `view`, has no overlap and no hole, and the
    reference implementation reads the same from it. This refuses more: doubled names, unknown fields, null metadata,
    and a shape whose other dimensions overflow beside a 0. The header is copied before it is parsed, so that a
    writer who changes it meanwhile confuses nobody.

    A hostile header of the full 100 MB costs up to half a minute and 3 GB (measured): who reads strangers' segments
    gives a lower `max_header_bytes`. A tensor takes some 100 bytes of it.

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
        raise InvalidTensorIndex(f"{len(image)} bytes are no image: the header's length alone takes {_LENGTH_BYTES}")
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
    """Make an object of its pairs: json itself would let the last of two equal names win."""
    found = dict(pairs)
    if len(found) != len(pairs):
        ((double, times),) = Counter(name for name, _ in pairs).most_common(1)
        raise InvalidTensorIndex(f"the header has the name {_quoted(double)} {times} times in one object")
    return found


def _whole_number(text: str) -> int:
    """Read a number; a long one is refused before Python refuses it in its own words, or takes its time."""
    if len(text) > _LONGEST_NUMBER or text == "-0":
        _no_number(text)
    return int(text)


def _no_number(text: str) -> NoReturn:
    raise InvalidTensorIndex(f"the header has the number {_quoted(text)}; its numbers are whole, from 0 to 2^63-1")


def _metadata(found: object) -> dict[str, str]:
    if not (isinstance(found, dict) and all(_is_text(key) and _is_text(value) for key, value in found.items())):
        raise InvalidTensorIndex(f"{_METADATA} must be an object of text, not {_quoted(found)}")
    return found


def _entry(name: str, fields: object, header_size: int) -> TensorInfo:
    if not _is_text(name):
        raise InvalidTensorIndex(f"the name {_quoted(name)} has half a surrogate pair: it is no text")
    if not (isinstance(fields, dict) and fields.keys() == _FIELDS):
        raise InvalidTensorIndex(
            f"tensor {_quoted(name)} must have exactly dtype, shape and data_offsets, not {_quoted(fields)}"
        )
    size = _size_of(name, fields["dtype"], fields["shape"], InvalidTensorIndex)
    offsets = fields["data_offsets"]
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))):
        raise InvalidTensorIndex(
            f"tensor {_quoted(name)} has data_offsets {_quoted(offsets)}: they are two whole numbers from 0 to 2^63-1"
        )
    begin, end = offsets
    if end - begin != size:
        raise InvalidTensorIndex(
            f"tensor {_quoted(name)} has {end - begin} bytes by its data_offsets {begin} and {end}, "
            f"and {size} by its dtype {fields['dtype']} and shape {_quoted(fields['shape'])}"
        )
    return TensorInfo(name, fields["dtype"], tuple(fields["shape"]), header_size + begin, size)


def _place(tensor: TensorInfo) -> tuple[int, int]:
    return tensor.offset, tensor.size


def _check_places(tensors: list[TensorInfo], header_size: int, available: int) -> None:
    """Raise where sorted tensors overlap, leave a hole, or leave the view of `available` bytes."""
    before = TensorInfo("the header", "", (), 0, header_size)
    for left, right in pairwise([before, *tensors]):
        end = left.offset + left.size
        if right.offset != end:
            what = "overlaps" if right.offset < end else "leaves a hole after"
            raise InvalidTensorIndex(
                f"tensor {_quoted(right.name)} {what} {_quoted(left.name)}: it begins at byte {right.offset}, not {end}"
            )
        if right.offset + right.size > available:
            raise InvalidTensorIndex(
                f"tensor {_quoted(right.name)} ends at byte {right.offset + right.size}; there are {available}"
            )


# --- writing ---


def write_index(
    tensors: Mapping[str, tuple[Any, Sequence[int]]], metadata: Mapping[str, str] | None = None, *, alignment: int = 8
) -> tuple[bytes, TensorIndex]:
    """Return the header's bytes, its length included, and the index that says where each tensor's bytes belong.

    `tensors` gives each name its dtype (as `word_of` takes it) and its shape. They are placed as the reference places
    them: larger elements first, then by name. The format has no room for padding between tensors, and so this is the
    order in which each begins at a multiple of its own element: all that stands before it are larger elements or
    equal ones, whose sizes are powers of two. (The caller's order would put an F32 behind three bytes of U8.)

    The header is padded with spaces, so that the first tensor begins at a multiple of `alignment` bytes, a power of
    two of at least 8; those after it begin where the one before ends.

    Raises `InvalidRequest` for an unknown dtype, a shape, name, or metadata that the format can't hold, a header of
    more than 100 MB, or an image of more than 2^63-1 bytes.
    """
    if not (is_power_of_two(alignment) and alignment >= _LENGTH_BYTES):
        raise InvalidRequest(f"an alignment is a power of two of at least {_LENGTH_BYTES} bytes, not {alignment!r}")
    placed = _placed(tensors)
    document: dict[str, Any] = {} if metadata is None else {_METADATA: _checked_metadata(metadata)}
    for info in placed:
        offsets = [info.offset, info.offset + info.size]
        document[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": offsets}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    header_size = round_up(_LENGTH_BYTES + len(text), alignment)
    length = header_size - _LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise InvalidRequest(f"the header would have {length} bytes; the format allows {MAX_HEADER_BYTES}")
    moved = [TensorInfo(info.name, info.dtype, info.shape, header_size + info.offset, info.size) for info in placed]
    index = _index(moved, dict(metadata or {}), header_size)
    if index.size > MAX_BYTES:
        raise InvalidRequest("the image would have more than 2^63-1 bytes")
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length), index


def _placed(tensors: Mapping[str, tuple[Any, Sequence[int]]]) -> list[TensorInfo]:
    """Return the tensors in their order, with offsets from the first of them."""
    found = []
    for name, entry in tensors.items():
        if not _is_text(name) or name == _METADATA:
            raise InvalidRequest(f"a tensor cannot have the name {_quoted(name)}")
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise InvalidRequest(f"tensor {_quoted(name)} is a dtype and a shape, not {_quoted(entry)}")
        dtype, dimensions = entry
        try:
            dtype, shape = word_of(dtype), shape_of(dimensions)
        except InvalidRequest as error:
            raise InvalidRequest(f"tensor {_quoted(name)}: {error}") from None
        found.append((name, dtype, shape, _size_of(name, dtype, shape, InvalidRequest)))
    found.sort(key=lambda each: (-_RANKS[each[1]], each[0]))
    placed, offset = [], 0
    for name, dtype, shape, size in found:
        placed.append(TensorInfo(name, dtype, shape, offset, size))
        offset += size
    return placed


def _checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not (_is_text(key) and _is_text(value)):
            raise InvalidRequest(f"metadata is text by text, not {_quoted(value)} by {_quoted(key)}")
    return dict(metadata)


# --- both ---


def _index(tensors: Iterable[TensorInfo], metadata: dict[str, str], header_size: int) -> TensorIndex:
    by_name = {info.name: info for info in tensors}
    return TensorIndex(by_name, metadata, header_size, header_size + sum(info.size for info in by_name.values()))


def _size_of(name: str, dtype: object, shape: object, wrong: type[MembrokerError]) -> int:
    """Return the bytes of a tensor, or raise `wrong`. A dimension of 0 excuses no other: NumPy would refuse them."""
    known = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    if known is None:
        raise wrong(f"tensor {_quoted(name)} has the dtype {_quoted(dtype)}, which safetensors does not have")
    if not (isinstance(shape, list | tuple) and all(map(_is_count, shape))):
        raise wrong(f"tensor {_quoted(name)} has the shape {_quoted(shape)}: a list of whole numbers from 0 to 2^63-1")
    bits = known.bits
    for dimension in shape:
        bits *= max(dimension, 1)
        if bits > 8 * MAX_BYTES:
            raise wrong(f"tensor {_quoted(name)} of shape {_quoted(shape)} has more than 2^63-1 bytes")
    if 0 in shape:
        return 0
    if bits % 8:
        raise wrong(f"tensor {_quoted(name)} has {bits} bits, packed: that is no whole number of bytes")
    return bits // 8


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_BYTES


def _is_text(value: object) -> bool:
    """Say whether it is text that UTF-8 can carry: JSON can escape half a surrogate pair, which nobody can write."""
    return isinstance(value, str) and not _SURROGATE.search(value)


# --- arrays ---


def numpy_array(view: memoryview, info: TensorInfo, *, raw: bool = False) -> npt.NDArray[Any]:
    """Return the tensor in `view`, the image's bytes, as a NumPy array: no copy, writable exactly when `view` is.

    The array keeps `view`'s memory. Its shape is `info.shape`; its data is unaligned (`flags.aligned`) where the
    image has it so, which NumPy handles. Bytes of a BOOL other than 0 and 1 are the writer's mistake.

    BF16 and F8 are dtypes of the package `ml_dtypes`; with `raw` they are uint16 and uint8, and need it not. F4 and
    F6, which no NumPy dtype packs, are `info.size` of uint8 with `raw`, and refused without. `raw` changes no other.

    Raises `InvalidRequest` where the dtype needs `raw`, when the tensor lies outside `view`, or for a shape that
    NumPy has no room for (more than 64 dimensions); `ImportError` without NumPy.
    """
    try:
        import numpy as np
    except ImportError as error:
        raise ImportError("numpy_array needs NumPy: pip install numpy") from error
    image = memoryview(view).cast("B")
    if _size_of(info.name, info.dtype, info.shape, InvalidRequest) != info.size:
        raise InvalidRequest(f"tensor {_quoted(info.name)}: {info.size} bytes are not those of its dtype and shape")
    if not 0 <= info.offset <= len(image) - info.size:
        raise InvalidRequest(
            f"tensor {_quoted(info.name)} has {info.size} bytes from byte {info.offset}; there are {len(image)}"
        )
    dtype, shape = _numpy_dtype(info, raw), info.shape
    if raw and not _DTYPES[info.dtype].name:
        shape = (info.size,)
    # np.ndarray(buffer=…) keeps the owner of the memory, but no export of it: a bytearray could shrink under it.
    flat = np.asarray(image[info.offset : info.offset + info.size]).view(dtype)
    try:
        array: npt.NDArray[Any] = flat.reshape(shape)
    except ValueError as error:
        raise InvalidRequest(f"tensor {_quoted(info.name)} cannot be a NumPy array: {error}") from None
    return array


def _numpy_dtype(info: TensorInfo, raw: bool) -> Any:
    import numpy as np

    dtype = _DTYPES[info.dtype]
    if dtype.name and not dtype.extension:
        return np.dtype(dtype.name).newbyteorder("<")
    if raw:
        return np.dtype("<u2" if dtype.bits == 16 else "u1")
    if not dtype.name:
        raise InvalidRequest(f"NumPy has no packed {info.dtype}: raw=True gives the bytes as uint8")
    try:
        return np.dtype(getattr(import_module("ml_dtypes"), dtype.name))
    except (ImportError, AttributeError) as error:
        raise InvalidRequest(
            f"{info.dtype} needs {dtype.name} of the package ml_dtypes (pip install ml_dtypes): {error}; "
            f"raw=True gives it as uint{dtype.bits}"
        ) from None


def word_of(dtype: Any) -> str:
    """Return safetensors' word for a dtype: that word, NumPy's, ml_dtypes' or torch's dtype, or a name of theirs.

    So `"BF16"`, `"bfloat16"`, `"torch.bfloat16"`, `torch.bfloat16` and `ml_dtypes.bfloat16` are one. Raises
    `InvalidRequest` for anything else, and as `dtype_of`. Codes of NumPy such as `"f4"` are not names.
    """
    if isinstance(dtype, str) or (type(dtype).__module__, type(dtype).__name__) == ("torch", "dtype"):
        name = str(dtype).removeprefix("torch.")
        if name in _DTYPES or name in _TEXTS:
            return _TEXTS.get(name, name)
    elif (numpy := sys.modules.get("numpy")) and (isinstance(dtype, numpy.dtype) or _is_scalar_type(dtype, numpy)):
        with suppress(TypeError):  # an abstract class of NumPy's is no dtype
            return dtype_of(numpy.dtype(dtype))
    raise InvalidRequest(
        f"{_quoted(dtype)} is not a dtype that safetensors has: take NumPy's, ml_dtypes' or torch's, its name, or "
        + ", ".join(_DTYPES)
    )


def _is_scalar_type(dtype: Any, numpy: Any) -> bool:
    """Say whether it is NumPy's class of a dtype (np.float16, ml_dtypes.bfloat16), or what JAX has in its place."""
    if isinstance(dtype, type):
        return issubclass(dtype, numpy.generic)
    return callable(dtype) and isinstance(getattr(dtype, "dtype", None), numpy.dtype)


def dtype_of(array: Any) -> str:
    """Return safetensors' word for the dtype of a NumPy array, or for a `numpy.dtype` itself.

    Raises `InvalidRequest` for what the format does not have (float128, text, records, and ml_dtypes' F4 and F6, which
    take a byte each), and for big-endian data.
    """
    dtype = getattr(array, "dtype", array)
    name, order = getattr(dtype, "name", None), getattr(dtype, "byteorder", None)
    if name not in _TEXTS:
        raise InvalidRequest(f"safetensors has no dtype for {_quoted(dtype)}")
    if order == ">" or (order == "=" and sys.byteorder == "big"):
        raise InvalidRequest(f"{name} is big-endian here, and the format little-endian: use array.astype with a '<'")
    return _TEXTS[name]


def segment_size(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> int:
    """Return how many bytes a segment needs for these tensors, name -> (safetensors dtype, shape), and their header."""
    return write_index(tensors, metadata, alignment=ALIGNMENT)[1].size
