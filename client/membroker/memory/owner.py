"""`MemoryOwner`: how a session and a `LocalSource` end, with all the memory that is mapped for them.

Owns the set of that memory, and the order of the end: first the memory, then the link to where it came from. The link
must never refer to the owner, so that an owner that is garbage ends by itself. In a forked child everything is dropped
without a lock or a call.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ..errors import ClosedError
from ..interrupts import uninterrupted
from ..reentry import in_a_finalizer, in_a_handler
from .lender import Tracked

logger: logging.Logger = logging.getLogger("membroker")


class OwnerLink(Protocol):
    """An owner's driver, and its thread or connection."""

    def later(self, work: Callable[[], None]) -> None:
        """Run `work` in the background thread. Finalizers call it: it takes no lock."""
        ...

    def end(self, *, wait: bool = True) -> None:
        """Close everything. Without `wait` the process is exiting."""
        ...

    def abandon(self) -> None:
        """In a forked child: close what was inherited."""
        ...


_L = TypeVar("_L", bound=OwnerLink)


class MemoryOwner(Generic[_L]):
    """Ends its memory, then its link: after `close`, when it is garbage, or at exit."""

    _name: ClassVar[str]
    """The user's word for it."""
    _instead: ClassVar[str]
    """What a forked child does instead of using it."""

    def __init__(self, link: _L) -> None:
        self._link = link
        self.later: Callable[[Callable[[], None]], None] = link.later
        """Run work in the background thread. Finalizers use this."""
        self._holdings: set[Tracked] = set()
        self._lock = threading.Lock()
        self._closed = self._closing = self._ended = self._forked = False
        self._forgotten = weakref.finalize(self, link.later, link.end)
        self._forgotten.atexit = False
        _living.add(self)

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this process was forked from the one that opened it."""
        return self._closed or self._forked

    def check_open(self) -> None:
        """Raise `ClosedError` if it is closed, or was inherited over a fork. Takes no lock."""
        if self._forked:
            why = f"belongs to the process that this one was forked from: {self._instead}"
            raise ClosedError(f"this {self._name} {why}")
        if self._closed:
            raise ClosedError(f"this {self._name} is closed")

    def track(self, memory: Tracked) -> None:
        """Let `close` end this memory. Raises `ClosedError`."""
        self.check_open()
        with self._lock:
            self.check_open()
            self._holdings.add(memory)

    def untrack(self, memory: Tracked) -> None:
        """Forget memory that was released. The last one ends a closed owner."""
        self._holdings.discard(memory)
        if self._closed and not (self._holdings or self._closing):
            self.later(self._end)

    def _close(self, *, wait: bool = True) -> None:
        """End all memory, and the link after the last. What fails is logged, and held until this is called again."""
        if self._forked or self._ended:  # in a forked child, a thread of the parent may have held the lock
            return
        if in_a_finalizer() or in_a_handler():
            self.later(lambda: self._close(wait=wait))
        else:
            uninterrupted(lambda: self._close_now(wait=wait))

    def _close_now(self, *, wait: bool) -> None:
        with self._lock:
            self._closed = self._closing = True  # so it is this thread that ends the link, and waits for that
        self._end_waits(wait=wait)
        for memory in list(self._holdings):
            try:
                memory.end()
            except Exception:
                logger.exception("could not release the memory of a closed %s", self._name)
        self._closing = False
        if not self._holdings:
            self._end(wait=wait)

    def _end_waits(self, *, wait: bool) -> None:
        """Let no call wait any longer for what will not come."""

    def _end(self, *, wait: bool = True) -> None:
        with self._lock:
            if self._ended or self._forked:
                return
            self._ended = True
        self._forgotten.detach()
        self._link.end(wait=wait)

    def abandon(self) -> None:
        """In a forked child: from now on this, and all its memory, raise `ClosedError`."""
        self._forked = True
        self._forgotten.detach()
        for memory in self._holdings:
            memory.abandon()
        self._link.abandon()


_living: weakref.WeakSet[MemoryOwner[Any]] = weakref.WeakSet()


def _close_all() -> None:
    for owner in list(_living):
        owner._close(wait=False)


def _abandon_all() -> None:
    for owner in list(_living):
        owner.abandon()
    _living.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
