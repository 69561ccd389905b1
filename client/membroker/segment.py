"""`Segment`: named memory that one process writes and many attach, mapped in this process.

Owns one hold of the segment, the mapping of its extents, and the access of this process: it writes until it seals, or
reads. Its first bytes may be a safetensors header (`membroker.safetensors`), which gives its tensors names. The broker
knows a name, a size and a generation, but not the contents.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from google.protobuf.duration_pb2 import Duration

from . import arguments
from .arguments import check_framework, check_range, contiguous_bytes, location_of, rounded_up
from .cancellation import innermost
from .dlpack import export
from .errors import BrokerUnavailable, Cancelled, InvalidRequest, SegmentExists, SegmentNotFound, SegmentNotWritable
from .interrupts import Operation, device_failures, uninterrupted
from .memory.byte_access import ByteAccess
from .memory.lifetime import MappedMemory
from .recording import State
from .safetensors import ALIGNMENT, TensorIndex, numpy_array, read_index, write_index
from .session import messages
from .session.messages import LOCATION_NUMBERS, location_name
from .session.session import Session, SessionOwner
from .tracebacks import ends_at_the_caller
from .types import SegmentStatus
from .v1 import broker_pb2 as pb
from .v1 import resources_pb2
from .v1.handoff_pb2 import Frame
from .views import Span
from .vmm.driver import AccessFlags, Driver, Handle, Location
from .vmm.sizes import MIB, Size, format_size
from .wire.names import MAX_WAIT_SECONDS

MAX_HEADER_BYTES = 16 * MIB
"""The longest header that is read: 80,000 to 160,000 tensors. Another process wrote it, so its length is bounded."""
WRITTEN = "what is written to a segment"
"""Whose tensors `Segment.tensors` returns."""
CHUNK_BYTES = 64 * MIB
"""The most bytes that `write` copies at once: large enough for a bus's full speed, small enough for `progress`."""

_LOOK_SECONDS = 0.05
"""How often `replace_left` looks whether a name is free: no notice tells of it."""


