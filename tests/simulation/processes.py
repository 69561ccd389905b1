"""Who lives in the world, what travels to them, and the jobs of the driver's thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation.sharing import Dropping

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core.names import Location, ModelName, SegmentName


@dataclass(eq=False, slots=True)
class Packet:
    """A packet that was made. `place`: still in the broker's queue, in the socket, or read by the worker.

    `number` counts the packets of its connection, from 1.
    """

    make: fx.Make | fx.Send
    place: str
    number: int = 0


@dataclass(eq=False, slots=True)
class Process:
    """A process: `kept`, and `shared` of segments, is memory that it maps and of which its word says nothing."""

    name: str
    number: int
    kept: set[int] = field(default_factory=set)
    shared: list[int] = field(default_factory=list)
    alive: bool = True


@dataclass(eq=False, slots=True)
class Worker:
    """A session as its world sees it. `number` is the turn that began it."""

    session: int
    tenant: str
    process: Process
    number: int
    liar: bool
    connected: bool = True
    makes: list[fx.Make | fx.Send] = field(default_factory=list)
    sent: list[Packet] = field(default_factory=list)
    packets: int = 0
    """How many packets were sent on this connection."""
    held: set[int] = field(default_factory=set)
    unmapped: set[int] = field(default_factory=set)
    own: dict[Location, int] = field(default_factory=dict)
    """Memory that it allocated itself, as blocks of the world."""
    maps: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """What it has mapped of segments, by segment and the request that brought it."""
    lied: set[int] = field(default_factory=set)
    """Segments that it said it had unmapped, and has not."""
    manner: str = "deaf"
    """How it answers recalls: see `recalling`."""
    answers: set[ModelName] = field(default_factory=set)
    """The models of which it answers recalls."""
    recalls: dict[int, tuple[fx.SendRecall, int]] = field(default_factory=dict)
    """By number: what it is asked for, and when it means to answer."""
    is_guest: bool = False
    """What it declares can be recalled: see `hosting`."""
    requests: int = 0
    knows_token: bool = True
    """Its session can be resumed: the daemon lived long enough to say its token."""
    resuming: str = ""
    """On a new connection of which its session is not yet: `greeted`, then `stated` what it holds."""
    asked: dict[int, ev.Event] = field(default_factory=dict)
    """Its requests without an answer, by call."""
    brought: dict[int, set[int]] = field(default_factory=dict)
    """Extents that it read, by the request that brought them."""
    declared: dict[tuple[ModelName, Location], int] = field(default_factory=dict)
    """What it was told that it has declared."""
    flying: dict[int, ev.Event] = field(default_factory=dict)
    """Its requests that bring descriptors, answered or not, since its connection began."""
    inherited: bool = False
    """A daemon died since it had its session taken up."""
    undone: set[int] = field(default_factory=set)
    """Requests of which it never had the answer: what they brought it lets go of."""
    lost: list[ev.Event] = field(default_factory=list)
    """Those requests, to be made anew."""
    cut_names: list[SegmentName] = field(default_factory=list)
    """What it was creating when its connection ended."""
    stated: ev.StateHolds | None = None
    stated_requests: dict[int, list[int]] = field(default_factory=dict)
    """The requests by which it holds segments, as it stated them."""

    @property
    def settled(self) -> bool:
        """It knows what it holds, and nothing of it is being stated: it may let go of any."""
        return self.process.alive and not self.inherited and not self.resuming


@dataclass(frozen=True, slots=True)
class Look:
    """The driver is asked what the device shows: for an audit, or because this worker's process died."""

    dead: Worker | None


@dataclass(frozen=True, slots=True)
class Closing:
    """The driver's thread closes what the broker let go of its stock."""

    blocks: tuple[int, ...]


Job = fx.Make | fx.Send | fx.Seal | fx.Stock | Closing | Dropping | Look


@dataclass(frozen=True, slots=True)
class Found:
    """What the driver found, and when; `failure` is why nothing was made, or a segment not sealed."""

    job: Job
    at: int
    seen: ev.Seen | None = None
    failure: str | None = None
    block: int = 0
    """What was made for the stock."""
    lost: bool = False
    """Whether the device did not answer."""
