"""What a session declares: bytes that this process allocates itself, and is charged for.

Owns two figures of each model and location: what the user has said, and what the library holds itself (pages that
pools have offloaded). The broker knows their sum only, and each declaration states all of it, so they are made one
after another. A pool must never call this under its lock: a declaration is a call, and may wait for a broker.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from contextlib import suppress
from functools import partial

from ..errors import InvalidRequest
from ..v1 import broker_pb2 as pb
from ..v1.handoff_pb2 import Frame
from ..vmm.driver import Location
from ..vmm.sizes import MAX_BYTES
from .messages import LOCATION_NUMBERS
from .reconnecting import ReconnectingConnection

_Key = tuple[str, Location]
"""A model's resource name, and a location."""


class Declarations:
    """The declarations of one session. Sizes are in bytes."""

    def __init__(self, connection: ReconnectingConnection) -> None:
        self._connection = connection
        # An RLock: a thread that does not have it cannot release it, and gets an error instead.
        self._turn = threading.RLock()
        self._said: Counter[_Key] = Counter()
        self._held: Counter[_Key] = Counter()
        self._guests: set[_Key] = set()
        """Where the declaration can be recalled, as the user has said."""
        self._ended: deque[tuple[_Key, int]] = deque()
        """Bytes that are not held any more. The thread that has the turn tells the broker."""

    def say(
        self, model: str, location: Location, size: int, *, recallable: bool = False, until: float | None = None
    ) -> None:
        """Replace the user's figure, and say whether it can be recalled. Raises `OutOfMemory`; all is as before then.

        The broker lets it wait for memory until that time on the monotonic clock; None: it does not wait.
        """
        key = (model, location)
        try:
            with self._turn:
                before = key in self._guests
                (self._guests.add if recallable else self._guests.discard)(key)
                try:
                    self._declare(key, size, self._held[key], until)
                except BaseException:
                    (self._guests.add if before else self._guests.discard)(key)
                    raise
                self._said[key] = size
        finally:
            self._tell_less()

    def add(self, model: str, location: Location, size: int) -> None:
        """Be charged for `size` bytes more. Raises `OutOfMemory`, and nothing has changed then."""
        key, added = (model, location), 0
        try:
            with self._turn:
                self._declare(key, size, self._said[key] + self._held[key])
                self._held[key] += size
                added = size
            self._tell_less()
        except BaseException:
            if added:  # an interrupt came after the answer
                self._ended.append((key, added))
            self._tell_less()
            raise

    def end(self, model: str, location: Location, size: int) -> None:
        """Stop being charged for `size` bytes that were added. Does not wait for a broker that is gone.

        Nor does it wait for another thread that waits for a broker: that thread tells the broker of these bytes, too,
        after its own declaration.
        """
        self._ended.append(((model, location), size))
        self._tell_less()

    def _declare(self, key: _Key, size: int, others: int, until: float | None = None) -> None:
        if size > MAX_BYTES - others:
            raise InvalidRequest(f"{size} bytes and {others} that are declared already are more than 2^63-1")
        request = self._request(key, size + others)
        note = partial(self._connection.inventory.declared, request)
        try:
            self._connection.call(Frame(declare=request), note=note, until=until)
        except Exception:
            raise
        except BaseException:
            self._ended.append((key, 0))  # the broker may have agreed: declare again what is true
            raise

    def _tell_less(self) -> None:
        """Declare what has become less, unless another thread has the turn: that thread does so before it returns."""
        while self._ended:
            try:
                if not self._turn.acquire(blocking=False):
                    return
                less = set()
                while self._ended:
                    key, size = self._ended[0]
                    self._held[key] -= size
                    del self._ended[0]
                    less.add(key)
                for key in less:
                    request = self._request(key, self._said[key] + self._held[key])
                    self._connection.say_less(
                        Frame(declare=request), partial(self._connection.inventory.declared, request)
                    )
            finally:
                with suppress(RuntimeError):
                    self._turn.release()

    def _request(self, key: _Key, size: int) -> pb.DeclareMemoryRequest:
        model, location = key
        return pb.DeclareMemoryRequest(
            model=model, location=LOCATION_NUMBERS[location], declared_bytes=size, recallable=key in self._guests
        )
