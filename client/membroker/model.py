"""`Model`: a registered workload, from which pools and buffers borrow.

Owns the model's name and figures, and the broker's `Source`, which requests and releases extents. It must never map
memory: it passes the descriptors to a `Placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, Literal, Self

from . import arguments
from .closing import refuse_pickle
from .errors import BrokerUnavailable, ClosedError, InvalidRequest, ModelInUse
from .interrupts import uninterrupted
from .memory.buffer import Buffer
from .memory.growable import DEFAULT_PAGE_SIZE as GROWABLE_PAGE_SIZE
from .memory.growable import GrowableBuffer
from .memory.lender import Placement, Source
from .memory.sparse import SparseArray
from .pool.pool import DEFAULT_PAGE_SIZE, VirtualMemoryPool
from .segment import Segment
from .session import messages
from .session.recalls import OpenRecall, borrows_in_a_callback
from .session.rpc import CONTROL_SECONDS
from .session.session import Session, SessionOwner
from .tracebacks import ends_at_the_caller
from .types import Available, ModelBooks, ModelStatus, SleepRequest, SleepStatus
from .v1 import broker_pb2 as pb
from .v1 import resources_pb2
from .v1.handoff_pb2 import Frame
from .versions import create_version
from .vmm.driver import Driver, Location
from .vmm.sizes import Size, format_exact
from .wire.names import MAX_BYTES, MAX_EXTENTS_PER_CALL


@ends_at_the_caller()
class Model:
    """A model of this tenant, as this session registered it. Thread-safe. `Client.model` makes it.

    A context manager: the end of its block leaves the model, as `leave` does. If memory of it is still held then, the
    model ends with its client.
    """

    def __init__(self, session: Session, registered: resources_pb2.Model) -> None:
        self._session = session
        self._registered = messages.value(ModelStatus, registered)
        self._source = _ModelSource(session, registered.name)
        self._recalls = session.recalls

    @property
    def resource_name(self) -> str:
        """`tenants/{tenant}/models/{model}`."""
        return self._registered.name

    @property
    def name(self) -> str:
        """The model's own name."""
        return arguments.parts_of(self._registered.name)[1]

    @property
    def virtual_capacity(self) -> int:
        """The bytes of addresses that a pool reserves by default."""
        return self._registered.virtual_capacity_bytes

    @property
    def limit(self) -> int | None:
        """The limit in force at the device, in bytes, when this was registered or set. `stats` returns the present one.

        Set it to change the limit of the model, for all its sessions; None removes it. It can only lower the limit that
        the operator has set. If the model has borrowed more, it borrows nothing until it is below, and the broker
        recalls the rest from sessions that answer recalls. Raises `ModelConflict` if the broker is of an older version,
        `InvalidRequest`, `BrokerUnavailable` and `ClosedError`.
        """
        return self._limit("device")

    @limit.setter
    def limit(self, size: Size | None) -> None:
        self._change_limit(Location.DEVICE, size)

    @property
    def host_limit(self) -> int | None:
        """The limit in force at the host, as `limit` is at the device."""
        return self._limit("host")

    @host_limit.setter
    def host_limit(self, size: Size | None) -> None:
        self._change_limit(Location.HOST, size)

    @contextmanager
    def limited(self, limit: Size | None, location: Location | str = Location.DEVICE) -> Iterator[None]:
        """Change the limit at a location during a block, and then set it again to what was asked for before.

        It is the model's limit, for all its sessions and threads. Raises what setting `limit` raises.
        """
        place = arguments.location_of(location)
        before = self._books_of(place).asked_limit_bytes
        self._change_limit(place, limit)
        try:
            yield
        finally:
            self._change_limit(place, before)

    def _change_limit(self, location: Location, size: Size | None) -> None:
        limit = MAX_BYTES if size is None else arguments.bytes_of("a limit", size)
        self._session.check_open()
        frame = Frame()
        request = frame.register_model
        request.model_id, request.replace_limits = self.name, True
        request.limits.add(location=messages.LOCATION_NUMBERS[location], limit_bytes=limit)
        registered = self._session.reconnecting.call(frame, timeout=CONTROL_SECONDS)
        self._registered = messages.value(ModelStatus, registered)

    @property
    def driver(self) -> Driver:
        """The driver of the broker's device, in this process: for managed memory, and `membroker.vmm`."""
        return self._session.driver

    @property
    def source(self) -> Source:
        """What the model's pools and buffers borrow from, for code that allocates in its own way (`membroker.ext`)."""
        return self._source

    def _limit(self, location: str) -> int | None:
        books = self._registered.books.get(location)
        return books.limit_bytes if books else None

    def pool(
        self,
        virtual_capacity: Size | None = None,
        *,
        page_size: Size = DEFAULT_PAGE_SIZE,
        location: Location | str = Location.DEVICE,
        spare_pages: int = 0,
        ahead: int | Literal["auto"] = 0,
    ) -> VirtualMemoryPool:
        """Reserve addresses for `virtual_capacity` bytes (by default the model's) and return the pool: `pool("64GiB")`.

        No memory is borrowed yet. `spare_pages` is how many freed pages the pool may keep mapped. `ahead` is how
        many pages it borrows before they are needed, or `"auto"`. See `VirtualMemoryPool`. Raises `InvalidPageSize`
        unless `page_size` is a power of two and at least the granularity, `InvalidRequest`, `ClosedError`, and
        `DeviceFailure` when the addresses cannot be reserved.
        """
        self._session.check_open()
        capacity = self.virtual_capacity if virtual_capacity is None else virtual_capacity
        return VirtualMemoryPool(
            self, capacity, page_size=page_size, location=location, spare_pages=spare_pages, ahead=ahead
        )

    def allocate(
        self, size: Size, location: Location | str = Location.DEVICE, *, timeout: float | None = None
    ) -> Buffer:
        """Borrow one contiguous extent of at least `size` bytes, map it, and return it as a buffer.

        `timeout` is how many seconds the call may wait until the broker has enough free memory, from 0 (not at all) to
        24 hours. The time also runs while the broker is away. By default a request within the model's guarantee waits
        as long as the broker's configuration allows, and any other request does not wait. A request that exceeds the
        limit of the model or the tenant is refused at once.

        Raises `OutOfMemory` with the numbers and the level that refused, `InvalidRequest`, `DeviceFailure`, `TooMany`
        when too many requests wait already, `DescriptorLimit`, `BrokerUnavailable`, also while an operator drains the
        device, and `ClosedError` when the client is closed; nothing is mapped or charged then.
        """
        self._session.check_open()
        return Buffer(self, size, location, timeout=timeout)

    def growable_buffer(
        self,
        size: Size,
        capacity: Size,
        page_size: Size = GROWABLE_PAGE_SIZE,
        location: Location | str = Location.DEVICE,
        *,
        timeout: float | None = None,
    ) -> GrowableBuffer:
        """Reserve addresses for `capacity` bytes, borrow memory for the first `size`, and return both as a buffer.

        `timeout` is that of `allocate`, for the first `size` bytes. Raises `InvalidPageSize` as `pool` does, and what
        `allocate` raises; nothing is mapped or charged then.
        """
        self._session.check_open()
        return GrowableBuffer(self, size, capacity, page_size=page_size, location=location, timeout=timeout)

    def sparse_array(
        self,
        shape: Sequence[int],
        dtype: Any,
        tile_rows: int | None = None,
        absent: str = "error",
        location: Location | str = Location.DEVICE,
    ) -> SparseArray:
        """Reserve addresses for an array. Its tiles of `tile_rows` rows get memory when they are written.

        `absent` says how reads treat a tile without memory: `"error"` raises `NotMapped`, `"zero"` returns zeros. No
        memory is borrowed yet. Raises `InvalidPageSize` for tiles that do not fill whole granules, `InvalidRequest`,
        `ClosedError`, and `DeviceFailure` when the addresses cannot be reserved.
        """
        self._session.check_open()
        return SparseArray(self, shape, dtype, tile_rows=tile_rows, absent=absent, location=location)

    def create_segment(
        self,
        name: str,
        size: Size,
        location: Location | str = Location.DEVICE,
        *,
        timeout: float | None = None,
        delete_when_left: bool = False,
        replace: bool = False,
        replace_left: bool = False,
    ) -> Segment:
        """Create a segment: `size` bytes under a name, charged to this model once, that many processes can attach.

        It is mapped writable in this process. Write it, then `seal` it. `timeout` is that of `allocate`. With
        `delete_when_left` the broker deletes it, once sealed, when the last session has left it.

        `replace` makes the next version of a name that moves: for `current` a segment `current.version-1`,
        `current.version-2` and so on. Its seal deletes the older ones, which live until their readers leave, and
        `Client.attach("chat/current")` attaches the newest. Until the seal, both versions need memory.

        `replace_left` deletes a sealed segment of this name that is left, as by a program that published it and died:
        no session holds it, and its writer's session has ended or is this one. Then, and for one that is ending and
        that no session holds, the call waits until its memory is free, at most `timeout` seconds. The functions that
        publish do so. Without it the name is refused, which tells a program to attach what is there.

        Raises `SegmentExists`, `OutOfMemory`, `InvalidRequest`, `TooMany`, `DeviceFailure`, `DescriptorLimit`,
        `BrokerUnavailable`; nothing is mapped or charged then.
        """
        self._session.check_open()
        self._source.check_may_borrow()
        create = create_version if replace else partial(Segment.create, replace_left=replace_left)
        return create(
            self._session, self.resource_name, name, size, location, timeout, delete_when_left=delete_when_left
        )

    def declare(
        self,
        size: Size,
        location: Location | str = Location.DEVICE,
        *,
        recallable: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Declare the total bytes that this process allocates for the model without the broker; the model is charged.

        Examples are its CUDA context, workspaces, and memory that it must export. It replaces the previous declaration,
        and 0 ends it. Memory for offloaded pages is counted in addition. `timeout` is that of `allocate`, by default 0.

        `recallable`: this process can give the memory back, but only all of it, as a program whose GPU memory can be
        suspended (a guest). A recall of `on_recall` is then for all of it: declare 0 in the callback. Such memory is
        lent when nothing guaranteed to others is touched. Declare the same again while the memory is in use: the guest
        that has declared nothing for the longest time is recalled first, when what others can release is not enough.

        Raises `OutOfMemory` when a limit refuses, and keeps the previous declaration then; `InvalidRequest`,
        `BrokerUnavailable` and `ClosedError`.
        """
        declared, place = arguments.bytes_of("a declaration", size), arguments.location_of(location)
        until = arguments.deadline_of(timeout)
        self._session.check_open()
        self._session.declarations.say(self.resource_name, place, declared, recallable=recallable, until=until)

    def unregister(self) -> None:
        """Leave the model. It ends when its last session leaves it. Raises `ModelInUse` while it is charged."""
        self._session.check_open()
        self._session.unregister_model(self.resource_name)

    def leave(self) -> None:
        """Undo the registration that made this object: `unregister`, unless this client has registered it again.

        Raises what `unregister` raises.
        """
        self._session.check_open()
        self._session.leave_model(self.resource_name)

    def defer_recalls(self) -> AbstractContextManager[None]:
        """Hold up recalls, and all work of the library's own threads, during a block: `Client.defer_recalls`."""
        self._session.check_open()
        return self._session.reconnecting.notices.held_up()

    def stats(self) -> ModelStatus:
        """Return the broker's present figures for the model, over all its sessions.

        Raises `ModelNotFound` once the model has ended, `BrokerUnavailable` and `ClosedError`.
        """
        return messages.value(ModelStatus, self._session.ask("get_model", pb.GetModelRequest(name=self.resource_name)))

    @property
    def used_bytes(self) -> int:
        """The bytes that the model is charged at the device now, over all its sessions. Asks the broker, as `stats`."""
        return self._books_of(Location.DEVICE).used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the model was charged at the device since it began. Asks the broker, as `stats` does."""
        return self._books_of(Location.DEVICE).peak_bytes

    def _books_of(self, location: Location) -> ModelBooks:
        """Return the present figures at a location. Raises `InvalidRequest` if the broker lends no memory there."""
        books = self.stats().books.get(location.value)
        if books is None:
            raise InvalidRequest(f"this broker lends no {location.value} memory (`host_capacity` in its configuration)")
        return books

    def available(self, location: Location | str = Location.DEVICE) -> Available:
        """Return how many bytes one request could borrow at a location, now and by waiting.

        It reserves nothing, so a request for as much may still be refused. `now_bytes` and `obtainable_bytes` are 0
        while an operator drains the device. Raises `ModelNotFound` once the model has ended, `InvalidRequest` if the
        broker does not lend memory at the location, `BrokerUnavailable` and `ClosedError`.
        """
        place = messages.LOCATION_NUMBERS[arguments.location_of(location)]
        request = pb.GetAvailableRequest(model=self.resource_name, location=place)
        return messages.value(Available, self._session.ask("get_available", request))

    def on_recall(self, callback: Callable[[Recall], object] | None) -> None:
        """Call `callback` with each `Recall`: the broker asks this session to release memory of the model.

        A session has one callback for a model, whatever the location. Another call of `on_recall` replaces it, and None
        removes it. The broker lends memory that is guaranteed to others, and that they do not use, only to sessions
        with a callback.

        The callback runs in a thread of the library, with one recall at a time. It may free, shrink, offload,
        trim or close, but it must not borrow (`InvalidRequest`). Before it is called, the library releases spare pages
        that no work on the device can use; if these are enough, it is not called. When the callback returns, the
        library tells the broker that the session keeps the rest. To answer later, return `membroker.DEFERRED`, and call
        `Recall.done` when the work is done. If the broker asks for more before that, the callback is called again with
        the same recall. An exception is logged, and the rest is kept.

        After a lost connection the broker asks again if it still needs the memory. A broker of an older version never
        asks. Leaving the model removes the callback. A call with None does not wait for a broker that is away.

        Raises `InvalidRequest` for an object that is not callable, `ModelNotFound` if this session has left the model,
        `BrokerUnavailable`, `DescriptorLimit` and `ClosedError`.
        """
        if callback is not None and not callable(callback):
            raise InvalidRequest(f"on_recall takes a function of one recall, or None, not {callback!r}")
        self._session.check_open()
        name, recalls = self.resource_name, self._recalls
        uninterrupted(lambda: recalls.answer_for(name, self._shown, callback), self._session.reconnecting.interrupted)

    def on_sleep(self, callback: Callable[[SleepRequest], SleepStatus] | None) -> None:
        """Call `callback` when an operator asks this model to sleep or to wake (`membroker sleep`, `membroker wake`).

        A session has one callback for a model. Another call of `on_sleep` replaces it, and None removes it. A session
        without a callback answers that it cannot sleep. `membroker.kv.Sleeper` sets such a callback.

        The callback runs in a thread of the library. It must return at once with the program's progress, and the
        program does the work in another thread. While the operator's command waits, it asks again a few times a second.
        An exception is logged, and reported to the operator.

        Raises `InvalidRequest` for an object that is not callable, `ModelNotFound` if this session has left the model,
        and `ClosedError`.
        """
        if callback is not None and not callable(callback):
            raise InvalidRequest(f"on_sleep takes a function of one request, or None, not {callback!r}")
        self._session.check_open()
        self._recalls.sleep_for(self.resource_name, callback)

    def say_sleep(self, status: SleepStatus) -> None:
        """Tell the broker how far the sleep of a guest is, for `membroker models`, `status`, `explain` and the metrics.

        A guest is a program that can release only all of its memory (`declare` with `recallable=True`). Say it when
        anything changes, and every few seconds: a new daemon does not know it, and what is said while no broker is
        connected is lost. Raises `ClosedError`.
        """
        self._session.check_open()
        self._recalls.say_sleep(self.resource_name, status)

    @property
    def recall_callback(self) -> Callable[[Recall], object] | None:
        """What `on_recall` has set, or None."""
        return self._recalls.callback_of(self.resource_name)

    @property
    def sleep_callback(self) -> Callable[[SleepRequest], SleepStatus] | None:
        """What `on_sleep` has set, or None."""
        return self._recalls.sleep_callback_of(self.resource_name)

    @property
    def pending_recall(self) -> Recall | None:
        """The oldest recall that the callback was called for and that has no answer yet, or None.

        It sends nothing to the broker, so a program can poll it. It needs a callback:
        `model.on_recall(lambda recall: membroker.DEFERRED)`. It is None while the connection to the broker is lost.
        """
        pending: Recall | None = self._recalls.pending(self._registered.name)
        return pending

    def _shown(self, recall: OpenRecall) -> Recall:
        return Recall(self, recall.location, recall.deadline, recall)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ModelInUse, BrokerUnavailable, ClosedError):
            self.leave()

    def __reduce__(self) -> str | tuple[Any, ...]:
        refuse_pickle(self)

    def __repr__(self) -> str:
        return f"<membroker.Model {self.resource_name}{', closed' * self._session.closed}>"


@dataclass(frozen=True, slots=True, eq=False)
class Recall:
    """The broker asks this session to release `size` bytes of `model`, in any pages or buffers at `location`.

    `location` is `"device"` or `"host"`. The session may release less. It keeps the rest, and the broker does not ask
    for that again within two seconds. `deadline` is when the answer is due, on the clock of `time.monotonic`. A session
    that answers later borrows nothing above the model's guarantee until it has answered. The broker can ask for more
    before the answer: `size` and `remaining` grow then, and the deadline stays. `is_guaranteed` can become True.
    """

    model: Model
    location: str
    deadline: float
    _open: OpenRecall

    @property
    def size(self) -> int:
        """The bytes that the broker has asked for so far."""
        return self._open.size

    @property
    def is_guaranteed(self) -> bool:
        """Whether a request within a guarantee lacks some of them: do not wait then for work that ends by itself."""
        return self._open.is_guaranteed

    @property
    def remaining(self) -> int:
        """The bytes still to release: `size` minus what this session has released of the model at the location since.

        A release that was on its way to the broker when the recall came is not counted here, but the broker counts it.
        """
        return self._open.remaining

    def done(self) -> None:
        """Answer: the session keeps what it has not released by now. Any thread may call this, also repeatedly.

        If the broker has raised `size` since the callback was last called, the answer does not cover the difference,
        and the broker asks for that again.

        Does nothing if the connection to the broker was lost since the recall: the broker asks again.
        """
        self._open.done()

    def __repr__(self) -> str:
        return f"<membroker.Recall of {self.size} bytes of {self.model.resource_name} at {self.location}>"


class _ModelSource(SessionOwner):
    """The `Source` of a model's pools and buffers: it borrows from the broker for this model."""

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session)
        self._name = name
        self.give_back = session.reconnecting.release

    def borrow(
        self,
        extent_bytes: int,
        count: int,
        location: Location,
        placement: Placement,
        until: float | None,
        *,
        ahead: bool = False,
        wanted_bytes: int = 0,
    ) -> None:
        """Borrow extents from the broker and place them in packets, as they arrive. All or nothing."""
        if count > MAX_EXTENTS_PER_CALL:
            raise InvalidRequest(
                f"{count} extents of {format_exact(extent_bytes)} are more than one request may have "
                f"({MAX_EXTENTS_PER_CALL}): take larger pages, or fewer at a time"
            )
        if get_ident() == self._session.reconnecting.notices.callback_thread:
            raise borrows_in_a_callback()
        frame = Frame()
        request = frame.allocate
        request.model, request.location = self._name, messages.LOCATION_NUMBERS[location]
        request.extent_bytes, request.count = extent_bytes, count
        request.ahead, request.wanted_bytes = ahead, wanted_bytes
        self._session.reconnecting.call(frame, placement, until=until)

    def check_may_borrow(self) -> None:
        """Raise `InvalidRequest` in a callback of `on_recall`."""
        if get_ident() == self._session.reconnecting.notices.callback_thread:
            raise borrows_in_a_callback()

    def charge(self, size: int, location: Location) -> None:
        """Declare `size` bytes more."""
        self._session.check_open()
        self.check_may_borrow()
        self._session.declarations.add(self._name, location, size)

    def credit(self, size: int, location: Location) -> None:
        """Declare `size` bytes less."""
        self._session.declarations.end(self._name, location, size)
