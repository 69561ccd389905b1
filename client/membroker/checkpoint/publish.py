"""A checkpoint becomes a segment: its tensors are laid out again, each at 256 bytes, and copied by several readers.

Owns the copy and its readers. It must leave no half segment: one that was not sealed is deleted, whatever ended the
copy. A file is read, and never mapped: a mapped file that becomes shorter, or whose disk fails, ends the process.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final, NamedTuple

from .. import arguments
from ..dtypes import word_of
from ..errors import MembrokerError, ThreadLimit
from ..safetensors import segment_size
from ..segment import Segment, SegmentMaker, write_tensors
from ..threads import start_thread
from ..vmm.driver import Location
from ..vmm.sizes import MIB
from .files import Checkpoint, CheckpointFile, open_checkpoint, read_into

READERS: Final = 4
"""One reader does not fill a disk's queue, and each also waits for its copy to the device."""
_STEP_BYTES: Final = 2 * MIB
"""What a reader reads at once; each has a buffer of this size."""
_MANY_BYTES: Final = 64 * MIB
"""From so many bytes on there are several readers."""


def publish_checkpoint(
    model: SegmentMaker,
    name: str,
    path: str | os.PathLike[str] | Checkpoint,
    *,
    metadata: Mapping[str, str] | None = None,
    location: Location | str = Location.DEVICE,
    progress: arguments.Progress | None = None,
    replace: bool = False,
    timeout: float | None = None,
) -> Segment:
    """Create a segment for the tensors of a checkpoint, copy them into it, and seal it. After a failure it is deleted.

    `path` is as for `open_checkpoint`, or what that returned. Each tensor begins at a multiple of 256 bytes, wherever
    the file has it. `metadata` is added to that of the files. `progress(done, total)` is called in this thread with the
    bytes that were copied. `replace` makes the segment the newest version of the name, which stays once it is sealed.
    Without it the name is free, or that of a segment that is left, which is deleted. For both, and for `timeout`, see
    `Model.create_segment`.

    Raises what `open_checkpoint` and `Model.create_segment` raise; `InvalidRequest` for a header of more than 16 MiB,
    and for a tensor whose name is `!` and digits.
    """
    arguments.check_progress(progress)
    with ExitStack() as opened:
        checkpoint = path if isinstance(path, Checkpoint) else opened.enter_context(open_checkpoint(path))
        shapes, about = checkpoint.shapes, {**checkpoint.metadata, **(metadata or {})}
        segment = model.create_segment(
            name, segment_size(shapes, about), location, replace=replace, replace_left=True, timeout=timeout
        )
        with ExitStack() as undo:
            # Once a new version is sealed, the older ones may be gone: then it is the only one.
            undo.callback(segment.close if replace else partial(_give_up, segment))
            index = segment.lay_out(shapes, about)
            pieces = (
                _Piece(file, here.offset + first, index[key].offset + first, min(_STEP_BYTES, here.size - first))
                for key, (file, here) in checkpoint.tensors.items()
                for first in range(0, here.size, _STEP_BYTES)
            )
            _Copy(segment, pieces, checkpoint.size, progress).run()
            segment.seal()
            undo.pop_all()
        return segment


def publish_arrays(
    model: SegmentMaker,
    name: str,
    arrays: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    location: Location | str = Location.DEVICE,
    progress: arguments.Progress | None = None,
    replace: bool = False,
    timeout: float | None = None,
) -> Segment:
    """Create a segment for arrays, write them into it, and seal it. After a failure the segment is dropped.

    They are arrays of NumPy or JAX, or tensors of torch. Each begins at a multiple of 256 bytes. `progress(done,
    total)` is called with bytes. `replace` makes it the newest version of the name. Without it the name is free, or
    that of a segment that is left, which is deleted. For both, and for `timeout`, see `Model.create_segment`.

    Raises what `Model.create_segment` raises, and `InvalidRequest` for a dtype that safetensors does not have.
    """
    arguments.check_progress(progress)
    shapes = {key: (word_of(array.dtype), tuple(array.shape)) for key, array in arrays.items()}
    segment = model.create_segment(
        name, segment_size(shapes, metadata), location, replace=replace, replace_left=True, timeout=timeout
    )
    with ExitStack() as undo:
        undo.callback(segment.close)
        index = segment.lay_out(shapes, metadata)
        write_tensors(segment, index, arrays, progress)
        segment.seal()
        undo.pop_all()
    return segment


def _give_up(segment: Segment) -> None:
    """Delete the segment, sealed or not: a seal may have succeeded although its answer was lost."""
    with suppress(MembrokerError):
        segment.delete()
    segment.close()


class _Piece(NamedTuple):
    """So many bytes of a file, and their place in the segment."""

    file: CheckpointFile
    offset: int
    target: int
    size: int


class _Copy:
    """One copy: readers take the next piece each, and the thread that runs it tells the progress."""

    def __init__(
        self, segment: Segment, pieces: Iterator[_Piece], total: int, progress: arguments.Progress | None
    ) -> None:
        self._segment = segment
        self._pieces = pieces
        self._total = total
        self._progress = progress
        self._taking = threading.Lock()
        self._stopped = False
        self._news: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        """Of a reader: the bytes that it has copied, why it failed, and None at its end."""

    def run(self) -> None:
        """Copy all pieces. When it ends, however it does, no reader is left."""
        readers: list[threading.Thread] = []
        try:
            if self._total >= _MANY_BYTES:
                with suppress(ThreadLimit):
                    while len(readers) < READERS:
                        readers.append(start_thread(self._read, f"membroker-reader-{len(readers)}"))
            if readers:
                self._follow(len(readers))
            else:
                done = 0
                for size in self._copied():
                    done += size
                    self._tell(done)
        finally:
            self._stopped = True
            for reader in readers:
                reader.join()

    def _follow(self, readers: int) -> None:
        done = 0
        while readers:
            news = self._news.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                readers -= 1
            else:
                done += news
                self._tell(done)

    def _tell(self, done: int) -> None:
        if self._progress is not None:
            self._progress(done, self._total)

    def _read(self) -> None:
        try:
            for size in self._copied():
                self._news.put(size)
            self._news.put(None)
        except BaseException as error:  # noqa: BLE001  # raised by the thread that runs the copy
            self._news.put(error)

    def _copied(self) -> Iterator[int]:
        """Copy pieces until there are no more, and yield the size of each."""
        buffer = memoryview(bytearray(_STEP_BYTES))
        while (piece := self._next()) is not None:
            some = buffer[: piece.size]
            read_into(piece.file.descriptor, some, piece.offset, piece.file.path)
            self._segment.write(piece.target, some)
            yield piece.size

    def _next(self) -> _Piece | None:
        with self._taking:
            return None if self._stopped else next(self._pieces, None)