@ends_at_the_caller()
class Segment(ByteAccess):
    """`size` contiguous bytes at `address`. A context manager. `Model.create_segment` and `Client.attach` make it.

    Closing it unmaps it in this process, and the segment continues to exist. If a writer closes it before it has sealed
    it, the broker drops the segment.
    """

    def __init__(self, session: Session, hold: _Hold, answer: resources_pb2.Segment, *, writable: bool) -> None:
        self._session = session
        self._hold = hold
        self._answer = answer
        self._writable = writable
        self._unanswered = False
        self._on_sealed: Callable[[int], object] | None = None
        self._on_host = session.driver.device.driver == "host"
        self._holding = hold.map(self, answer.size_bytes, AccessFlags.READ_WRITE if writable else AccessFlags.READ)
        self._filling = threading.Lock()

    @classmethod
    def create(
        cls,
        session: Session,
        model: str,
        name: str,
        size: Size,
        location: Location | str,
        timeout: float | None,
        *,
        delete_when_left: bool,
        replace_left: bool = False,
        on_sealed: Callable[[int], object] | None = None,
    ) -> Segment:
        """Make a segment under a model's resource name; see `Model.create_segment`.

        `on_sealed` is called with its generation once it is sealed.
        """
        until = arguments.deadline_of(timeout)
        length = rounded_up("a segment", size, session.driver.device.granularity)
        place = LOCATION_NUMBERS[location_of(location)]
        request = pb.CreateSegmentRequest(
            model=model,
            segment_id=arguments.name_of("segment", name),
            location=place,
            size_bytes=length,
            delete_when_left=delete_when_left,
        )
        while True:
            try:
                segment = cls._take(session, Frame(create_segment=request), until, writable=True)
            except SegmentExists as exists:
                is_over = until is not None and time.monotonic() >= until
                if not replace_left or is_over or not _comes_free(session, f"{model}/segments/{name}", exists):
                    raise
            else:
                segment._on_sealed = on_sealed
                return segment
            if (scope := innermost.get()) is not None:
                scope.check()
            time.sleep(_LOOK_SECONDS)

    @classmethod
    def attach(cls, session: Session, name: str, timeout: float) -> Segment:
        """Attach a segment by its resource name; see `Client.attach`."""
        if arguments.seconds_of("timeout", timeout) > MAX_WAIT_SECONDS:
            raise InvalidRequest(f"a timeout is between 0 and {MAX_WAIT_SECONDS} seconds, not {timeout!r}")
        wait = Duration()
        wait.FromNanoseconds(int(timeout * 1e9))
        frame = Frame(attach_segment=pb.AttachSegmentRequest(name=name, wait=wait))
        return cls._take(session, frame, None, writable=False)

    @classmethod
    def _take(cls, session: Session, frame: Frame, until: float | None, *, writable: bool) -> Segment:
        def take() -> Segment:
            with device_failures(), ExitStack() as imported:
                hold = _Hold(session)
                imported.callback(hold.undo)
                answer = session.reconnecting.call(frame, hold, until=until)
                hold.generation = answer.generation
                with ExitStack() as undo:
                    undo.callback(hold.give_back, ())
                    segment = cls(session, hold, answer, writable=writable)
                    undo.pop_all()
                return segment

        return uninterrupted(take, session.reconnecting.interrupted)

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
        """A number that identifies this segment. It is never reused, although the name may be."""
        return self._answer.generation

    @property
    def size(self) -> int:
        """The bytes that are mapped and charged: the requested size, rounded up to the device's granularity."""
        return self._answer.size_bytes

    @property
    def location(self) -> str:
        """`device` or `host`."""
        return location_name(self._answer.location)

    @property
    def writable(self) -> bool:
        """Whether this process can write it: it has created it, and has not sealed it."""
        return self._writable

    @property
    def driver(self) -> Driver:
        """The driver that has mapped it in this process."""
        return self._session.driver

    def kept(self) -> AbstractContextManager[None]:
        """Keep it mapped during a block. Unlike a living view, it lets the segment be sealed. Raises `ClosedError`."""
        return self._holding.in_use()

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Keep it mapped during a block, as `kept` does, and reserve it for one pool's offloaded pages.

        Raises `InvalidRequest` while it is reserved, `SegmentNotWritable`, `BufferError` while a writable view lives or
        another thread writes, and `ClosedError`.
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
        """Return the bytes as a memoryview, on the host driver. It is writable if the segment is `writable`.

        It keeps the segment mapped. Raises `InvalidRequest` on a GPU, because the CPU cannot read its memory, and
        `ClosedError`.
        """
        if not self._on_host:
            raise InvalidRequest("only the host driver's memory can be viewed: use read() and write() on a GPU")
        view = self._holding.view(self, 0, self.size)
        return view if self._writable else view.toreadonly()

    def span(self, offset: int, size: int) -> Span:
        """Keep the segment mapped while the result lives: for code that passes on addresses in the range, in bytes.

        As with a view, `close` then unmaps when the last span is gone, and `seal` refuses while a writable span lives.
        Raises `InvalidRequest` and `ClosedError`.
        """
        offset, size = self._check_range(offset, size)
        return self._holding.span(self, offset, size, writable=self._writable)

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of [offset, offset + size). Raises `InvalidRequest`, `ClosedError`, `DeviceFailure`."""
        offset, size = self._check_range(offset, size)
        with Operation(self._holding):
            return self._session.driver.read(self._holding.region.address + offset, size) if size else b""

    def write(self, offset: int, data: Any, progress: arguments.Progress | None = None) -> None:
        """Copy `data` to `offset`, in bytes from the segment's start.

        `data` is any object with contiguous bytes, or a tensor of torch, on any device and with any strides.
        `progress(done, total)` is called with bytes after each step of at most 64 MiB.

        Raises `SegmentNotWritable`, `InvalidRequest`, `ClosedError`, `DeviceFailure`.
        """
        arguments.check_progress(progress)
        torch: Any = sys.modules.get("torch")
        is_tensor = torch is not None and isinstance(data, torch.Tensor)
        source = _bytes_of_tensor(torch, data) if is_tensor else contiguous_bytes(WRITTEN, data)
        copy: Any = None
        offset, size = self._check_range(offset, len(source))
        with Operation(self._holding):
            # Before the check: a seal either finds this span and refuses, or has begun and is found here.
            written = self._holding.span(self, offset, size)
            try:
                self._check_writable()
                if is_tensor:
                    copy = partial(_copy_tensor, torch.from_dlpack(export(self, (size,), "U8", offset)))
                else:
                    copy = partial(self._copy_bytes, written.address)
                for first in range(0, size, CHUNK_BYTES):
                    some = source[first : first + CHUNK_BYTES]
                    copy(first, some)
                    if progress is not None:
                        progress(first + len(some), size)
            finally:
                del written, copy  # an error keeps its frames, and would keep the span

    def _copy_bytes(self, address: int, first: int, some: memoryview) -> None:
        self._session.driver.write(address + first, some)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes as a CUDA array of uint8, read-only unless the segment is `writable`.

        The consumer must keep the segment open. It exists only on a GPU. Raises `AttributeError` elsewhere, as the
        protocol requires, and `ClosedError`.
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
        if held := self._holding.views.held_by():
            raise BufferError(f"the segment is still written by {held}: a writable view must end before this")

    # Its tensors

    def index(self) -> TensorIndex:
        """Return the tensors of the segment's header: names, dtypes, shapes, offsets in bytes from its start.

        Raises `InvalidTensorIndex` if its first bytes are not a valid safetensors header, `ClosedError`, and
        `DeviceFailure`.
        """
        length = min(int.from_bytes(self.read(0, 8), "little"), MAX_HEADER_BYTES)
        return read_index(self.read(0, min(self.size, 8 + length)), max_header_bytes=MAX_HEADER_BYTES, total=self.size)

    def lay_out(
        self, tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
    ) -> TensorIndex:
        """Write the header for `tensors`, name -> (safetensors dtype, shape), and return it with each one's offset.

        `segment_size` returns the bytes that they need. Raises `InvalidRequest` if they do not fit, or if the header is
        longer than the 16 MiB that `index` reads, and what `write` raises.
        """
        header, index = write_index(tensors, metadata, alignment=ALIGNMENT)
        check_header(header)
        if index.size > self.size:
            raise InvalidRequest(f"the tensors need {index.size} bytes, and the segment has {self.size}")
        self.write(0, header)
        return index

    def tensors(self, framework: str = "numpy", *, raw: bool = False) -> dict[str, Any]:
        """Return all tensors by name, over the segment's own bytes, for `"numpy"`, `"torch"` or `"jax"`.

        Nothing is copied, and each keeps the segment mapped. NumPy's are writable if the segment is `writable`. torch
        has no read-only tensors, and JAX treats its arrays as constant: `adapters.torch.tensor` and
        `adapters.jax.array` say what follows.

        With NumPy, which reads only the host driver's memory, `raw` returns dtypes that it does not have as unsigned
        integers.

        Raises `InvalidTensorIndex`; `InvalidRequest` for another framework, for a dtype that the framework does not
        have, or for NumPy on a GPU; `ClosedError`; and `ImportError` without the framework.
        """
        check_framework(framework)
        if raw and framework != "numpy":
            raise InvalidRequest(f"raw is for NumPy, and {framework} has its own dtypes")
        if framework == "numpy":
            view = self.view()
            return {name: numpy_array(view, info, raw=raw) for name, info in self.index().items()}
        # The adapters are extensions, which know this module: so they are imported by name.
        stored_tensor = import_module(f"{__package__}.adapters.{framework}").stored_tensor
        return {name: stored_tensor(self, info) for name, info in self.index().items()}

    # Its ends

    def seal(self) -> None:
        """Make the segment read-only for every process, this one too, and let waiting `attach` calls proceed.

        Waits for the work that this process has submitted to the device. Raises `SegmentNotWritable`, `WriterDied` if
        it was deleted before, `BufferError` while a writable view or array of it lives or another thread is in `write`,
        `BrokerUnavailable`, `DeviceFailure` and `ClosedError`. If Ctrl-C or a lost broker prevents the answer, it may
        or may not be sealed: it is read-only in this process from then on, and `seal` asks again. After any other
        failure it stays writable.
        """
        uninterrupted(self._seal, self._session.reconnecting.interrupted)
        if self._on_sealed is not None:
            self._on_sealed(self.generation)

    def _seal(self) -> None:
        with Operation(self._holding), ExitStack() as undo:
            if not self._unanswered:
                self._make_read_only(undo)
            there = not self._session.connection.calls.is_lost
            try:
                request = pb.SealSegmentRequest(generation=self.generation)
                self._answer = self._session.reconnecting.call(Frame(seal_segment=request))
            except (KeyboardInterrupt, BrokerUnavailable, Cancelled):
                if there:  # the broker may have sealed it
                    self._unanswered = True
                    undo.pop_all()
                raise
            self._unanswered = False
            undo.pop_all()

    def _make_read_only(self, undo: ExitStack) -> None:
        self._check_writable()
        # This comes first, so that a view that another thread takes from now on is read-only.
        self._writable = False
        undo.callback(setattr, self, "_writable", True)
        self._check_views()
        self._session.driver.synchronize()
        self._holding.region.protect(AccessFlags.READ)
        undo.callback(self._holding.region.protect, AccessFlags.READ_WRITE)

    def delete(self) -> SegmentStatus:
        """Delete the segment: it cannot be attached any more, and its bytes are released when its last session leaves.

        It stays mapped in the processes that have it. Returns its last status. Raises `SegmentNotFound` when it is
        deleted already, `BrokerUnavailable` and `ClosedError`.
        """
        self._session.check_open()
        request = pb.DeleteSegmentRequest(name=self.resource_name, generation=self.generation)
        return messages.value(SegmentStatus, self._session.delete_segment(request))

    def __repr__(self) -> str:
        state = "closed" if self.closed else "being written" if self._writable else "read-only"
        held = self._holding.views.held_by(", kept by ")
        return f"<membroker.Segment {self.resource_name} of {self.size} bytes, {state}{held}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Return what attaches the same segment in the process that unpickles this. It must be sealed."""
        if self._writable or self.closed:
            raise TypeError(f"only a sealed, open segment can be pickled, and {self!r} is not")
        return _attach_again, (str(self._session.endpoint), self.resource_name, self.generation)


