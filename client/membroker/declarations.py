"""What a session declares: bytes that this process allocates itself, and is charged for.

Owns two figures of each model and location: what the user has said, and what the library holds on its own account
(pages that pools have offloaded). The broker knows their sum only, and each declaration states all of it, so they are
made one after another. It must never be asked under a pool's lock: a declaration is a call, and may wait for a broker.
"""

from __future__ import annotations

import threading
from collections import Counter

from membroker.convert import location_to_wire
from membroker.errors import InvalidRequest
from membroker.interrupts import HeldOff
from membroker.transport import Transport
from membroker.v1 import broker_pb2 as pb
from membroker.vmm.driver import Location
from membroker.vmm.sizes import MAX_BYTES

_Key = tuple[str, Location]
"""A model's resource name, and a location."""


class Declarations:
    """The declarations of one session. Sizes are in bytes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._said: Counter[_Key] = Counter()
        self._held: Counter[_Key] = Counter()

    def say(self, model: str, location: Location, size: int) -> None:
        """Take the user's figure in the place of the one before. Raises `OutOfMemory`, and then that one stays."""
        key = (model, location)
        with HeldOff(), self._lock:
            self._declare(key, size, self._held[key])
            self._said[key] = size

    def add(self, model: str, location: Location, size: int) -> None:
        """Be charged for `size` bytes more. Raises `OutOfMemory`, and nothing has changed then."""
        key = (model, location)
        with HeldOff(), self._lock:
            self._declare(key, size, self._said[key] + self._held[key])
            self._held[key] += size

    def end(self, model: str, location: Location, size: int) -> None:
        """Be charged for `size` bytes less, of those that were added. Waits for no broker that is gone."""
        key = (model, location)
        with HeldOff(), self._lock:
            self._held[key] -= size
            self._transport.declare_less(_request(key, self._said[key] + self._held[key]))

    def _declare(self, key: _Key, size: int, beside: int) -> None:
        if size > MAX_BYTES - beside:
            raise InvalidRequest(f"{size} bytes beside {beside} that are declared already are more than 2^63-1")
        self._transport.declare(_request(key, size + beside))


def _request(key: _Key, size: int) -> pb.DeclareMemoryRequest:
    model, location = key
    return pb.DeclareMemoryRequest(model=model, location=location_to_wire(location), declared_bytes=size)
