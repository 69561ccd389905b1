"""`Segment`: memory under a name, written by one process and attached by many, mapped in this one.

Owns a `Holding` of the segment's extents, and what this process may do with them: write until it seals, or read.
A segment describes itself: its first bytes may be a safetensors header (`membroker.safetensors`), and then its
tensors are found by name. The broker knows a name, a size and a generation, and nothing of what is in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from google.protobuf.duration_pb2 import Duration

from . import arguments
from .arguments import check_range, contiguous_bytes, location_of, rounded_up
from .deprecated import two_numbers
from .dtypes import dtype_of
from .errors import BrokerUnavailable, InvalidRequest, SegmentNotWritable
from .interrupts import Operation, device_failures, uninterrupted
from .memory.lifetime import MappedMemory, Resource
from .memory.views import Span
from .safetensors import ALIGNMENT, TensorIndex, numpy_array, read_index, segment_size, write_index
from .session import messages
from .session.messages import location_name, location_to_wire
from .session.owner import SessionOwner
from .session.session import Session
from .types import SegmentStatus
from .v1 import broker_pb2 as pb
from .v1 import resources_pb2
from .vmm.driver import AccessFlags, Driver, Handle, Location
from .vmm.sizes import MIB
from .wire.names import MAX_ATTACH_SECONDS

if TYPE_CHECKING:
    import numpy

MAX_HEADER_BYTES = 16 * MIB
"""The longest header that is read: some 160,000 tensors. The bytes are another process's."""
CHUNK_BYTES = 64 * MIB
"""How much `write` copies at once: enough for a bus's full speed, little enough to tell how far it is."""


