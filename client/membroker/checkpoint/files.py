"""The files of a checkpoint, found and opened: one file, a directory, an index of shards, or Hugging Face's cache.

Owns what is read before a byte of a tensor is: which files there are, their headers, and the sentence about a file that
is something else. Nothing that it reads is trusted: a length is bounded before memory is taken for it, an index names
only files beside it, and a tensor lies within its file.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..closing import Closing
from ..dtypes import quoted
from ..errors import InvalidRequest, MembrokerError
from ..safetensors import InvalidTensorIndex, TensorIndex, TensorInfo, read_index
from ..vmm.sizes import MAX_BYTES, MIB, format_size

MAX_INDEX_BYTES: Final = 64 * MIB
"""The longest index that is read. That of DeepSeek-V3, with 91,991 tensors, has 9 MB."""
MAX_FILES: Final = 800
"""The most shards: each has a descriptor, and a process has 1,024 by default."""

_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_LENGTH_BYTES = 8
_SNIFFED_BYTES = 512
_MAIN_BYTES = 128
"""The most that is read of the file that names a version."""
_SHARD = re.compile(r"(.*)-(\d{5,6})-of-(\d{5,6})\.safetensors")
_COMMIT = re.compile(r"[0-9A-Za-z_.-]{1,64}")
_OTHERS: Final = {
    b"version https://git-lfs": "a Git LFS pointer, and not the weights: run `git lfs pull` in its directory",
    b"<!doctype html": "a web page: the download was answered by a page, such as one to log in",
    b"<html": "a web page: the download was answered by a page, such as one to log in",
    b"<?xml": "XML, such as a storage's error: download it again",
    b"gguf": "a GGUF file, as llama.cpp reads: take the model's safetensors",
    b"pk\x03\x04": "a zip archive, as torch.save writes (.pt, .pth, .bin): take the model's safetensors, or convert it "
    "with safetensors.torch.save_file",
    b"\x93numpy": "an array of NumPy (.npy): publish it with membroker.checkpoint.publish_arrays",
    b"\x89hdf": "an HDF5 file, as Keras writes: convert it with safetensors",
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"\xfd7zxz": "compressed by xz: unpack it",
}
"""How files begin, in lower case, that are taken for checkpoints, and what to do about each."""
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_FOREIGN = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".npz", ".msgpack")


class InvalidCheckpoint(InvalidTensorIndex):
    """A file is not safetensors, is cut off, or does not belong to the others. The message says what it is."""


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """An open file of a checkpoint: `offset`s in `index` count from its first byte."""

    path: str
    descriptor: int
    index: TensorIndex


class StoredTensor(NamedTuple):
    """Where a checkpoint has a tensor."""

    file: CheckpointFile
    info: TensorInfo


class Checkpoint(Closing):
    """The tensors of a checkpoint, by name, and its open files. `open_checkpoint` makes it. A context manager.

    `tensors` is in the order of the files and of their bytes. `metadata` is what no two files say differently.
    """

    def __init__(
        self, path: str, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], files: ExitStack
    ) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = dict(tensors)
        self.metadata: dict[str, str] = dict(metadata)
        self._files = files

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(stored.info.size for stored in self.tensors.values())

    @property
    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The tensors as `Segment.lay_out` takes them."""
        return {name: (stored.info.dtype, stored.info.shape) for name, stored in self.tensors.items()}

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __repr__(self) -> str:
        return f"<membroker Checkpoint {self.path}: {len(self.tensors)} tensors, {format_size(self.size)}>"


def open_checkpoint(path: str | os.PathLike[str], *, max_header_bytes: int = 16 * MIB) -> Checkpoint:
    """Open the files of a checkpoint, read their headers, and return what is in them.

    `path` is a file of safetensors, an index of shards (`model.safetensors.index.json`), a directory with either, or
    the directory of a model in the cache of Hugging Face, whose files are symbolic links. Of a directory without an
    index all files are taken that end with `.safetensors`.

    Raises `InvalidCheckpoint`, which says what a file is: a Git LFS pointer, a web page, an archive, a GGUF, cut off,
    or an index whose shard is missing. Raises `InvalidRequest` for a path that cannot be read.
    """
    path = os.fspath(path)
    with ExitStack() as opened:
        wanted = _wanted(path)
        files = [_open(name, max_header_bytes, opened) for name in wanted]
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            names = wanted[file.path]
            if names is not None and (missing := names - file.index.keys()):
                raise InvalidCheckpoint(
                    f"{file.path} has no tensor {quoted(min(missing))}, which the index says it has"
                )
            for name, info in file.index.items():
                if names is not None and name not in names:
                    continue
                if name in tensors:
                    raise InvalidCheckpoint(
                        f"{path}: {os.path.basename(tensors[name].file.path)} and {os.path.basename(file.path)} both "
                        f"have the tensor {quoted(name)}: name one of these files"
                    )
                tensors[name] = StoredTensor(file, info)
        return Checkpoint(path, tensors, _common(files), opened.pop_all())


