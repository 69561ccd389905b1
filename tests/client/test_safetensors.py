"""The tensor index: what the reference implementation writes we read, and the other way; nothing is believed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fuzz.corpus import bent, budget, lasting

from membroker.dtypes import dtype_of
from membroker.errors import InvalidRequest, MembrokerError
from membroker.safetensors import (
    MAX_HEADER_BYTES,
    InvalidTensorIndex,
    TensorIndex,
    TensorInfo,
    numpy_array,
    read_index,
    write_index,
)

NUMPY_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "i2", "U16": "u2", "F16": "f2", "I32": "i4", "U32": "u4", "F32": "f4",
    "C64": "c8", "F64": "f8", "I64": "i8", "U64": "u8",
}  # fmt: skip
ALL_BITS = {
    **{text: np.dtype(code).itemsize * 8 for text, code in NUMPY_DTYPES.items()},
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "BF16": 16,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
EXTENSIONS = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def some_arrays() -> dict[str, Any]:
    """One array of each dtype, of odd sizes, a scalar, an empty one, and names that JSON must escape."""
    random = np.random.default_rng(7)
    arrays = {
        f"of {text}": random.integers(0, 2 if text == "BOOL" else 100, (3, 5)).astype(code)
        for text, code in NUMPY_DTYPES.items()
    }
    names = {"scalar": np.array(1.5, "f4"), "empty": np.zeros((0, 3), "f4"), "": np.arange(3, dtype="u1")}
    return {**arrays, **names, 'quote " \\ tab \t ünï \x7f \U0001f600': np.arange(7, dtype="i2")}


def image_of(document: Any, data: int = 0) -> bytes:
    """Return an image of any header: an object, or its bytes."""
    header = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(header).to_bytes(8, "little") + header + bytes(data)


def entry(dtype: object = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def filled(header: bytes, index: TensorIndex, arrays: dict[str, Any]) -> bytearray:
    image = bytearray(header.ljust(index.size))
    for name, array in arrays.items():
        numpy_array(memoryview(image), index[name])[...] = array
    return image


def same(left: Any, right: Any) -> bool:
    return bool(left.dtype == right.dtype and left.shape == right.shape and (left == right).all())


# --- with the reference implementation ---


def test_what_the_reference_wrote(tmp_path: Path) -> None:
    """A file of the reference's, in a segment that is longer than it: each array is there, and the metadata."""
    arrays, metadata = some_arrays(), {"model": "llama", "größe": "7b", "": ""}
    safetensors.numpy.save_file(arrays, tmp_path / "file", metadata)
    image = (tmp_path / "file").read_bytes()
    index = read_index(image + bytes(1000))
    assert index.keys() == arrays.keys()
    assert index.metadata == metadata
    assert index.size == len(image)
    assert index.header_size == 8 + int.from_bytes(image[:8], "little")
    for name, array in arrays.items():
        assert same(numpy_array(memoryview(image), index[name]), array), name
    with safetensors.safe_open(tmp_path / "file", "np") as file:
        ours = [name for name in index if index[name].size]
        assert ours == [name for name in file.offset_keys() if index[name].size]


def without_gaps(names: Iterable[str]) -> set[str]:
    """Return the names without those of tensors that fill gaps, which the reference does not know of."""
    return {name for name in names if not re.fullmatch("![0-9]+", name)}


@pytest.mark.parametrize("alignment", [None, 256])
def test_what_we_wrote(alignment: int | None) -> None:
    """The reference reads our header and the data behind it; each tensor begins at a multiple of its element, or of
    the alignment, also after tensors of odd sizes and before empty ones.
    """
    arrays = some_arrays()
    described = {name: (dtype_of(array), array.shape) for name, array in arrays.items()}
    header, index = write_index(described, {"by": "membroker"}, alignment=alignment)
    image = filled(header, index, arrays)
    loaded = safetensors.numpy.load(bytes(image))
    assert index.keys() == arrays.keys()
    assert (without_gaps(loaded) if alignment else loaded.keys()) == arrays.keys()
    for name, array in arrays.items():
        assert same(loaded[name], array), name
        assert numpy_array(memoryview(image), index[name]).flags.aligned or not index[name].size
        assert index[name].offset % (alignment or array.dtype.itemsize) == 0
    assert len(header) == index.header_size
    assert index.header_size % (alignment or 8) == 0
    assert next(iter(index.values())).offset == index.header_size
    assert read_index(bytes(image)) == index


