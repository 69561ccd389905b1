"""Requests for bytes: each is one object from its arrival to its answer, whichever call it came in.

Owns the state of a request, as `lifecycles.REQUEST` has it, and what is known about it while it waits. Must never
decide: `waiting` does, and asks `schedule` whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from . import events as ev
from . import lifecycles
from .denied import Denied
from .names import Location, ModelName

Debit = ev.Allocate | ev.Declare | ev.CreateSegment


class Kind(NamedTuple):
    """What is particular to one kind of request: why it is refused even if no other waits, and how it is granted."""

    refusal: Callable[[DebitRequest], Denied | None]
    """Return why it cannot be granted now, or None. It may bring `size` up to date."""
    grant: Callable[[DebitRequest, int], None]
    """Debit the books for it at this time, and answer it, or send out what answers it."""


@dataclass(slots=True, eq=False)
class DebitRequest:
    """A request that wants `size` bytes debited to a model. It came at `since`, in nanoseconds."""

    event: Debit
    name: ModelName
    size: int
    since: int
    kind: Kind

    state: str = "new"
    deadline: int | None = None
    """When its wait ends. None: it waits only until the inputs that were pending are read, or not at all."""
    guaranteed: bool = False
    """Whether it was within a guarantee when it began to wait."""
    why: Denied | None = None
    """The refusal that it would have got instead of the wait; None if there was room, and others came first."""
    met_full_device: bool = False
    """The books had room for it, but the device did not: it is tried again after an audit, and at its deadline."""
    has_turn: bool = False
    """Whether it is decided because its turn has come, and not because its wait ends."""
    waited: int = 0
    """How long it waited, in nanoseconds; set when it is decided."""

    @property
    def borrower(self) -> int | None:
        """The session, if the broker can ask for the bytes again at once: not of a segment or a declaration."""
        return self.event.session if isinstance(self.event, ev.Allocate) else None

    @property
    def wanted(self) -> int:
        """What its session says that it will want soon; at least `size`."""
        return max(self.size, self.event.wanted_bytes) if isinstance(self.event, ev.Allocate) else self.size

    @property
    def location(self) -> Location:
        """Where the bytes are to be."""
        return self.event.location

    @property
    def is_guest(self) -> bool:
        """Whether it is a declaration that can be recalled."""
        return isinstance(self.event, ev.Declare) and self.event.recallable

    @property
    def is_ahead(self) -> bool:
        """Whether nobody needs the bytes yet, so that it never waits and its refusal is not counted."""
        return isinstance(self.event, ev.Allocate) and self.event.ahead

    def move(self, cause: str) -> None:
        """Take the request one step along its lifecycle."""
        self.state = lifecycles.REQUEST[self.state][cause]


class Grant(NamedTuple):
    """The decision to debit the books for a request now."""


GRANT = Grant()


class Wait(NamedTuple):
    """The decision to let a request wait for `wait_ns`; 0: until the inputs that are pending are read.

    `why` is the refusal that it would get now; None: it has room, and others come first.
    """

    wait_ns: int
    guaranteed: bool
    why: Denied | None


class Refuse(NamedTuple):
    """The decision to refuse a request."""

    denied: Denied


Decision = Grant | Wait | Refuse