def _common(files: list[CheckpointFile]) -> dict[str, str]:
    found: dict[str, str] = {}
    differ: set[str] = set()
    for file in files:
        for key, value in file.index.metadata.items():
            if found.setdefault(key, value) != value:
                differ.add(key)
    return {key: value for key, value in found.items() if key not in differ}


# --- Which files ---


def _wanted(path: str) -> dict[str, set[str] | None]:
    """Return the paths of the files, and which tensors of each are meant; None: all of them."""
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
        names = sorted(os.listdir(path)) if is_directory else []
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not is_directory:
        return _shards(path) if path.endswith(".json") else {path: None}
    if snapshot := _snapshot(path, names):
        return _wanted(snapshot)
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise InvalidRequest(f"{path} has several checkpoints: name one, such as {os.path.join(path, indexes[0])}")
    if indexes:
        return _shards(os.path.join(path, indexes[0]))
    files = [name for name in names if name.endswith(_SUFFIX)]
    if not files:
        others = [name for name in names if name.endswith(_FOREIGN)]
        there = f" (it has {others[0]}): take the model's safetensors" if others else ""
        raise InvalidCheckpoint(f"{path} has no file that ends with {_SUFFIX}{there}")
    _check_count(path, len(files))
    _check_all_shards(path, files)
    return {os.path.join(path, name): None for name in files}


def _snapshot(path: str, names: list[str]) -> str | None:
    """Return the directory of the version that a model's directory in Hugging Face's cache has as `main`."""
    if "snapshots" not in names or "blobs" not in names:
        return None
    try:
        versions = sorted(os.listdir(os.path.join(path, "snapshots")))
    except OSError as error:
        raise _unreadable(os.path.join(path, "snapshots"), error) from error
    main = ""
    with suppress(OSError, InvalidRequest):
        descriptor, size = _descriptor_of(os.path.join(path, "refs", "main"))
        try:
            main = _read(descriptor, min(size, _MAIN_BYTES), path).decode("ascii", "replace").strip()
        finally:
            os.close(descriptor)
    if _COMMIT.fullmatch(main) and main in versions:
        return os.path.join(path, "snapshots", main)
    if len(versions) == 1:
        return os.path.join(path, "snapshots", versions[0])
    raise InvalidRequest(f"{path} has {len(versions)} versions: name one of those in {os.path.join(path, 'snapshots')}")


def _shards(path: str) -> dict[str, set[str] | None]:
    """Return the files that an index names, in their order, with the names of their tensors."""
    text = _text_of(path)
    try:
        document = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(
            f"{path} is not an index of shards: {_what(text) or f'its JSON is invalid: {error}'}"
        ) from None
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not places:
        raise InvalidCheckpoint(f"{path} is not an index of shards: it has no weight_map")
    found: dict[str, set[str]] = {}
    for name, shard in places.items():
        if not _is_beside(shard):
            raise InvalidCheckpoint(
                f"{path} says that {quoted(name)} is in {quoted(shard)}, which is no file beside it"
            )
        found.setdefault(shard, set()).add(name)
    _check_count(path, len(found))
    directory = os.path.dirname(path)
    for number, shard in enumerate(sorted(found), 1):
        if not os.path.exists(os.path.join(directory, shard)):
            raise InvalidCheckpoint(
                f"{path} has {len(found)} shards, and shard {number}, {shard}, is missing: download it"
            )
    return {os.path.join(directory, shard): found[shard] for shard in sorted(found)}


def _text_of(path: str) -> bytes:
    descriptor, size = _descriptor_of(path)
    try:
        if size > MAX_INDEX_BYTES:
            raise InvalidCheckpoint(
                f"{path} has {format_size(size)}, and an index at most {format_size(MAX_INDEX_BYTES)}"
            )
        return _read(descriptor, size, path)
    finally:
        os.close(descriptor)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _is_beside(shard: object) -> bool:
    """Say whether an index names a file of its own directory, as a name that a system can have."""
    if not isinstance(shard, str) or "/" in shard or len(shard) > 255:
        return False
    return shard.endswith(_SUFFIX) and shard.isprintable()