@pytest.mark.parametrize("metadata", [None, {"only": 'one "\n\x01'}])
def test_our_header_is_the_references_byte_for_byte(metadata: dict[str, str] | None) -> None:
    """Whoever hashes images finds the same. (The reference writes several metadata in an order of chance.)"""
    arrays = some_arrays()
    described = {name: (dtype_of(array), array.shape) for name, array in reversed(arrays.items())}
    header, index = write_index(described, metadata)
    assert bytes(filled(header, index, arrays)) == safetensors.numpy.save(arrays, metadata)


@pytest.mark.parametrize("dtype", ALL_BITS)
def test_every_dtype_of_the_reference(dtype: str) -> None:
    """Eight elements of any dtype, the packed ones too, are as large as the reference says."""
    header, index = write_index({"x": (dtype, [2, 4])})
    assert index["x"] == TensorInfo("x", dtype, (2, 4), index.header_size, ALL_BITS[dtype])
    ((name, found),) = safetensors.deserialize(header + bytes(ALL_BITS[dtype]))
    assert (name, found["dtype"], found["shape"], len(found["data"])) == ("x", dtype, [2, 4], ALL_BITS[dtype])


# --- arrays ---


def test_no_copy() -> None:
    """Two processes share a segment: what one writes through its array the other sees."""
    header, index = write_index({"x": ("F32", (2, 3)), "y": ("I64", ()), "e": ("F32", (0,))})
    memory = bytearray(header.ljust(index.size + 100, b"\0"))
    mine, yours = (numpy_array(memoryview(memory), index["x"]) for _ in range(2))
    assert np.shares_memory(mine, yours)
    mine[1, 2] = 2.5
    assert not numpy_array(memoryview(memory).toreadonly(), index["x"]).flags.writeable
    assert yours[1, 2] == 2.5
    assert memory[index["x"].offset :][20:24] == np.float32(2.5).tobytes()
    numpy_array(memoryview(memory), index["y"])[...] = -1
    assert memory[index["y"].offset :][:8] == b"\xff" * 8