_clients: dict[str, Any] = {}
"""The clients of segments that were unpickled, by endpoint: they last as long as the process, as those may."""
_connecting = threading.Lock()


def _attach_again(endpoint: str, name: str, generation: int) -> Segment:
    """Attach a segment that another process has pickled. Raises `SegmentNotFound` if its name is another's now."""
    with _connecting:
        client = _clients.get(endpoint)
        if client is None or client.closed:
            client = _clients[endpoint] = import_module(str(__package__)).connect(endpoint)
    segment: Segment = client.attach(name)
    if segment.generation != generation:
        segment.close()
        raise SegmentNotFound(f"{name} is not the segment that was pickled: that one was deleted, and this is another")
    return segment


def _comes_free(session: Session, name: str, refused: SegmentExists) -> bool:
    """Say whether a name that was refused will be free: no session holds its segment. Delete that if it is left."""
    if refused.metadata.get("sessions") != "0":  # an older broker does not say
        return False
    if refused.metadata["state"] == "sealed":
        try:
            session.delete_segment(pb.DeleteSegmentRequest(name=name, only_if_left=True))
        except SegmentNotFound:
            pass  # another was faster
        except SegmentExists:
            return False
    return True


def check_header(header: bytes) -> None:
    """Raise `InvalidRequest` for a header that `Segment.index` refuses to read."""
    if len(header) - 8 > MAX_HEADER_BYTES:
        most = f"a segment's header has at most {format_size(MAX_HEADER_BYTES)}, metadata included"
        raise InvalidRequest(f"{most}, and this one has {len(header)} bytes: no process could read it")