class Segment(Resource):
    """`size` bytes at `address`, side by side. A context manager. `Model.create_segment`, `Client.attach` make it.

    Closing it unmaps it here, and the segment lives on; a writer that closes before it has sealed gives it up.
    """

    def __init__(self, session: Session, hold: _Hold, answer: resources_pb2.Segment, *, writable: bool) -> None:
        self._session = session
        self._hold = hold
        self._answer = answer
        self._writable = writable
        self._unanswered = False
        self._on_host = session.driver.device.driver == "host"
        self._holding = hold.map(self, answer.size_bytes, AccessFlags.READ_WRITE if writable else AccessFlags.READ)
        self._filling = threading.Lock()

    @classmethod
    def create(cls, session: Session, model: str, name: str, size: int | str, location: Location | str) -> Segment:
        """Make a segment under a model's resource name; see `Model.create_segment`."""
        length = rounded_up("a segment", size, session.driver.device.granularity)
        place = location_to_wire(location_of(location))
        request = pb.CreateSegmentRequest(
            model=model, segment_id=arguments.name_of("segment", name), location=place, size_bytes=length
        )
        return cls._take(session, lambda hold: session.transport.create_segment(request, hold), writable=True)

    @classmethod
    def attach(cls, session: Session, name: str, timeout: float) -> Segment:
        """Attach a segment by its resource name; see `Client.attach`."""
        if arguments.seconds_of("timeout", timeout) > MAX_ATTACH_SECONDS:
            raise InvalidRequest(f"a timeout is between 0 and {MAX_ATTACH_SECONDS} seconds, not {timeout!r}")
        wait = Duration()
        wait.FromNanoseconds(int(timeout * 1e9))
        request = pb.AttachSegmentRequest(name=name, wait=wait)
        return cls._take(session, lambda hold: session.transport.attach_segment(request, hold), writable=False)

    @classmethod
    def _take(cls, session: Session, ask: Callable[[_Hold], resources_pb2.Segment], *, writable: bool) -> Segment:
        def take() -> Segment:
            with device_failures(), ExitStack() as imported:
                hold = _Hold(session)
                imported.callback(hold.undo)
                hold.generation = (answer := ask(hold)).generation
                with ExitStack() as undo:
                    undo.callback(hold.give_back, ())
                    segment = cls(session, hold, answer, writable=writable)
                    undo.pop_all()
                return segment

        return uninterrupted(take, session.interrupted)

    # What it is

    @property
    def name(self) -> str:
        """The segment's own name."""
        return self._answer.name.rpartition("/")[2]

    @property
    def resource_name(self) -> str:
        """`tenants/{tenant}/models/{model}/segments/{segment}`."""
        return self._answer.name

    @property
    def generation(self) -> int:
        """A number that no other segment ever has, whatever becomes of the name."""
        return self._answer.generation

    @property
    def size(self) -> int:
        """Bytes that are mapped and charged: as asked, rounded up to the device's granularity."""
        return self._answer.size_bytes

    @property
    def location(self) -> str:
        """`device` or `host`."""
        return location_name(self._answer.location)

    @property
    def address(self) -> int:
        """The first byte's address, in this process. Raises `ClosedError`."""
        self._holding.check_open()
        return self._holding.region.address

    @property
    def writable(self) -> bool:
        """Whether this process writes it: it made it, and has not sealed it."""
        return self._writable

    @property
    def driver(self) -> Driver:
        """The driver with which it is mapped in this process."""
        return self._session.driver

    def kept(self) -> AbstractContextManager[None]:
        """Keep it mapped during a block. Unlike a living view, it lets the segment be sealed. Raises `ClosedError`."""
        return self._holding.in_use()

    @contextmanager
    def filled(self) -> Iterator[None]:
        """As `kept`, to write bytes that are nowhere else then, and seal.

        Raises `InvalidRequest` while others have done so, and otherwise what `seal` raises before it does anything.
        """
        with self._holding.in_use():
            self._check_writable()
            self._check_views()
            if not self._filling.acquire(blocking=False):
                raise InvalidRequest(
                    f"{self.resource_name} has pages that a pool offloaded before: restore() them first, or take "
                    "another segment"
                )
            try:
                yield
            finally:
                self._filling.release()

    # Its bytes

    def view(self) -> memoryview:
        """Return the bytes as a memoryview, on the host driver; writable for who writes it.

        It keeps the segment mapped. Raises `InvalidRequest` on a card, whose memory the processor cannot read, and
        `ClosedError`.
        """
        if not self._on_host:
            raise InvalidRequest("only the host driver's memory can be viewed: use read() and write() on a card")
        view = self._holding.view(self, 0, self.size)
        return view if self._writable else view.toreadonly()

    def span(self, offset: int, size: int) -> Span:
        """Keep the segment mapped as long as the result lives: for whoever gives addresses in the range away.

        As with a living view, `close` then unmaps when the last span is gone, and `seal` refuses while one of the
        writer's lives. Raises `InvalidRequest` and `ClosedError`.
        """
        offset, size = self._check_range(offset, size)
        return self._holding.span(self, offset, size, writable=self._writable)

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of [offset, offset + size). Raises `InvalidRequest`, `ClosedError`, `DeviceFailure`."""
        offset, size = self._check_range(offset, size)
        with Operation(self._holding):
            return self._session.driver.read(self._holding.region.address + offset, size) if size else b""

    def write(self, offset: int, data: Any, progress: arguments.Progress | None = None) -> None:
        """Copy `data`, anything with contiguous bytes, to `offset`, which counts bytes from the segment's first.

        `progress(done, total)` is called with bytes after each step of at most 64 MiB.

        Raises `SegmentNotWritable`, `InvalidRequest`, `ClosedError`, `DeviceFailure`.
        """
        source = contiguous_bytes("what is written to a segment", data)
        arguments.check_progress(progress)
        tell = two_numbers(progress) if progress is not None else None
        offset, _ = self._check_range(offset, len(source))
        with Operation(self._holding):
            self._check_writable()
            for first in range(0, len(source), CHUNK_BYTES):
                some = source[first : first + CHUNK_BYTES]
                self._session.driver.write(self._holding.region.address + offset + first, some)
                if tell is not None:
                    tell(first + len(some), len(source))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes as a CUDA array of uint8, read-only but for who writes it. Whoever takes it keeps the segment.

        Only on a card: `AttributeError` elsewhere, as the protocol wants.
        """
        if self._on_host:
            raise AttributeError("the host driver's memory is no CUDA array: use view()")
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, not self._writable), "version": 3}

    def _check_range(self, offset: int, size: int) -> tuple[int, int]:
        return check_range(offset, size, self.size, "a segment")

    def _check_writable(self) -> None:
        if not self._writable:
            raise SegmentNotWritable(f"{self.resource_name} is sealed, or was attached: it can only be read")

    def _check_views(self) -> None:
        if self._holding.views.any():
            raise BufferError("a writable view of the segment is still alive: release it first")

    # Its tensors

    def index(self) -> TensorIndex:
        """Return the tensors that the segment says it has: names, dtypes, shapes, offsets in bytes from its start.

        Raises `InvalidTensorIndex` where its first bytes are no safetensors header.
        """
        length = min(int.from_bytes(self.read(0, 8), "little"), MAX_HEADER_BYTES)
        return read_index(self.read(0, min(self.size, 8 + length)), max_header_bytes=MAX_HEADER_BYTES, total=self.size)

    def lay_out(
        self, tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
    ) -> TensorIndex:
        """Write the header for `tensors`, name -> (safetensors dtype, shape), and return where each goes.

        `segment_size` says how large a segment they need. Raises `InvalidRequest` where they do not fit, and
        `SegmentNotWritable`.
        """
        header, index = write_index(tensors, metadata, alignment=ALIGNMENT)
        if index.size > self.size:
            raise InvalidRequest(f"the tensors need {index.size} bytes, and the segment has {self.size}")
        self.write(0, header)
        return index

    def arrays(self, *, raw: bool = False) -> dict[str, numpy.ndarray[Any, Any]]:
        """Return the tensors as NumPy arrays over the segment's own bytes, on the host driver; nothing is copied.

        They can be written by who writes the segment, and keep it mapped. `raw` gives dtypes that NumPy does not
        have as unsigned integers. Raises `InvalidTensorIndex`, and what `view` raises.
        """
        index, view = self.index(), self.view()
        return {name: numpy_array(view, info, raw=raw) for name, info in index.items()}

    # Its ends

    def seal(self) -> None:
        """Say that it is written: from now on everybody, this process too, can only read it.

        Waits for the work that this process has given to the device. Whoever waits in `attach` goes on. Raises
        `SegmentNotWritable`, and `BufferError` while a writable view or array of it lives. Where Ctrl-C or the broker's
        end took the answer, it may be sealed: it can only be read from then on, and `seal` asks again. After any other
        failure it can be written as before.
        """
        uninterrupted(self._seal, self._session.interrupted)

    def _seal(self) -> None:
        with Operation(self._holding), ExitStack() as undo:
            if not self._unanswered:
                self._make_read_only(undo)
            there = not self._session.connection.lost
            try:
                self._answer = self._session.transport.seal_segment(self.generation)
            except (KeyboardInterrupt, BrokerUnavailable):
                if there:  # it may have done it
                    self._unanswered = True
                    undo.pop_all()
                raise
            self._unanswered = False
            undo.pop_all()

    def _make_read_only(self, undo: ExitStack) -> None:
        self._check_writable()
        # First of all: a view that another thread takes from here on is read-only already.
        self._writable = False
        undo.callback(setattr, self, "_writable", True)
        self._check_views()
        self._session.driver.synchronize()
        self._holding.region.protect(AccessFlags.READ)
        undo.callback(self._holding.region.protect, AccessFlags.READ_WRITE)

    def delete(self) -> SegmentStatus:
        """End the segment: nobody can attach it any more, and its bytes come back when its last session has left.

        It stays mapped where it is. Returns it as it ends. Raises `SegmentNotFound` when it is deleted already.
        """
        self._session.check_open()
        request = pb.DeleteSegmentRequest(name=self.resource_name, generation=self.generation)
        return messages.segment(self._session.transport.delete_segment(request))

    def __repr__(self) -> str:
        state = "closed" if self.closed else "being written" if self._writable else "read-only"
        return f"<membroker.Segment {self.resource_name} of {self.size} bytes, {state}>"