def test_unaligned() -> None:
    """Other writers do not sort: an F32 behind one byte of U8 is read all the same."""
    swapped = json.dumps({"a": entry(shape=[1], offsets=[0, 1]), "b": entry("F32", [2], [1, 9])}).encode()
    image = image_of(swapped.ljust(-(-len(swapped) // 8) * 8), 1) + np.array([1, 2], "f4").tobytes()
    index = read_index(image)
    assert index["b"].offset % 4 == 1
    array = numpy_array(memoryview(image), index["b"])
    assert not array.flags.aligned
    assert (array + 1).tolist() == [2, 3]
    assert numpy_array(memoryview(image), index["b"], raw=True).dtype == np.float32, "raw is for dtypes beyond NumPy's"


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_raw(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ml_dtypes BF16 and F8 are refused, with the way out; raw gives their bits, writable."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    header, index = write_index({"x": (dtype, (2, 2))})
    memory = memoryview(bytearray(header.ljust(index.size, b"\x3f")))
    with pytest.raises(InvalidRequest, match=rf"{dtype} .*ml_dtypes.*raw=True .*uint{ALL_BITS[dtype]}"):
        numpy_array(memory, index["x"])
    array = numpy_array(memory, index["x"], raw=True)
    wanted = np.full((2, 2), 0x3F3F, "u2") if ALL_BITS[dtype] == 16 else np.full((2, 2), 0x3F, "u1")
    assert same(array, wanted)
    array[1, 1] = 0
    assert memory[-1] == 0


@pytest.mark.parametrize(("dtype", "name"), EXTENSIONS.items())
def test_ml_dtypes(dtype: str, name: str) -> None:
    """With ml_dtypes the numbers themselves, and the dtype's word back."""
    extension = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    header, index = write_index({"x": (dtype, (3,))})
    memory = bytearray(header.ljust(index.size))
    array = numpy_array(memoryview(memory), index["x"])
    assert array.dtype == extension
    array[:] = np.array([1, 2, 4], extension)
    again = numpy_array(memoryview(memory), index["x"])
    assert again.astype("f4").tolist() == [1, 2, 4]
    assert dtype_of(again) == dtype
    assert numpy_array(memoryview(memory), index["x"], raw=True).dtype.kind == "u"


def test_packed() -> None:
    header, index = write_index({"x": ("F6_E2M3", (2, 4))})
    memory = memoryview(header.ljust(index.size, b"\x11"))
    with pytest.raises(InvalidRequest, match="no packed F6_E2M3: raw=True"):
        numpy_array(memory, index["x"])
    assert numpy_array(memory, index["x"], raw=True).tolist() == [0x11] * 6


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (TensorInfo("x", "U8", (4,), 13, 4), "4 bytes from byte 13; there are 16"),
        (TensorInfo("x", "F32", (4,), 0, 4), "do not match its dtype and shape"),
        (TensorInfo("x", "NOPE", (4,), 0, 4), "dtype 'NOPE'"),
    ],
)
def test_an_info_of_something_else(info: TensorInfo, words: str) -> None:
    """An entry of another image, or made by hand, shows nothing that is not there."""
    with pytest.raises(InvalidRequest, match=words):
        numpy_array(memoryview(bytes(16)), info)


# --- what is refused ---

HUGE = (1 << 63) - 1
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes are too short"),
    "fresh memory": (bytes(4096), "length is 0: no index was written here"),
    "a length above the bound": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "100000001 bytes, more than"),
    "a length beyond the view": ((3).to_bytes(8, "little") + b"{}", "3 bytes, of which 2 are there"),
    "no UTF-8": (image_of(b'{"\xff":0}'), "not UTF-8: invalid start byte at byte 10"),
    "no JSON": (image_of(b'{"x":}'), "not JSON: Expecting value, at its character 5"),
    "deep lists": (image_of(b'{"x":' + b"[" * 100_000), "nested too deeply"),
    "a name twice": (image_of(b'{"x":1,"y":2,"x":1}'), "name 'x' 2 times"),
    "metadata of numbers": (image_of({"__metadata__": {"a": 1}}), "__metadata__ must be an object of text"),
    "half a pair in a name": (image_of({"\udc00": entry()}, 2), "half a surrogate pair"),
    "an entry that is a list": (image_of({"x": ["U8", [2], [0, 2]]}, 2), "'x' must have exactly"),
    "an unknown dtype": (image_of({"x": entry("C128")}, 2), "'x' has the dtype 'C128'"),
    "a dimension of true": (image_of({"x": entry(shape=[True, 2])}, 2), r"'x' has the shape \[True, 2\]"),
    "a fraction": (image_of({"x": entry(shape=[2.0])}, 2), "the number '2.0'"),
    "a negative dimension": (image_of({"x": entry(shape=[-2])}, 2), r"'x' has the shape \[-2\]"),
    "a dimension of 2^63": (image_of({"x": entry(shape=[HUGE + 1])}, 2), "'x' has the shape"),
    "a number of 5000 digits": (image_of(b'{"x":{"shape":[' + b"9" * 5000 + b"]}}"), "the number '999"),
    "2^64 elements": (image_of({"x": entry(shape=[1 << 32, 1 << 32], offsets=[0, 0])}), "more than 2\\^63-1 bytes"),
    "a nibble too few": (image_of({"x": entry("F4", [3], [0, 2])}, 2), "12 bits, packed"),
    "offsets backwards": (image_of({"x": entry(offsets=[2, 0])}, 2), "-2 bytes by its data_offsets"),
    "too few bytes": (image_of({"x": entry(offsets=[0, 1])}, 2), "1 bytes by .* 0 and 1, and 2 by .* U8 and shape"),
    "a hole first": (
        image_of({"x": entry(offsets=[1, 3])}, 3),
        "'x' leaves a hole after 'the header': .*byte 69, not 68",
    ),
    "a hole": (image_of({"x": entry(), "y": entry(offsets=[3, 5])}, 5), "'y' leaves a hole after 'x'"),
    "an overlap": (image_of({"x": entry(), "y": entry(offsets=[1, 3])}, 4), "'y' overlaps 'x'"),
    "nothing inside another": (image_of({"x": entry(), "y": entry(shape=[0], offsets=[1, 1])}, 4), "overlaps 'x'"),
    "a byte beyond the view": (image_of({"x": entry()}, 1), r"'x' ends at byte 70; there are 69"),
}


