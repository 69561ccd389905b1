"""Traffic: the calls of one session that bring descriptors, and the packets that they travel in.

Owns the states of packets. What a session has in flight is kept here and not in the ledger, because none of it
outlives the daemon. Must never decide what is lent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from . import effects as fx
from . import lifecycles, policy
from .denied import Denied
from .names import Location, ModelName
from .requests import DebitRequest


@dataclass(slots=True, eq=False)
class CallInFlight:
    """One call in flight that brings descriptors: its extents in packets, by part.

    If the last extent has another size (`last_bytes`), it is a packet of its own. `segment` is 0 for an Allocate;
    `sends` says that the segment exists, and is attached.
    """

    call: int
    request_id: int
    name: ModelName
    location: Location
    extent_bytes: int
    last_bytes: int
    ids: range
    on_done: Callable[[int, CallInFlight], None]
    """Answers the call, given its session, once every packet is decided."""
    segment: int = 0
    sends: bool = False
    result: fx.Allocated | None = None
    """The answer to an Allocate, if it succeeds."""
    request: DebitRequest | None = None
    """The request that made the debit; None for an attach, which makes none."""
    states: list[str] = field(init=False)
    stocked: set[int] = field(default_factory=set)
    issued: int = 0
    failure: Denied | None = None
    failed_at: int = 0

    def __post_init__(self) -> None:
        last_alone = self.last_bytes != self.extent_bytes
        self.states = ["waiting"] * (-(-(len(self.ids) - last_alone) // policy.PACKET_EXTENTS) + last_alone)

    def packet(self, part: int) -> tuple[range, int]:
        """Return the ids of a part, and the size of each of its extents."""
        if part < len(self.states) - 1:
            first = part * policy.PACKET_EXTENTS
            alike = len(self.ids) - (self.last_bytes != self.extent_bytes)
            return self.ids[first : min(first + policy.PACKET_EXTENTS, alike)], self.extent_bytes
        if self.last_bytes != self.extent_bytes:
            return self.ids[-1:], self.last_bytes
        return self.ids[part * policy.PACKET_EXTENTS :], self.extent_bytes

    def is_made(self, extent: int) -> bool:
        """Say whether this extent of the call, an Allocate, exists already."""
        return self.states[(extent - self.ids.start) // policy.PACKET_EXTENTS] not in ("waiting", "making")

    @property
    def any_sent(self) -> bool:
        """Whether the session may have seen a packet of it."""
        return "unacknowledged" in self.states or "delivered" in self.states

    def move(self, part: int, cause: str) -> None:
        """Take a packet one step along its lifecycle."""
        self.states[part] = lifecycles.PACKET[self.states[part]][cause]

    @property
    def done(self) -> bool:
        """Every packet has been made or given up."""
        return self.issued == len(self.states) and "making" not in self.states


@dataclass(slots=True)
class Traffic:
    """What one session has in flight. `calls` keeps answered calls until their last packet is acknowledged.

    `sent` counts the packets that were sent on this connection. `unacknowledged` holds those of them that are not
    acknowledged yet, by request id and part, each with its number in that order and its extents. `window` counts the
    extents of all packets that are being made or not acknowledged.
    """

    calls: dict[int, CallInFlight] = field(default_factory=dict)
    queue: deque[CallInFlight] = field(default_factory=deque)
    window: int = 0
    unanswered: set[int] = field(default_factory=set)
    sent: int = 0
    unacknowledged: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def take_off(self, request_id: int, part: int, cause: str) -> None:
        """Remove a sent packet from the window, and forget its call if nothing else is in flight of that."""
        call = self.calls[request_id]
        call.move(part, cause)
        _, count = self.unacknowledged.pop((request_id, part))
        self.window -= count
        if call.done and "unacknowledged" not in call.states:
            del self.calls[request_id]