def _check_count(path: str, count: int) -> None:
    if count > MAX_FILES:
        raise InvalidCheckpoint(f"{path} has {count:,} files, and a checkpoint at most {MAX_FILES}")


def _check_all_shards(path: str, files: list[str]) -> None:
    """Raise if files without an index say that there are more of them."""
    for name in files:
        if found := _SHARD.fullmatch(name):
            width, count = len(found[3]), int(found[3])
            for number in range(1, min(count, MAX_FILES) + 1):
                shard = f"{found[1]}-{number:0{width}}-of-{found[3]}{_SUFFIX}"
                if shard not in files:
                    raise InvalidCheckpoint(
                        f"{path} has {name}, of {count} shards, and shard {number}, {shard}, is missing: download it"
                    )


# --- One file ---


def _open(path: str, max_header_bytes: int, opened: ExitStack) -> CheckpointFile:
    """Open a file until `opened` ends, and read its header."""
    descriptor, size = _descriptor_of(path)
    opened.callback(os.close, descriptor)
    start = _read(descriptor, min(size, _SNIFFED_BYTES), path)
    if not start:
        raise InvalidCheckpoint(f"{path} is not a safetensors file: it is empty")
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    is_plausible = 0 < length <= max_header_bytes and start[_LENGTH_BYTES : _LENGTH_BYTES + 1] in (b"{", b"")
    if not is_plausible and (what := _what(start) or _what_text(start)):
        raise InvalidCheckpoint(f"{path} is not a safetensors file: it is {what}")
    if is_plausible and length > size - _LENGTH_BYTES:
        raise InvalidCheckpoint(
            f"{path} is cut off: its header has {length} bytes, and {max(0, size - _LENGTH_BYTES)} are there: "
            "download it again"
        )
    header = _read(descriptor, min(size, _LENGTH_BYTES + min(length, max_header_bytes)), path)
    try:
        index = read_index(header, max_header_bytes=max_header_bytes, total=MAX_BYTES)
    except InvalidTensorIndex as error:
        raise InvalidCheckpoint(f"{path} is not a safetensors file: {error}") from error
    if index.size > size:
        raise InvalidCheckpoint(f"{path} is cut off: {size:,} of its {index.size:,} bytes are there: download it again")
    if index.size < size:
        raise InvalidCheckpoint(f"{path} is not a safetensors file: {size - index.size} bytes follow its last tensor")
    return CheckpointFile(path, descriptor, index)


def _what(start: bytes) -> str:
    """Return what a file is that begins so, and what to do; "" if it is unknown."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for beginning, what in _OTHERS.items():
        if text.startswith(beginning):
            return what
    if start[257:262] == b"ustar":
        return "a tar archive: unpack it"
    if _PICKLE.match(start):
        return "a pickle, as torch.save wrote before 1.6: take the model's safetensors"
    return "" if start.strip(b"\0") else "zeros: a download that has only begun"


def _what_text(start: bytes) -> str:
    is_json = start.lstrip().startswith((b"{", b"["))
    return "JSON, and not weights: an index of shards has a name that ends with .json" if is_json else ""


def _descriptor_of(path: str) -> tuple[int, int]:
    """Open a regular file for reading; return its descriptor and its size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise InvalidRequest(f"{path} is not a regular file: name a safetensors file")
    return descriptor, found.st_size


def _read(descriptor: int, size: int, path: str) -> bytes:
    """Return the first bytes of a file."""
    found = bytearray(size)
    read_into(descriptor, memoryview(found), 0, path)
    return bytes(found)


def read_into(descriptor: int, target: memoryview, offset: int, path: str) -> None:
    """Fill `target` with a file's bytes from `offset` on. Raises `InvalidCheckpoint` if it has become shorter."""
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise _unreadable(path, error) from error
        if not count:
            raise InvalidCheckpoint(f"{path} has become shorter while it was read: byte {offset + done} is gone")
        done += count


def _unreadable(path: str, error: OSError | ValueError) -> MembrokerError:
    """Return the error for a path that cannot be read; a link that leads nowhere is an incomplete download."""
    why = error.strerror if isinstance(error, OSError) else error
    if os.path.islink(path) and not os.path.exists(path):
        return InvalidCheckpoint(f"{path} is a link to {os.readlink(path)}, which is missing: download it again")
    return InvalidRequest(f"{path} cannot be read: {why}: name a safetensors file, or a directory with some")
