"""The lifetime of mapped memory: its uses, its end, and the release of all of it exactly once.

Owns the region of one pool, buffer, array or segment, and the list of its uses: running calls and living views.
`MappedMemory` outlives the user's object and must never refer to it: a finalizer of that object releases the memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import ClassVar, Final

from ..closing import Closing
from ..errors import ClosedError, ProtocolError
from ..interrupts import Operation, Step, completed, device_failures, settle, uninterrupted
from ..recording import State
from ..reentry import in_a_finalizer
from ..tracebacks import ends_at_the_caller
from ..views import Span, Views
from .lender import Owner
from .region import Region

LIFECYCLE: Final[Mapping[str, Mapping[str, str]]] = {
    # Its addresses are being reserved.
    "making": {"made": "open", "not made": "ending", "closed": "unwanted", "forked": "abandoned"},
    # Another thread has closed it. The thread that makes it will end it.
    "unwanted": {"not made": "ending", "forked": "abandoned"},
    "open": {"closed": "ending", "forked": "abandoned"},
    # It is closed, and calls or views still use it.
    "ending": {"last use ended": "releasing", "forked": "abandoned"},
    "releasing": {"released": "ended", "driver failed": "ending", "forked": "abandoned"},
    "ended": {},
    # In a forked child: the memory belongs to the parent.
    "abandoned": {},
}
"""`LIFECYCLE[state][cause]` is the next state of mapped memory; docs/lifecycles.md is drawn from it."""


class MappedMemory:
    """A region of `size` bytes, at a multiple of `alignment`. It is released after `end`, once its last use has ended.

    It also ends when `user`, the user's object, is garbage. After a fork the child's copy is `abandoned`: it belongs to
    the parent, and a thread of the parent may have held its lock.

    Raises `DriverError` when the addresses cannot be reserved, and `ClosedError`.
    """

    _owned: ClassVar[set[MappedMemory]] = set()
    """Keeps each memory alive until its user has been collected: it must still exist when it is ended."""
    _unended: ClassVar[set[MappedMemory]] = set()
    """Keeps each memory whose end has failed until it succeeds, so that nothing mapped is forgotten."""

    def __init__(self, source: Owner, user: object, size: int, what: str, alignment: int = 0) -> None:
        self.source = source
        self.what = what
        self.state: str = "making"
        self.views: Views = Views(self, MappedMemory._used_less)
        self.beside: Step | None = None
        """A step that the release also runs. It runs again after a failure."""
        self.spare: Callable[[int, Callable[[int], bool]], object] | None = None
        """What `give_spare` does, for memory that can have spare pages."""
        self.region: Region = Region(source.driver, size, alignment)
        self._lock = threading.Lock()
        self._calls: dict[weakref.ref[Operation], tuple[list[Step], list[Step]]] = {}
        self._releasing = 0
        # This does what `weakref.finalize` does, in 0.3 us instead of 1.5. At exit the client ends all memory in order.
        self._user: weakref.ref[object] | None = weakref.ref(user, self._end_later)
        self._owned.add(self)
        try:
            source.track(self)
            self.region.reserve()
            with self._lock:
                if self.state != "making":
                    raise ClosedError(f"this {what} was not made: its client, or its source, was closed meanwhile")
                self._move("made")
        except BaseException:
            with self._lock:
                if self.state in ("making", "unwanted"):
                    self._move("not made")
            self.end()
            raise

    @property
    def extents(self) -> dict[int, int]:
        """The id of each extent, by its offset in bytes."""
        return {offset: extent for offset, (extent, _) in self.region.extents.items()}

    # Its uses

    def check_open(self) -> None:
        """Raise `ClosedError` if this is closed, or was inherited over a fork. Takes no lock."""
        if self.state != "open":
            self._refuse()

    def _refuse(self) -> None:
        if self.state == "abandoned":
            raise ClosedError(f"this {self.what} belongs to the process that this one was forked from")
        raise ClosedError(f"this {self.what} is closed")

    @property
    def closed(self) -> bool:
        """Whether this is released, or will be when its last use has ended."""
        return self.state not in ("making", "open")

    def begin(self, operation: Operation) -> None:
        """Delay the end until the operation finishes, or is garbage."""
        guard = operation.guard = weakref.ref(operation, self._lost)
        hash(guard)  # the reference caches the hash, so it can be looked up after the operation is gone
        if self.state == "abandoned":
            self._refuse()
        with self._lock:
            if self.state != "open":
                self._refuse()
            self._calls[guard] = (operation.undo, operation.ends)

    def finish(self, operation: Operation) -> None:
        """End the use by an operation, also if it had not begun."""
        guard, operation.guard = operation.guard, None
        if guard is not None:
            self._calls.pop(guard, None)
        if self.state == "ending":
            self.end()

    def _lost(self, guard: weakref.ref[Operation]) -> None:
        """Clean up in another thread after a call that became garbage: an interrupt came before the boundary could."""
        if guard in self._calls and self.state != "abandoned":
            self.source.later(lambda: self._clean_up(guard))

    def _clean_up(self, guard: weakref.ref[Operation]) -> None:
        steps = self._calls.get(guard)
        try:
            if steps is not None:
                settle(*steps)
        finally:
            self._calls.pop(guard, None)
            if self.state == "ending":
                self.end()
            self.interrupted()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Delay the end during a block of the user's code. The block needs no clean-up after an interrupt."""
        use = Operation(self)
        self.begin(use)
        try:
            yield
        finally:
            self.finish(use)

    def span(self, keeper: object, offset: int, size: int, *, writable: bool = True, keeps_memory: bool = True) -> Span:
        """Delay the end while the result lives. The result keeps `keeper` alive. Raises `ClosedError`."""
        self.check_open()
        with self._lock:
            self.check_open()
            address = self.region.address + offset
            span = Span(keeper, address, size, self.source.driver.device, writable)
            return self.views.count(span, keeps_memory=keeps_memory)

    def view(self, keeper: object, offset: int, size: int) -> memoryview:
        """Return bytes as a memoryview that keeps `keeper` alive and delays the end. Raises `ClosedError`."""
        self.check_open()
        with self._lock:
            self.check_open()
            return self.views.make(keeper, self.region.address + offset, size)

    def interrupted(self) -> None:
        """Drop the connection to the broker, so that both agree again on what is held."""
        self.source.interrupted()

    # Its end

    def end(self) -> None:
        """Release everything, now, or once the last call has returned and the last view is gone.

        In a finalizer that has interrupted a call of the library, another thread does it soon. Raises `DriverError`
        when the driver fails to unmap. The memory is then still held, and another `end` retries.
        """
        if self.state in ("abandoned", "ended"):
            return
        if in_a_finalizer():
            self.source.later(self.end)
        else:
            completed(self._end, self.interrupted)

    def abandon(self) -> None:
        """In a forked child: mark the memory as the parent's, so that it is never touched here."""
        self.state = "abandoned"

    def give_spare(self, size: int, is_asked_for: Callable[[int], bool]) -> None:
        """Release spare pages, as `Tracked` says, if this memory can have some and is open."""
        spare = self.spare  # another thread may take it away, with the memory
        if spare is not None and self.state == "open":
            with suppress(ClosedError):
                spare(size, is_asked_for)

    def _end(self) -> None:
        if self._is_last():
            try:
                self._release()
            except Exception:
                self._unended.add(self)
                self._move("driver failed")
                raise

    def _is_last(self) -> bool:
        """Return whether this thread must release it: all uses have ended, and no other thread is releasing it."""
        me = threading.get_ident()
        with self._lock:
            if self.state in ("making", "open"):
                self._move("closed")
            if self.state == "ending" and not (self._calls or self.views.any()):
                self._releasing = me
                self._move("last use ended")
            # This is also true for the second attempt of a thread whose first one was interrupted.
            return self.state == "releasing" and self._releasing == me

    def _release(self) -> None:
        region = self.region
        if region.extents:
            self.source.driver.synchronize()
            self.remove(region.runs())
        if self.beside is not None:
            uninterrupted(self.beside)
        region.close()
        # Drop the weak reference: the background thread would wake for the garbage, which costs 50 us.
        self._user = None
        self._owned.discard(self)
        self._unended.discard(self)
        self.source.untrack(self)
        self._move("released")
        self.beside = self.spare = None
        for memory in list(self._unended):  # the driver works again, so retry the others
            memory.source.later(memory.end)

    def remove(self, runs: Iterable[tuple[int, int]]) -> None:
        """Unmap runs of whole extents, (offset, size) in bytes, release them and forget them. Safe to run again.

        The caller has waited for the device. Raises `DriverError`; the extents unmapped until then are released.
        """
        gone: list[int] = []
        try:
            for offset, size in runs:
                self.region.unbind(offset, size)
                gone += self.region.offsets(offset, size)
        finally:
            if gone:
                self.release(gone)

    def release(self, offsets: Sequence[int]) -> None:
        """Release the extents at these offsets, which are unmapped, and forget them. Safe to run again."""
        self.source.give_back([self.region.extents[offset][0] for offset in offsets])
        recording = State.recording
        sizes = {} if recording is None else {offset: self.region.extents[offset][1] for offset in offsets}
        try:
            # Forget from the end: after an interrupt the rest starts at the run's offset, so a second run finds it.
            self.region.forget(reversed(offsets))
        finally:
            if recording is not None:  # each extent counts once, in the run that forgets it
                left = self.region.extents
                recording.changed(self.what, -sum(size for offset, size in sizes.items() if offset not in left))

    def _move(self, cause: str) -> None:
        self.state = LIFECYCLE[self.state][cause]

    def _end_later(self, _user: weakref.ref[object]) -> None:
        if self.state != "abandoned":
            self.source.later(self.end)
        self._owned.discard(self)

    def _used_less(self) -> None:
        """Handle the end of a view, in any thread: if the memory is ending, another thread tries to release it."""
        if self.state == "ending":
            self.source.later(self.end)


