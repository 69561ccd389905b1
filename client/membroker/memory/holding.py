"""`Holding`: what one pool or one buffer holds, and how all of it is given back, exactly once.

Owns a region, the ids of the extents in it, and the count of who still uses it: calls that run, and views that
live. It outlives the pool or buffer that the user sees, and must never refer to it: a finalizer gives it back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from ..closing import Closing
from ..errors import ClosedError
from ..interrupts import HeldOff, let_through
from .lender import Lender, Source, source_of
from .region import Region, device_failures
from .views import Span, Views


class Holding:
    """A region of `size` bytes, at a multiple of `alignment`, and the extents in it, `extents` by offset in bytes.

    `end` gives everything back as soon as nobody uses it. After a fork the child's copy is `abandoned`: it
    belongs to the parent, and touching its lock could wait for ever.
    """

    _owned: ClassVar[set[Holding]] = set()
    """Those whose owner lives: one that is garbage together with its owner must still be there to end."""
    _unended: ClassVar[set[Holding]] = set()
    """Those whose end has failed, until it succeeds: what is mapped must not be forgotten."""

    def __init__(self, source: Source | Lender, size: int, what: str, alignment: int = 0) -> None:
        source = self.source = source_of(source)
        self.what = what
        self._driver = source.driver
        self.views = Views(self, Holding._used_less)
        self.extents: dict[int, int] = {}
        self.beside: Callable[[], None] | None = None
        """What ends with it; called again after a failure."""
        self.abandoned = False
        self._lock = threading.Lock()
        self._uses: set[object] = {self}  # until it is made: a source that closes meanwhile leaves the end to this
        self._ending = False
        self._ended = False
        self._owner: weakref.ref[object] | None = None
        source.track(self)
        try:
            self.region = Region(self._driver, size, alignment)
        except BaseException:
            self._ended = True
            source.untrack(self)
            raise
        self.finish(self)
        if self._ending:
            raise ClosedError(f"this {what} was not made: its client, or its source, was closed meanwhile")

    def owned_by(self, owner: object) -> None:
        """End when `owner`, the object that the user has, is garbage. At exit the client does it in order."""
        # What `weakref.finalize` does, in 0.3 us instead of 1.5, with its end.
        self._owner = weakref.ref(owner, self._end_later)
        self._owned.add(self)

    def _end_later(self, _owner: weakref.ref[object]) -> None:
        self.source.later(self.end)
        self._owned.discard(self)

    def check_open(self) -> None:
        """Raise `ClosedError` when this is given back, or inherited over a fork. Takes no lock."""
        if self.abandoned:
            raise ClosedError(f"this {self.what} belongs to the process that this one was forked from")
        if self._ending:
            raise ClosedError(f"this {self.what} is closed")

    @property
    def closed(self) -> bool:
        """Whether this is given back, or will be when the last view of it is gone."""
        return self._ending or self.abandoned

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold off the end during a call.

        A generator, though it costs a microsecond: an interrupt between its beginning and the block still ends it.
        """
        use = object()
        try:
            self.begin(use)
            yield
        finally:
            # No `finish`: before the first line of a function an interrupt may strike.
            self._uses.discard(use)
            if self._ending:
                self.end()

    def begin(self, use: object) -> None:
        """Hold off the end until `finish`, whatever comes of this. For who holds off interrupts, without the generator.

        A use is a thing that is there or not, and no count: an interrupt may strike behind the `with`.
        """
        self.check_open()
        with self._lock:
            self.check_open()
            self._uses.add(use)

    def finish(self, use: object) -> None:
        """End a use, whether it had begun or not."""
        self._uses.discard(use)
        if self._ending:
            self.end()

    def span(self, keeper: object, offset: int, size: int, *, writable: bool = True) -> Span:
        """Hold off the end as long as the result lives, which keeps `keeper`. Raises `ClosedError`."""
        with self.in_use():
            address = self.region.address + offset
            return self.views.count(Span(keeper, address, size, self.source.driver.device, writable))

    def end(self) -> None:
        """Give everything back, now, or once the last call has returned and the last view is gone.

        What the driver fails to give back, which raises `DriverError`, is held still: to end it again tries again.
        """
        if self.abandoned:
            return
        with HeldOff():
            if self._is_last():
                self._give_back()

    def _is_last(self) -> bool:
        """Say, once, that nobody uses this any more."""
        with self._lock:
            self._ending = True
            self._ended, was_ended = self._ended or not (self._uses or self.views.any()), self._ended
            return self._ended and not was_ended

    def _give_back(self) -> None:
        try:
            self._give_extents_back()
            if self.beside is not None:
                self.beside()
            self.region.close()
        except BaseException:
            self._unended.add(self)
            self._ended = False
            raise
        # Whoever was closed need not wake the background thread when it is garbage: that costs the next call 50 us.
        self._owner = None
        self._owned.discard(self)
        self._unended.discard(self)
        for one in list(self._unended):  # the driver gives memory back again
            one.source.later(one.end)
        self.beside = None
        self.source.untrack(self)

    def _give_extents_back(self) -> None:
        if not self.extents:
            return
        self._driver.synchronize()
        try:
            self.region.clear()
        finally:
            # Every one, unless the driver has failed on the way.
            held, region = self.extents, self.region
            gone = [extent for offset, extent in held.items() if offset not in region]
            self.extents = {offset: extent for offset, extent in held.items() if offset in region}
            if gone:
                self.source.give_back(gone)

    def _used_less(self) -> None:
        """A view died, in whatever thread: if it was the last to wait for, another thread does the work."""
        if self._ending and not self.abandoned:
            self.source.later(self.end)


class Placing:
    """Maps extents side by side from `offset` on, as they come, and remembers them (a `Placement`)."""

    def __init__(self, region: Region, offset: int) -> None:
        self._region = region
        self._start = offset
        self._end = offset
        self.extents: dict[int, int] = {}

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        """Map the extents behind the ones before them. Ctrl-C ends the borrowing here, and all of it is undone."""
        end = self._end + self._region.bind_descriptors(self._end, descriptors, extent_bytes)
        self.extents.update(zip(range(self._end, end, extent_bytes), extent_ids, strict=True))
        self._end = end
        let_through()

    def undo(self) -> None:
        """Unmap them all. Nobody has used them yet, so there is no work to wait for."""
        if self._end > self._start:
            self._region.unbind(self._start, self._end - self._start)
            self._end = self._start
            self.extents.clear()


class Held(Closing):
    """Something mapped in this process, until it is closed. A context manager."""

    _holding: Holding

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._holding.closed

    def close(self) -> None:
        """Unmap all of it in this process and give it back, addresses too. Idempotent.

        With living views, spans and tensors, or calls in other threads, it happens when the last of them has ended;
        else it waits for the work that this process has given to the device. When the broker is away it unmaps all the
        same, and raises nothing. Raises `DeviceFailure`; what could not be given back then is held until it is closed
        again, or its client is.
        """
        with device_failures():
            self._holding.end()
