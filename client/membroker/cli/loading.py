"""`membroker segments load`: copy a checkpoint into a new segment.

Owns the progress that it shows, and the model that is registered for it. It must leave no new model after a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .. import Client, Model
from ..checkpoint import open_checkpoint, publish_checkpoint
from ..errors import InvalidRequest, MembrokerError, ModelAlreadyExists
from ..ext import enter
from ..vmm.sizes import format_size
from .segment_name import SegmentPath

LINES = 10
"""How many lines of progress are printed where the output is not a terminal."""

GIVING_UP_SECONDS = 2.0
"""How long to wait for the end of a segment that was deleted after a failure."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A segment that a checkpoint was copied into; `rate` in bytes a second."""

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
    *,
    replace: bool = False,
) -> Loaded:
    """Copy a checkpoint into a new segment and seal it; on any failure no segment and no new model is left.

    `name` has a model, and `sizes` are those of `Client.model`. Shows its progress on `stream`. Raises the
    library's errors, `InvalidCheckpoint` among them.
    """
    with ExitStack() as ends:
        checkpoint = ends.enter_context(open_checkpoint(path))
        client = ends.enter_context(open_worker(endpoint))
        name = name.within(client.tenant)
        if name.tenant and f"tenants/{name.tenant}" != client.tenant:
            raise InvalidRequest(
                f"{name}: a segment is loaded at its own tenant's endpoint, and this is that of {client.tenant}"
            )
        model = ends.enter_context(_registered(client, name.model, sizes))
        begun = time.monotonic()
        with _progress(f"{name.model}/{name.segment}", checkpoint.size, stream) as progress:
            segment = publish_checkpoint(
                model, name.segment, checkpoint, location=location, progress=progress, replace=replace
            )
        ends.enter_context(segment)
        seconds = time.monotonic() - begun
        return Loaded(
            name=segment.resource_name,
            generation=segment.generation,
            location=segment.location,
            size=segment.size,
            tensors=len(checkpoint.tensors),
            seconds=seconds,
            rate=checkpoint.size / max(seconds, 1e-9),
        )


@contextmanager
def _registered(client: Client, name: str, sizes: Mapping[str, Any]) -> Iterator[Model]:
    """Yield the model. A new one is unregistered on failure; otherwise its limits would stay in force for a minute."""
    made = all(known.name != f"{client.tenant}/models/{name}" for known in client.models())
    try:  # a refusal counts as the model's, so only a model that is probably new is asked for so
        model = client.model(name, **sizes, exclusive=made)
    except ModelAlreadyExists:
        model, made = client.model(name, **sizes), False
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