class SegmentMaker(Protocol):
    """A `Model`, as far as publishing needs it."""

    def create_segment(self, name: str, size: int | str, location: Location | str = ...) -> Segment:
        """Make a segment; see `Model.create_segment`."""
        ...


def publish_arrays(
    model: SegmentMaker,
    name: str,
    arrays: Mapping[str, numpy.ndarray[Any, Any]],
    *,
    metadata: Mapping[str, str] | None = None,
    location: Location | str = Location.DEVICE,
) -> Segment:
    """Make a segment of NumPy arrays, write them into it, and seal it. On any failure there is no segment.

    Raises what `Model.create_segment` raises, and `InvalidRequest` for an array of a dtype that safetensors has not.
    """
    shapes = {key: (dtype_of(array), array.shape) for key, array in arrays.items()}
    segment = model.create_segment(name, segment_size(shapes, metadata), location)
    with ExitStack() as undo:
        undo.callback(segment.close)
        index = segment.lay_out(shapes, metadata)
        for key, array in arrays.items():
            segment.write(index[key].offset, array.tobytes())
        segment.seal()
        undo.pop_all()
    return segment


class _Hold(SessionOwner):
    """One hold of a segment: takes its descriptors, and is where its mapping comes from and goes back to.

    The handles are imported as they come and mapped when the answer has said how large the whole is. (A
    `Placement`, and the `Owner` of its `MappedMemory`.)
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.generation = 0
        self._ids: list[int] = []
        self._handles: list[Handle] = []

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        """Import the next extents."""
        self._ids.extend(extent_ids)
        for descriptor in descriptors:
            self._handles.append(self.driver.import_extent(descriptor, extent_bytes))

    def undo(self) -> None:
        """Release the handles: after a failure, and when the mapping keeps the memory."""
        self._ids.clear()
        while self._handles:
            self.driver.release(self._handles.pop())

    def map(self, segment: Segment, size: int, access: AccessFlags) -> MappedMemory:
        """Return all of it mapped, side by side."""
        memory = MappedMemory(self, segment, size, "segment")
        with Operation(memory) as operation:  # a client that closes meanwhile leaves the end to this
            operation.undo.append(memory.end)
            memory.region.bind(0, self._ids, self._handles, access)
            self.undo()  # now, while there is a driver
            operation.undo.clear()
        return memory

    def give_back(self, extent_ids: Sequence[int]) -> None:
        """Detach from the segment, whatever is released of it."""
        self._session.transport.detach_segment(self.generation)