class Placing:
    """Maps extents at `offsets` of mapped memory as they arrive, in order, for one borrowing: a `Placement`.

    The offsets are in bytes, in ranges or lists. A request may have far more of them than a list can hold.
    """

    def __init__(self, memory: MappedMemory, *offsets: Iterable[int]) -> None:
        self._memory = memory
        self._offsets = offsets
        self._rest = chain.from_iterable(offsets)
        self._ids: list[int] = []
        self._placed: list[int] = []

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        """Map the next extents."""
        offsets = list(islice(self._rest, len(extent_ids)))
        if len(offsets) < len(extent_ids):
            raise ProtocolError("the broker delivered more extents than were requested")
        self._placed += offsets
        self._ids.extend(extent_ids)
        if (recording := State.recording) is not None:
            recording.changed(self._memory.what, len(offsets) * extent_bytes)
        self._memory.region.bind_descriptors(offsets, extent_ids, descriptors, extent_bytes)

    def undo(self) -> None:
        """Unmap them all. They are unused so far, so there is no work to wait for. Safe to run again."""
        region = self._memory.region
        undone = 0
        for offset in self._placed:
            if offset in region.extents:
                region.unbind(offset, region.extents[offset][1])
                undone += region.extents[offset][1]
        region.forget(self._placed)
        if undone and (recording := State.recording) is not None:
            recording.changed(self._memory.what, -undone)
        self._rest, self._placed = chain.from_iterable(self._offsets), []

    def take_back(self) -> None:
        """Unmap them all, and release those that the source still counts as lent. Safe to run again."""
        self.undo()
        self._memory.source.give_back(self._ids)


@ends_at_the_caller()
class Resource(Closing):
    """An object with memory that is mapped in this process until it is closed. A context manager."""

    _holding: MappedMemory

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._holding.closed

    def close(self) -> None:
        """Unmap all of it in this process, and release the memory and the addresses. Idempotent.

        While views, spans, tensors, or calls in other threads use it, the release happens when the last of them has
        ended. Otherwise this call waits for the work that this process has submitted to the device, and releases. It
        also unmaps while the broker is unreachable, and raises nothing then. In a `__del__` that has interrupted a call
        of the library, this returns, and a thread releases soon. Raises `DeviceFailure`; the memory that could not be
        released stays held until this object, or its client, is closed again.
        """
        with device_failures():
            self._holding.end()


@ends_at_the_caller()
class AtAddress(Resource):
    """A resource whose bytes begin at `address`."""

    @property
    def address(self) -> int:
        """The address of the first byte, in this process, constant while this is open. Raises `ClosedError`."""
        self._holding.check_open()
        return self._holding.region.address