@pytest.mark.parametrize(("image", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(image: bytes, words: str) -> None:
    with pytest.raises(InvalidTensorIndex, match=words) as refused:
        read_index(image)
    assert isinstance(refused.value, MembrokerError)
    assert isinstance(refused.value, ValueError)


def test_a_long_name_in_a_short_message() -> None:
    """A stranger's names go into the logs of whoever refuses them."""
    value: Any = "z" * 100
    for _ in range(3):
        value = {f"{number}" * 100: [value] * 8 for number in range(5)}
    with pytest.raises(InvalidTensorIndex) as refused:
        read_index(image_of({"x" * 1_000_000: {"y" * 10_000: ["z" * 10_000] * 10, **value}}))
    assert len(str(refused.value)) < 2500


# The arguments are made in the test: a big header would be made at import, and a surrogate breaks the test's name.
UNWRITABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: write_index({"x": ("f4", (2,))}), "'x': 'f4' is not a dtype"),
    "too large": (lambda: write_index({"x": ("F32", (1 << 62,))}), "more than 2\\^63-1 bytes"),
    "too large together": (
        lambda: write_index({"x": ("U8", (HUGE,)), "y": ("U8", (HUGE,))}),
        "image would have more than",
    ),
    "packed": (lambda: write_index({"x": ("F4", (1,))}), "4 bits, packed"),
    "a gap's name": (lambda: write_index({"!17": ("F32", (1,))}), "cannot have the name '!17'"),
    "metadata": (lambda: write_index({}, {"a": 1}), "metadata is text by text, not 1 by 'a'"),  # type: ignore[dict-item]
    "alignment of 4": (lambda: write_index({}, alignment=4), "power of two of at least 8 bytes, not 4"),
    "long header": (lambda: write_index({}, {"a": "x" * MAX_HEADER_BYTES}), "the format allows 100000000"),
}


@pytest.mark.parametrize(("write", "words"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_what_cannot_be_written(write: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        write()


# --- fuzz ---

SEEDS = [
    safetensors.numpy.save({"a": np.arange(3, dtype="f4"), "b": np.zeros((), "i8")}, {"k": "v"}),
    safetensors.numpy.save({"e": np.zeros((0, 2), "u2"), "u": np.arange(5, dtype="u1")}),
    image_of({"x": entry("F4", [4], [0, 2]), "y": entry("BF16", [1], [2, 4])}, 4),
    image_of({}),
]


def repaired(image: bytes) -> bytes:
    """Give a bent image the length of its header again, so that more of them reach the parser."""
    end = image.rfind(b"}") + 1
    return image if end < 9 else (end - 8).to_bytes(8, "little") + image[8:]


def accepted_by_both(image: bytes) -> bool:
    """Read it: refused in our words, or the reference reads the same from as many bytes as we say that it has."""
    try:
        index = read_index(image)
    except InvalidTensorIndex as error:
        if len(str(error)) > 2500:
            raise
        return False
    found = {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for name, tensor in safetensors.deserialize(image[: index.size])
        if name in index or not (tensor["dtype"] == "U8" and re.fullmatch("![0-9]+", name))
    }
    assert found == {
        name: (info.dtype, info.shape, image[info.offset : info.offset + info.size]) for name, info in index.items()
    }
    for info in index.values():
        with suppress(InvalidRequest):
            assert numpy_array(memoryview(image), info, raw=True).nbytes == info.size
    return True


@pytest.mark.deep
def test_bent_images() -> None:
    """Real images with bytes changed, cut, doubled, and the length repaired or not: nothing else ever comes out."""
    seen: list[bool] = []

    @budget(1_000)
    @example(SEEDS[0], False)
    @given(bent(SEEDS), st.booleans())
    def fuzz(image: bytes, repair: bool) -> None:
        seen.append(accepted_by_both(repaired(image) if repair else image))

    assert all(accepted_by_both(image) for image in SEEDS)
    lasting(fuzz)
    assert sum(seen) > len(seen) // 50, "nearly nothing was accepted: the fuzz tests the first lines only"


def test_any_written_index_is_read() -> None:
    """Whatever can be written: read again it is the same, aligned, and the reference agrees."""
    dimensions = st.lists(st.integers(0, 4), max_size=3)
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=4).filter(lambda name: name != "__metadata__")
    tensors = st.dictionaries(names, st.tuples(st.sampled_from([*ALL_BITS]), dimensions), max_size=6)

    @budget(250)
    @given(tensors, st.none() | st.dictionaries(names, names, max_size=2), st.sampled_from([None, 8, 64, 256]))
    def fuzz(tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None, alignment: int | None) -> None:
        try:
            header, index = write_index(tensors, metadata, alignment=alignment)
        except InvalidRequest as error:
            if "packed" in str(error):
                return
            raise
        image = header + bytes(index.size - len(header))
        assert accepted_by_both(image)
        assert read_index(image + b"more") == index
        assert all(info.offset % (alignment or max(ALL_BITS[info.dtype] // 8, 1)) == 0 for info in index.values())
        assert {name: (info.dtype, list(info.shape)) for name, info in index.items()} == tensors

    lasting(fuzz)
