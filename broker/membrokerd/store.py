"""The descriptor store: where segments' descriptors are kept, so that segments outlive whoever wrote them.

One small interface, because descriptors must outlive this process too, one day: then another process holds copies, and
`keep` is over when that one has them. Nothing of a segment is delivered before. Decides nothing about memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class DescriptorStore(Protocol):
    """Keeps descriptors of extents by segment and id. Not thread-safe: it belongs to the event loop's thread."""

    def keep(
        self, segment: int, ids: Sequence[int], descriptors: Sequence[int], done: Callable[[OSError | None], None]
    ) -> None:
        """Take these descriptors over, and call `done` once they are safe, or with why they cannot be.

        In the latter case they are still the caller's.
        """
        ...

    def lend(self, segment: int, ids: Sequence[int]) -> list[int]:
        """Return the descriptors of these extents. They stay the store's; KeyError where it has none."""
        ...

    def give_up(self, segment: int, ids: Sequence[int] | None = None) -> list[int]:
        """Forget a segment, or these extents of it; return the descriptors there were, the caller's to close."""
        ...

    def __len__(self) -> int:
        """Return how many descriptors are kept."""
        ...


class MemoryStore:
    """Keeps them in this process: they end with it."""

    def __init__(self) -> None:
        self._segments: dict[int, dict[int, int]] = {}

    def keep(
        self, segment: int, ids: Sequence[int], descriptors: Sequence[int], done: Callable[[OSError | None], None]
    ) -> None:
        """Take these descriptors over; never fails."""
        self._segments.setdefault(segment, {}).update(zip(ids, descriptors, strict=True))
        done(None)

    def lend(self, segment: int, ids: Sequence[int]) -> list[int]:
        """Return the descriptors of these extents."""
        kept = self._segments[segment]
        return [kept[extent] for extent in ids]

    def give_up(self, segment: int, ids: Sequence[int] | None = None) -> list[int]:
        """Forget a segment, or these extents of it, and return the descriptors there were."""
        if ids is None:
            return list(self._segments.pop(segment, {}).values())
        kept = self._segments.get(segment, {})
        return [kept.pop(extent) for extent in ids if extent in kept]

    def close(self) -> list[int]:
        """Forget everything, and return every descriptor."""
        return [descriptor for segment in list(self._segments) for descriptor in self.give_up(segment)]

    def __len__(self) -> int:
        """Return how many descriptors are kept."""
        return sum(map(len, self._segments.values()))
