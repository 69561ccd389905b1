"""`membroker segments`: a safetensors file becomes a segment, and a segment tells what is in it.

Owns the copying of a file and how far it is. It must never leave half a segment behind: what was not sealed is given
up, whatever ended it.
"""

from __future__ import annotations

import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ..arguments import parts_of
from ..client import Client, enter
from ..errors import InvalidRequest, MembrokerError, ModelAlreadyExists
from ..model import Model
from ..safetensors import InvalidTensorIndex, TensorIndex, TensorInfo, read_index
from ..segment import MAX_HEADER_BYTES, Segment
from ..types import SegmentStatus
from ..vmm.sizes import format_size
from ..wire.names import NAMES, parse_segment, valid_model, valid_segment, valid_tenant
from .admin import Admin, open_admin

LINES = 10
"""How many lines tell how far a copy is, where no bar can."""

GIVING_UP_SECONDS = 2.0
"""How long a segment that was given up may take to go."""


@dataclass(frozen=True, slots=True)
class Name:
    """What a person calls a segment: SEGMENT, MODEL/SEGMENT or TENANT/MODEL/SEGMENT; what was left out is empty.

    Of three parts the first can be a tenant, or belong to a model's name: `within` decides.
    """

    tenant: str
    model: str
    segment: str
    is_resource_name: bool = False

    @classmethod
    def parse(cls, text: str) -> Name:
        """Read one of the three, or a resource name. Raises `ValueError`."""
        if (parts := parse_segment(text)) and parts[1] != "-":
            return cls(*parts, is_resource_name=True)
        model, slash, segment = text.rpartition("/")
        tenant, _, within = model.partition("/")
        if within and valid_tenant(tenant):
            model = within
        else:
            tenant = ""
        if not valid_segment(segment) or (slash and not valid_model(model)):
            raise ValueError(
                f"{text!r} is not SEGMENT, MODEL/SEGMENT or TENANT/MODEL/SEGMENT, as in llama-7b/weights: {NAMES}"
            )
        return cls(tenant, model, segment)

    def within(self, tenant: str) -> Name:
        """Return what this means at the endpoint of `tenants/{tenant}`.

        There `a/b/c` is the segment `c` of the model `a/b`, unless `a` is that tenant.
        """
        if self.is_resource_name or not self.tenant or f"tenants/{self.tenant}" == tenant or "/" in self.model:
            return self
        return Name("", f"{self.tenant}/{self.model}", self.segment)

    def __str__(self) -> str:
        """As the library wants it."""
        if self.tenant:
            return f"tenants/{self.tenant}/models/{self.model}/segments/{self.segment}"
        return f"{self.model}/{self.segment}" if self.model else self.segment


@dataclass(frozen=True, slots=True)
class Contents:
    """A segment, and what it says is in it. Offsets count from its first byte."""

    name: str
    generation: int
    location: str
    size: int
    metadata: dict[str, str]
    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A segment that a file was copied into, and how fast: `rate` in bytes a second."""

    name: str
    generation: int
    location: str
    size: int
    tensors: int
    seconds: float
    rate: float


@dataclass(frozen=True, slots=True)
class Deleted:
    """A segment that was deleted; its bytes come back when the last of `sessions` has left it."""

    name: str
    size: int
    sessions: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where a file is to go: `name` has a model. The sizes are those of `Client.register_model`."""

    name: Name
    location: str
    virtual_capacity: int | None
    limit: int | None


@contextmanager
def open_worker(endpoint: str | None) -> Iterator[Client]:
    """Yield a session that may hold memory: an observer may not. Raises the library's errors."""
    with enter(endpoint, client="membroker (command)") as client:
        yield client


# --- A file becomes a segment ---


def load(endpoint: str | None, path: str, wanted: Wanted, stream: TextIO) -> Loaded:
    """Copy a safetensors file into a new segment and seal it; on any failure there is no segment, nor a new model.

    Tells on `stream` how far it is. Raises the library's errors, `InvalidTensorIndex` among them.
    """
    content = _mapped(path)
    index = _index_of(content, path)
    with ExitStack() as ends:
        client = ends.enter_context(open_worker(endpoint))
        name = wanted.name.within(client.tenant)
        if name.tenant and f"tenants/{name.tenant}" != client.tenant:
            raise InvalidRequest(
                f"{name}: a segment is loaded at its own tenant's endpoint, and this is {client.tenant}"
            )
        model = ends.enter_context(_registered(client, name.model, wanted))
        segment = ends.enter_context(model.create_segment(name.segment, len(content), wanted.location))
        begun = time.monotonic()
        with ExitStack() as undo:
            undo.callback(_give_up, segment)
            with _progress(f"{name.model}/{name.segment}", len(content), stream) as progress:
                segment.write(0, content, progress)
            segment.seal()
            undo.pop_all()
        seconds = time.monotonic() - begun
        return Loaded(
            segment.resource_name,
            segment.generation,
            segment.location,
            segment.size,
            len(index),
            seconds,
            len(content) / max(seconds, 1e-9),
        )


@contextmanager
def _registered(client: Client, name: str, wanted: Wanted) -> Iterator[Model]:
    """Yield the model; one that was not there before ends with a failure, or its numbers would stand for a minute."""
    try:
        model, made = _register(client, name, wanted, exclusive=True), True
    except ModelAlreadyExists:
        model, made = _register(client, name, wanted), False
    try:
        yield model
    except BaseException:
        if made:
            with suppress(MembrokerError):
                _end_model(client, model)
        raise


