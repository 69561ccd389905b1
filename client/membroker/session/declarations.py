"""What a session declares: bytes that this process allocates itself, and is charged for.

Owns two figures of each model and location: what the user has said, and what the library holds on its own account
(pages that pools have offloaded). The broker knows their sum only, and each declaration states all of it, so they are
made one after another. It must never be asked under a pool's lock: a declaration is a call, and may wait for a broker.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import InvalidRequest
from ..v1 import broker_pb2 as pb
from ..vmm.driver import Location
from ..vmm.sizes import MAX_BYTES
from .messages import location_to_wire
from .transport import Transport, broker_may_be_gone

_Key = tuple[str, Location]
"""A model's resource name, and a location."""


class Declarations:
    """The declarations of one session. Sizes are in bytes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._said: Counter[_Key] = Counter()
        self._held: Counter[_Key] = Counter()
        # Of which the broker may believe more than is true.
        self._less: set[_Key] = set()

    def say(self, model: str, location: Location, size: int) -> None:
        """Take the user's figure in the place of the one before. Raises `OutOfMemory`, and then that one stays."""
        key = (model, location)
        with self._declaring():
            self._declare(key, size, self._held[key])
            self._said[key] = size

    def add(self, model: str, location: Location, size: int) -> None:
        """Be charged for `size` bytes more. Raises `OutOfMemory`, and nothing has changed then."""
        key = (model, location)
        with self._declaring():
            self._declare(key, size, self._said[key] + self._held[key])
            with self._lock:
                self._held[key] += size

    def end(self, model: str, location: Location, size: int) -> None:
        """Be charged for `size` bytes less, of those that were added. Waits for no broker that is gone.

        Nor for a thread that does: that one tells it behind what it declares.
        """
        key = (model, location)
        with self._lock:
            self._held[key] -= size
        self._less.add(key)
        self._tell_less()

    @contextmanager
    def _declaring(self) -> Iterator[None]:
        try:
            with self._turn:
                yield
        finally:
            self._tell_less()

    def _declare(self, key: _Key, size: int, beside: int) -> None:
        if size > MAX_BYTES - beside:
            raise InvalidRequest(f"{size} bytes beside {beside} that are declared already are more than 2^63-1")
        try:
            self._transport.declare(_request(key, size + beside))
        except KeyboardInterrupt:
            # The broker may agree all the same.
            self._less.add(key)
            raise

    def _tell_less(self) -> None:
        """Tell the broker of what is less now, or leave it to the thread whose turn it is: it comes by here next."""
        while self._less and self._turn.acquire(blocking=False):
            try:
                for key in tuple(self._less):
                    self._less.discard(key)
                    with broker_may_be_gone():
                        self._transport.declare_less(_request(key, self._said[key] + self._held[key]))
            finally:
                self._turn.release()


def _request(key: _Key, size: int) -> pb.DeclareMemoryRequest:
    model, location = key
    return pb.DeclareMemoryRequest(model=model, location=location_to_wire(location), declared_bytes=size)
