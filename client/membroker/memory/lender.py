"""Where a pool or a buffer gets its extents from: the contract between them and who lends.

Owns the protocols. A `Model` has a source (over the broker), a `LocalSource` is one; pools and buffers know nothing
else of either. It must never hold state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from ..vmm.driver import Driver, Location


class Tracked(Protocol):
    """Something mapped that its lender's client can end: when the client closes, or in a forked child."""

    abandoned: bool
    """Set in a forked child: the memory is the parent's."""

    def end(self) -> None:
        """Return all of it, now or when the last user is done. Raises `DriverError`; may be called again."""
        ...


class Placement(Protocol):
    """What a borrower does with extents as they come."""

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        """Map the next extents, in order. The descriptors are the source's, which closes them afterwards."""
        ...

    def undo(self) -> None:
        """Unmap all that was placed: after a failure, before the source gives back, or begins from the first one."""
        ...


class Source(Protocol):
    """Lends extents. Every method may be called from any thread."""

    @property
    def driver(self) -> Driver:
        """The device in which the extents are mapped."""
        ...

    def track(self, holding: Tracked) -> None:
        """Know of what is held of this source, so that a client that closes can end it."""
        ...

    def untrack(self, holding: Tracked) -> None:
        """Forget what was given back."""
        ...

    def borrow(self, extent_bytes: int, count: int, location: Location, placement: Placement) -> None:
        """Borrow `count` extents and place them, part by part.

        All or nothing: on any failure, of `placement` too, it calls `undo`, gives back everything and raises.
        """
        ...

    def charge(self, size: int, location: Location) -> None:
        """Be charged for `size` bytes that this process allocates itself. Raises `OutOfMemory`, changing nothing."""
        ...

    def credit(self, size: int, location: Location) -> None:
        """Be charged for `size` bytes less, which are freed. Raises nothing when the lender is gone."""
        ...

    def give_back(self, extent_ids: Sequence[int]) -> None:
        """Give extents back that are unmapped. Raises nothing when the lender is gone: so are its books."""
        ...

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` soon, in another thread. May be called by a finalizer, so it takes no lock and sends nothing."""
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
