"""Where a pool or a buffer gets its extents from: the contracts between them and what lends.

Owns the protocols. A `Model` has a source (over the broker), a `LocalSource` is one; pools and buffers know nothing
else of either. It must never hold state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from ..vmm.driver import Driver, Location


class Tracked(Protocol):
    """Something mapped that its owner can end: when the client closes, or in a forked child."""

    def end(self) -> None:
        """Release all of it, now or when the last user is done. Raises `DriverError`; may be called again."""
        ...

    def abandon(self) -> None:
        """In a forked child: never touch the memory again, which is the parent's. Takes no lock."""
        ...


class Placement(Protocol):
    """What a borrower does with extents as they come."""

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        """Map the next extents, in order. The descriptors are the source's, which closes them afterwards."""
        ...

    def undo(self) -> None:
        """Unmap all that was placed: after a failure, before the source releases, or starts again with the first."""
        ...


class Owner(Protocol):
    """What mapped memory belongs to: a client, or a `LocalSource`. Every method may be called from any thread."""

    @property
    def driver(self) -> Driver:
        """The device in which the extents are mapped."""
        ...

    def track(self, memory: Tracked) -> None:
        """Let the owner's `close` end this memory. Raises `ClosedError`."""
        ...

    def untrack(self, memory: Tracked) -> None:
        """Forget memory that was released."""
        ...

    def give_back(self, extent_ids: Sequence[int]) -> None:
        """Release extents that are unmapped; those that are released already are passed over.

        Raises nothing when the broker is gone, because its books are gone too.
        """
        ...

    def interrupted(self) -> None:
        """Agree with the broker again on what is held: an interrupt has left a call half done. Raises nothing."""
        ...

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` soon, in another thread. May be called by a finalizer, so it takes no lock and sends nothing."""
        ...


class Source(Owner, Protocol):
    """An owner that lends extents."""

    def borrow(self, extent_bytes: int, count: int, location: Location, placement: Placement) -> None:
        """Borrow `count` extents and place them, part by part.

        All or nothing: on any failure, of `placement` too, it calls `undo`, releases everything and raises.
        """
        ...

    def charge(self, size: int, location: Location) -> None:
        """Be charged for `size` bytes that this process allocates itself. Raises `OutOfMemory`, changing nothing."""
        ...

    def credit(self, size: int, location: Location) -> None:
        """Be charged for `size` bytes less, which are freed. Raises nothing when the broker is gone."""
        ...


class Lender(Protocol):
    """What users know a source by: a `Model`."""

    @property
    def driver(self) -> Driver:
        """The device in which the extents are mapped."""
        ...

    @property
    def _as_source(self) -> Source: ...


def source_of(lender: Source | Lender) -> Source:
    """Return the source itself."""
    return cast("Source", getattr(lender, "_as_source", lender))
