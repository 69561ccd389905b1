"""The lifetime of mapped memory: what uses it, when it ends, and how all of it is released exactly once.

Owns the region of one pool, buffer, array or segment, and the list of what uses it: calls that run, and views that
live. `MappedMemory` outlives the object that the user has, and must never refer to it: a finalizer releases it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final

from ..closing import Closing
from ..errors import ClosedError
from ..interrupts import Operation, Step, completed, device_failures, settle, uninterrupted
from .lender import Owner
from .region import Region
from .views import Span, Views

LIFECYCLE: Final[Mapping[str, Mapping[str, str]]] = {
    # Its addresses are being reserved.
    "making": {"made": "open", "not made": "ending", "closed": "unwanted", "forked": "abandoned"},
    # Closed by another thread meanwhile, which leaves the end to the thread that makes it.
    "unwanted": {"not made": "ending", "forked": "abandoned"},
    "open": {"closed": "ending", "forked": "abandoned"},
    # Closed, while calls or views still use it.
    "ending": {"last use ended": "releasing", "forked": "abandoned"},
    "releasing": {"released": "ended", "driver failed": "ending", "forked": "abandoned"},
    "ended": {},
    # In a forked child: the memory is the parent's.
    "abandoned": {},
}
"""`LIFECYCLE[state][cause]` is the next state of mapped memory; docs/lifecycles.md is drawn from it."""


class MappedMemory:
    """A region of `size` bytes, at a multiple of `alignment`, until nothing uses it after `end`.

    It also ends when `user`, the object that the user has, is garbage. After a fork the child's copy is `abandoned`: it
    belongs to the parent, and a thread of the parent may have held its lock.
    """

    _owned: ClassVar[set[MappedMemory]] = set()
    """Those whose user lives: one that is garbage together with its user must still be there to end."""
    _unended: ClassVar[set[MappedMemory]] = set()
    """Those whose end has failed, until it succeeds: what is mapped must not be forgotten."""

    def __init__(self, source: Owner, user: object, size: int, what: str, alignment: int = 0) -> None:
        self.source = source
        self.what = what
        self.state = "making"
        self.views = Views(self, MappedMemory._used_less)
        self.beside: Step | None = None
        """Ends with it; called again after a failure."""
        self.region = Region(source.driver, size, alignment)
        self._lock = threading.Lock()
        self._calls: dict[weakref.ref[Operation], tuple[list[Step], list[Step]]] = {}
        self._releasing = 0
        # What `weakref.finalize` does, in 0.3 us instead of 1.5. At exit the client ends it in order.
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
        """The ids of the extents by offset in bytes."""
        return {offset: extent for offset, (extent, _) in self.region.extents.items()}

    # Who uses it

    def check_open(self) -> None:
        """Raise `ClosedError` when this is closed, or inherited over a fork. Takes no lock."""
        if self.state != "open":
            self._refuse()

    def _refuse(self) -> None:
        if self.state == "abandoned":
            raise ClosedError(f"this {self.what} belongs to the process that this one was forked from")
        raise ClosedError(f"this {self.what} is closed")

    @property
    def closed(self) -> bool:
        """Whether this is released, or will be when the last view of it is gone."""
        return self.state not in ("making", "open")

    def begin(self, operation: Operation) -> None:
        """Delay the end until the operation finishes, or is garbage."""
        guard = operation.guard = weakref.ref(operation, self._lost)
        hash(guard)  # it keeps that when the operation is gone
        if self.state == "abandoned":
            self._refuse()
        with self._lock:
            if self.state != "open":
                self._refuse()
            self._calls[guard] = (operation.undo, operation.ends)

    def finish(self, operation: Operation) -> None:
        """End the use by an operation, whether it had begun or not."""
        guard, operation.guard = operation.guard, None
        if guard is not None:
            self._calls.pop(guard, None)
        if self.state == "ending":
            self.end()

    def _lost(self, guard: weakref.ref[Operation]) -> None:
        """An interrupt struck before the boundary could act, and the call is garbage: do its work in another thread."""
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
        """Delay the end during a block of the user's, which no interrupt of the library's can leave half done."""
        use = Operation(self)
        self.begin(use)
        try:
            yield
        finally:
            self.finish(use)

    def span(self, keeper: object, offset: int, size: int, *, writable: bool = True) -> Span:
        """Delay the end as long as the result lives, which keeps `keeper`. Raises `ClosedError`."""
        self.check_open()
        with self._lock:
            self.check_open()
            address = self.region.address + offset
            return self.views.count(Span(keeper, address, size, self.source.driver.device, writable))

    def view(self, keeper: object, offset: int, size: int) -> memoryview:
        """Return bytes as a memoryview, which keeps `keeper` and delays the end. Raises `ClosedError`."""
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

        What the driver fails to unmap, which raises `DriverError`, is held still: to end it again tries again.
        """
        if self.state not in ("abandoned", "ended"):
            completed(self._end, self.interrupted)

    def abandon(self) -> None:
        """In a forked child: never touch the memory again, which is the parent's."""
        self.state = "abandoned"

    def _end(self) -> None:
        if self._is_last():
            try:
                self._release()
            except Exception:
                self._unended.add(self)
                self._move("driver failed")
                raise

    def _is_last(self) -> bool:
        """Say whether nothing uses this any more, and no other thread releases it."""
        me = threading.get_ident()
        with self._lock:
            if self.state in ("making", "open"):
                self._move("closed")
            if self.state == "ending" and not (self._calls or self.views.any()):
                self._releasing = me
                self._move("last use ended")
            # Also after an interrupt, which had ended this thread's first attempt.
            return self.state == "releasing" and self._releasing == me

    def _release(self) -> None:
        region = self.region
        if region.extents:
            self.source.driver.synchronize()
            self.remove(region.runs())
        if self.beside is not None:
            uninterrupted(self.beside)
        region.close()
        # If the user closed it, the background thread need not wake when it is garbage: that costs 50 us.
        self._user = None
        self._owned.discard(self)
        self._unended.discard(self)
        self.source.untrack(self)
        self._move("released")
        self.beside = None
        for one in list(self._unended):  # the driver unmaps again
            one.source.later(one.end)

    def remove(self, runs: Iterable[tuple[int, int]]) -> None:
        """Unmap runs of whole extents, (offset, size), release them and forget them. Safe to run again.

        The caller has waited for the device. After a failure of the driver, what was unmapped is released.
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
        self.source.give_back(self.region.ids(offsets))
        # From the end: what an interrupt leaves still begins where the run does, so a second run finds it.
        self.region.forget(reversed(offsets))

    def _move(self, cause: str) -> None:
        self.state = LIFECYCLE[self.state][cause]

    def _end_later(self, _user: weakref.ref[object]) -> None:
        if self.state != "abandoned":
            self.source.later(self.end)
        self._owned.discard(self)

    def _used_less(self) -> None:
        """A view died, in whatever thread: if it was the last to wait for, another thread does the work."""
        if self.state == "ending":
            self.source.later(self.end)


class Placing:
    """Maps extents at `offsets` of mapped memory as they come, in order, for one borrowing (a `Placement`)."""

    def __init__(self, memory: MappedMemory, offsets: Sequence[int]) -> None:
        self._memory = memory
        self._offsets = offsets
        self._ids: list[int] = []
        self._placed = 0

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        """Map the next extents."""
        first, self._placed = self._placed, self._placed + len(extent_ids)
        self._ids.extend(extent_ids)
        self._memory.region.bind_descriptors(self._offsets[first : self._placed], extent_ids, descriptors, extent_bytes)

    def undo(self) -> None:
        """Unmap them all. Nothing has used them yet, so there is no work to wait for. Safe to run again."""
        region = self._memory.region
        for offset in self._offsets[: self._placed]:
            if offset in region.extents:
                region.unbind(offset, region.extents[offset][1])
        region.forget(self._offsets[: self._placed])
        self._placed = 0

    def take_back(self) -> None:
        """Unmap them all, and release what the source still counts as lent. Safe to run again."""
        self.undo()
        self._memory.source.give_back(self._ids)


class Resource(Closing):
    """Something mapped in this process, until it is closed. A context manager."""

    _holding: MappedMemory

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._holding.closed

    def close(self) -> None:
        """Unmap all of it in this process and release it, addresses too. Idempotent.

        With living views, spans and tensors, or calls in other threads, it happens when the last of them has ended;
        else it waits for the work that this process has submitted to the device. When the broker is away it unmaps all
        the same, and raises nothing. Raises `DeviceFailure`; what could not be released then is held until it is closed
        again, or its client is.
        """
        with device_failures():
            self._holding.end()
