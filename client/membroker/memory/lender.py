"""The contracts between memory (pools, buffers, arrays) and the source that lends its extents.

Owns the protocols. A `Model` has a source (over the broker), and a `LocalSource` is one. Pools and buffers use both
only through these protocols. It must never hold state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from ..vmm.driver import Driver, Location


class Tracked(Protocol):
    """Mapped memory that its owner can end: when the client closes, or in a forked child."""

    def end(self) -> None:
        """Release all of it, now or when its last use ends. Raises `DriverError`. Calling it again is safe."""
        ...

    def abandon(self) -> None:
        """In a forked child: mark the memory as the parent's, so that it is never touched here. Takes no lock."""
        ...

    def give_spare(self, size: int, is_asked_for: Callable[[int], bool]) -> None:
        """Release up to `size` bytes, in whole pages, of those that no work on the device can use; never wait for it.

        Releases nothing if `is_asked_for` is false for their extents, which are all of one kind.
        """
        ...


class Placement(Protocol):
    """Receives the extents of one borrowing as they arrive."""

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        """Map the next extents, in order. The source owns the descriptors and closes them afterwards."""
        ...

    def undo(self) -> None:
        """Unmap all extents that were placed. After a failure, the source calls it before it releases or retries."""
        ...


class Owner(Protocol):
    """The owner of mapped memory: a client, or a `LocalSource`. Every method may be called from any thread."""

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
        """Release extents that are unmapped. Ignores those that are released already.

        Raises nothing when the broker is gone, because its books are gone too.
        """
        ...

    def interrupted(self) -> None:
        """Reconcile with the broker after an interrupt has left a call half done. Raises nothing."""
        ...

    def later(self, work: Callable[[], None]) -> None:
        """Run `work` soon, in another thread. Finalizers call this, so it takes no lock and sends nothing."""
        ...


class Source(Owner, Protocol):
    """An owner that lends extents."""

    def borrow(
        self,
        extent_bytes: int,
        count: int,
        location: Location,
        placement: Placement,
        until: float | None,
        *,
        ahead: bool = False,
        wanted_bytes: int = 0,
    ) -> None:
        """Borrow `count` extents of `extent_bytes` each, and place them in packets.

        A broker that has no room lets the call wait `until` then (on the monotonic clock; None: as long as its rules
        say). A source without a broker does not wait. What is borrowed `ahead` of need never waits, and is refused if
        anybody else waits. `wanted_bytes` is what the caller will want soon, this call included: a guess, or 0.

        All or nothing: after any failure, also one of `placement`, it calls `undo`, releases everything and raises.
        """
        ...

    def charge(self, size: int, location: Location) -> None:
        """Charge `size` bytes that this process allocates itself. Raises `OutOfMemory`, and nothing is charged then."""
        ...

    def credit(self, size: int, location: Location) -> None:
        """Credit `size` bytes that this process has freed. Raises nothing when the broker is gone."""
        ...


class Lender(Protocol):
    """The object through which users know a source: a `Model`."""

    @property
    def driver(self) -> Driver:
        """The device in which the extents are mapped."""
        ...

    @property
    def source(self) -> Source:
        """The source itself."""
        ...


def source_of(lender: Source | Lender) -> Source:
    """Return the source of a lender, or the source itself if it is one."""
    return cast("Source", getattr(lender, "source", lender))


def lender_of(source: Source | Lender) -> Source | Lender:
    """Return the lender of a source that counts what another one lends, or else `source` itself."""
    return cast("Source | Lender", getattr(source, "lender", source))