def _end_model(client: Client, model: Model) -> None:
    """Unregister a model once its segment, which was given up, is gone: before that it would only be left."""
    deadline = time.monotonic() + GIVING_UP_SECONDS
    while time.monotonic() < deadline and any(
        one.name.startswith(f"{model.resource_name}/segments/") for one in client.segments()
    ):
        time.sleep(0.01)
    model.unregister()


def _register(client: Client, name: str, wanted: Wanted, *, exclusive: bool = False) -> Model:
    return client.register_model(
        name, virtual_capacity=wanted.virtual_capacity, limit=wanted.limit, exclusive=exclusive
    )


def _give_up(segment: Segment) -> None:
    """Leave nothing: a seal whose answer did not come may have happened."""
    with suppress(MembrokerError):
        segment.delete()


def _mapped(path: str) -> mmap.mmap:
    """Map a regular file, for reading. It is unmapped with the last reference, which a traceback may have."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}: name a safetensors file") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequest(f"{path} is no regular file: name a safetensors file")
        if not found.st_size:
            raise InvalidTensorIndex(f"{path} is no safetensors file: it is empty")
        # No MADV_SEQUENTIAL: with it a file that is not cached came at 30 MiB/s instead of 800 (ext4, Linux 6.18).
        return mmap.mmap(descriptor, found.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def _index_of(content: mmap.mmap, path: str) -> TensorIndex:
    """Read a file's header, with the bound that whoever attaches the segment reads it with."""
    try:
        index = read_index(memoryview(content), max_header_bytes=MAX_HEADER_BYTES)
    except InvalidTensorIndex as error:
        raise InvalidTensorIndex(f"{path} is no safetensors file: {error}") from error
    if index.size != len(content):
        more = len(content) - index.size
        raise InvalidTensorIndex(f"{path} is no safetensors file: {more} bytes follow its last tensor")
    return index


# --- How far it is ---


@contextmanager
def _progress(what: str, total: int, stream: TextIO) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total): it shows a bar on a terminal, and prints some lines elsewhere."""
    if not stream.isatty():
        yield _Lines(what, total, stream)
        return
    shown = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[text]}"))
    console = Console(file=stream)
    try:
        with Progress(*shown, console=console) as bar:
            yield _Bar(bar, what, total)
    finally:
        console.show_cursor()  # rich leaves it hidden where an interrupt comes between its hiding and its first line


class _Meter:
    """Bytes so far, of how many, and how fast."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._begun = time.monotonic()

    def text(self) -> str:
        """Say it; the rate is that of the whole time."""
        seconds = time.monotonic() - self._begun
        rate = f", {format_size(int(self.done / seconds))}/s" if self.done and seconds > 0 else ""
        return f"{format_size(self.done)} of {format_size(self.total)}{rate}"


class _Bar:
    def __init__(self, bar: Progress, what: str, total: int) -> None:
        self._meter = _Meter(total)
        self._bar = bar
        self._task = bar.add_task(what, total=total, text=self._meter.text())

    def __call__(self, done: int, _total: int, /) -> None:
        self._meter.done = done
        self._bar.update(self._task, completed=self._meter.done, text=self._meter.text())


class _Lines:
    def __init__(self, what: str, total: int, stream: TextIO) -> None:
        self._meter = _Meter(total)
        self._what = what
        self._stream = stream
        self._told = 0

    def __call__(self, done: int, _total: int, /) -> None:
        self._meter.done = done
        part = self._meter.done * LINES // self._meter.total
        if part > self._told:
            self._told = part
            percent = self._meter.done * 100 // self._meter.total
            print(f"{self._what}: {percent:3}%, {self._meter.text()}", file=self._stream, flush=True)


# --- What is in one, and its end ---


def contents(endpoint: str | None, name: Name) -> Contents:
    """Attach a segment for a moment, read-only, and return what it says of itself. Waits for no writer."""
    with open_worker(endpoint) as client, client.attach(str(name.within(client.tenant)), timeout=0) as segment:
        try:
            index = segment.index()
        except InvalidTensorIndex as error:
            raise InvalidTensorIndex(f"{segment.resource_name} says nothing of what is in it: {error}") from error
        return Contents(
            segment.resource_name,
            segment.generation,
            segment.location,
            segment.size,
            index.metadata,
            tuple(index.values()),
        )


def delete(endpoint: str | None, name: Name, *, admin: bool) -> Deleted:
    """End a segment of this tenant, or with `admin` of whomever; raises the library's errors."""
    with open_admin(endpoint) if admin else open_worker(endpoint) as books:
        if isinstance(books, Client):
            name = name.within(books.tenant)
        before = _known_by(books, name)
        books.delete_segment(str(name))
        left = {one.generation: one.sessions for one in books.segments()}
        if before is None:  # it came, and was deleted, between two calls
            return Deleted(str(name), 0, 0)
        return Deleted(before.name, before.size_bytes, left.get(before.generation, 0))


def _known_by(books: Admin | Client, name: Name) -> SegmentStatus | None:
    """Return the segment that the broker will take for the one of this name, if there is one."""
    for one in books.segments():
        tenant, model, segment = parts_of(one.name)
        wanted = (name.tenant or tenant, name.model or model, name.segment)
        if wanted == (tenant, model, segment) and one.state in ("writing", "sealed"):
            return one
    return None
