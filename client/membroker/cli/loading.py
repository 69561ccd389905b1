"""`membroker segments load`: copy a safetensors file into a new segment.

Owns the copying and the progress that it shows. It must never leave half a segment: one that was not sealed is deleted,
whatever ended the copy.
"""

from __future__ import annotations

import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .. import Client, Model
from ..errors import InvalidRequest, MembrokerError, ModelAlreadyExists
from ..ext import enter
from ..safetensors import InvalidTensorIndex, TensorIndex, read_index
from ..segment import MAX_HEADER_BYTES, Segment
from ..vmm.sizes import format_size
from .segment_name import SegmentPath

LINES = 10
"""How many lines of progress are printed where the output is not a terminal."""

GIVING_UP_SECONDS = 2.0
"""How long to wait for the end of a segment that was deleted after a failure."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A segment that a file was copied into; `rate` in bytes a second."""

    name: str
    generation: int
    location: str
    size: int
    tensors: int
    seconds: float
    rate: float


def open_worker(endpoint: str | None) -> Client:
    """Return a session that may hold memory: an observer may not. Raises the library's errors."""
    return enter(endpoint, client="membroker (command)")


def load(
    endpoint: str | None,
    path: str,
    name: SegmentPath,
    location: str,
    sizes: Mapping[str, int | None],
    stream: TextIO,
) -> Loaded:
    """Copy a safetensors file into a new segment and seal it; on any failure no segment and no new model is left.

    `name` has a model, and `sizes` are those of `Client.register_model`. Shows its progress on `stream`. Raises the
    library's errors, `InvalidTensorIndex` among them.
    """
    content = _mapped(path)
    index = _index_of(content, path)
    with ExitStack() as ends:
        client = ends.enter_context(open_worker(endpoint))
        name = name.within(client.tenant)
        if name.tenant and f"tenants/{name.tenant}" != client.tenant:
            raise InvalidRequest(
                f"{name}: a segment is loaded at its own tenant's endpoint, and this is that of {client.tenant}"
            )
        model = ends.enter_context(_registered(client, name.model, sizes))
        segment = ends.enter_context(model.create_segment(name.segment, len(content), location))
        begun = time.monotonic()
        with ExitStack() as undo:
            undo.callback(_give_up, segment)
            with _progress(f"{name.model}/{name.segment}", len(content), stream) as progress:
                segment.write(0, content, progress)
            segment.seal()
            undo.pop_all()
        seconds = time.monotonic() - begun
        return Loaded(
            name=segment.resource_name,
            generation=segment.generation,
            location=segment.location,
            size=segment.size,
            tensors=len(index),
            seconds=seconds,
            rate=len(content) / max(seconds, 1e-9),
        )


@contextmanager
def _registered(client: Client, name: str, sizes: Mapping[str, Any]) -> Iterator[Model]:
    """Yield the model. A new one is unregistered on failure; otherwise its limits would stay in force for a minute."""
    made = all(known.name != f"{client.tenant}/models/{name}" for known in client.models())
    try:  # a refusal counts as the model's, so only a model that is probably new is asked for so
        model = client.register_model(name, **sizes, exclusive=made)
    except ModelAlreadyExists:
        model, made = client.register_model(name, **sizes), False
    try:
        yield model
    except BaseException:
        if made:
            with suppress(MembrokerError):
                _end_model(client, model)
        raise


def _end_model(client: Client, model: Model) -> None:
    """Unregister a model once its deleted segment has ended: before that the model would stay for the segment."""
    deadline = time.monotonic() + GIVING_UP_SECONDS
    while time.monotonic() < deadline and any(
        known.name.startswith(f"{model.resource_name}/segments/") for known in client.segments()
    ):
        time.sleep(0.01)
    model.unregister()


def _give_up(segment: Segment) -> None:
    """Delete the segment, sealed or not: a seal may have succeeded although its answer was lost."""
    with suppress(MembrokerError):
        segment.delete()


def _mapped(path: str) -> mmap.mmap:
    """Map a regular file for reading. It is unmapped with the last reference, which may be a traceback's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}: name a safetensors file") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequest(f"{path} is not a regular file: name a safetensors file")
        if not found.st_size:
            raise InvalidTensorIndex(f"{path} is not a safetensors file: it is empty")
        # No MADV_SEQUENTIAL: with it a file that is not cached came at 30 MiB/s instead of 800 (ext4, Linux 6.18).
        return mmap.mmap(descriptor, found.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def _index_of(content: mmap.mmap, path: str) -> TensorIndex:
    """Read a file's header, within the bound that applies to readers of the segment too."""
    try:
        index = read_index(memoryview(content), max_header_bytes=MAX_HEADER_BYTES)
    except InvalidTensorIndex as error:
        raise InvalidTensorIndex(f"{path} is not a safetensors file: {error}") from error
    if index.size != len(content):
        more = len(content) - index.size
        raise InvalidTensorIndex(f"{path} is not a safetensors file: {more} bytes follow its last tensor")
    return index


# --- Progress ---


@contextmanager
def _progress(what: str, total: int, stream: TextIO) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total): it draws a bar on a terminal, and prints lines elsewhere."""
    begun = time.monotonic()

    def so_far(done: int) -> str:
        """Return the bytes copied, the total, and the average rate since the start."""
        seconds = time.monotonic() - begun
        rate = f", {format_size(int(done / seconds))}/s" if done and seconds > 0 else ""
        return f"{format_size(done)} of {format_size(total)}{rate}"

    if not stream.isatty():
        lines = 0

        def print_line(done: int, _total: int) -> None:
            nonlocal lines
            if done * LINES // total > lines:
                lines = done * LINES // total
                print(f"{what}: {done * 100 // total:3}%, {so_far(done)}", file=stream, flush=True)

        yield print_line
        return
    shown = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[text]}"))
    console = Console(file=stream)
    try:
        with Progress(*shown, console=console) as bar:
            task = bar.add_task(what, total=total, text=so_far(0))
            yield lambda done, _total: bar.update(task, completed=done, text=so_far(done))
    finally:
        console.show_cursor()  # rich leaves it hidden if it is interrupted before its first line