def _bytes_of_tensor(torch: Any, tensor: Any) -> Any:
    """Return a tensor's elements as a tensor of bytes, in C order. Raises `InvalidRequest` if it has no plain bytes."""
    if tensor.is_meta or tensor.layout != torch.strided:
        where = "the meta device" if tensor.is_meta else tensor.layout
        raise InvalidRequest(f"{WRITTEN} has plain bytes, and this tensor has none: it is of {where}")
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _copy_tensor(target: Any, first: int, some: Any) -> None:
    target[first : first + len(some)].copy_(some)


class SegmentMaker(Protocol):
    """The part of a `Model` that publishing uses."""

    def create_segment(
        self,
        name: str,
        size: Size,
        location: Location | str = ...,
        *,
        timeout: float | None = ...,
        replace: bool = ...,
        replace_left: bool = ...,
    ) -> Segment:
        """Create a segment; see `Model.create_segment`."""
        ...


def write_tensors(
    segment: Segment, index: TensorIndex, tensors: Mapping[str, Any], progress: arguments.Progress | None
) -> None:
    """Copy arrays, or tensors of torch, to their places in the index. `progress` is told of all of them together."""
    before, total = 0, sum(index[key].size for key in tensors)
    for key, tensor in tensors.items():
        data = tensor.tobytes() if hasattr(tensor, "tobytes") else tensor
        step = None if progress is None else partial(_add_progress, progress, before, total)
        segment.write(index[key].offset, data, step)
        before += index[key].size


def _add_progress(progress: arguments.Progress, before: int, total: int, done: int, _size: int) -> None:
    progress(before + done, total)


class _Hold(SessionOwner):
    """One hold of a segment: the `Placement` that receives its descriptors, and the `Owner` of its `MappedMemory`.

    It imports the extents as they arrive, and maps them when the answer has stated the segment's size.
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
        """Release the handles: after a failure, or once the mapping keeps the memory."""
        self._ids.clear()
        while self._handles:
            self.driver.release(self._handles.pop())

    def map(self, segment: Segment, size: int, access: AccessFlags) -> MappedMemory:
        """Map all extents, one after the other, and return the mapping. Raises `DriverError` and `ClosedError`."""
        memory = MappedMemory(self, segment, size, "segment")
        with Operation(memory) as operation:  # it delays the end if the client closes meanwhile
            operation.undo.append(memory.end)
            memory.region.bind(0, self._ids, self._handles, access)
            if (recording := State.recording) is not None:
                recording.changed("segment", sum(handle.size for handle in self._handles))
            self.undo()  # here, because the driver is still open
            operation.undo.clear()
        return memory

    def give_back(self, extent_ids: Sequence[int]) -> None:
        """Detach from the segment. Its extents have one hold, so `extent_ids` does not matter."""
        self._session.reconnecting.detach(self.generation)
