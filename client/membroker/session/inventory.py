"""What a session holds, as a resume states it to the broker: extents, segments and declarations; and its models.

Owns the list, and the frames that state it. It is written at the end of each call, before the caller has the result,
and at each release, before the broker hears of it. It must never know where anything is mapped.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..v1 import broker_pb2, resources_pb2
from ..v1 import handoff_pb2 as pb
from ..wire.names import MAX_IDS_PER_FRAME

_T = TypeVar("_T")
Declarations = dict[tuple[str, resources_pb2.Location.ValueType], int]
"""Bytes by the model's name and the location."""

SEGMENTS_PER_FRAME = 1024
DECLARATIONS_PER_FRAME = 128
"""A frame has 65,536 bytes, and the name of a model up to 160."""


@dataclass(frozen=True, slots=True)
class HeldResources:
    """What a session holds at one moment: `segments` by generation, with the number of holds; declarations in bytes."""

    extents: frozenset[int] = frozenset()
    segments: Counter[int] = field(default_factory=Counter)
    declarations: Declarations = field(default_factory=dict)

    def minus(self, other: HeldResources) -> HeldResources:
        """Return the extents and segments that are in this and not in `other`."""
        return HeldResources(self.extents - other.extents, self.segments - other.segments)

    def lowered_to(self, now: HeldResources) -> Declarations:
        """Return the current figure of each declaration that has become smaller."""
        return {key: less for key, size in self.declarations.items() if (less := now.declarations.get(key, 0)) < size}

    def without(self, extents: Iterable[int], generations: Iterable[int]) -> HeldResources:
        """Return this without extents and segments that the broker does not know."""
        unknown = set(generations)
        known = Counter({generation: times for generation, times in self.segments.items() if generation not in unknown})
        return HeldResources(self.extents.difference(extents), known, self.declarations)

    def is_empty(self) -> bool:
        """Say whether there is neither an extent nor a segment."""
        return not self.extents and not self.segments

    def frames(self) -> Iterator[pb.Holds]:
        """Yield the frames that state all of it; the last one is marked."""
        for extents in _portions(sorted(self.extents), MAX_IDS_PER_FRAME):
            yield pb.Holds(extent_ids=extents)
        held = [pb.HeldSegment(generation=generation, times=times) for generation, times in self.segments.items()]
        for segments in _portions(held, SEGMENTS_PER_FRAME):
            yield pb.Holds(segments=segments)
        declared = [
            pb.HeldDeclaration(model=model, location=location, declared_bytes=declared_bytes)
            for (model, location), declared_bytes in self.declarations.items()
        ]
        for declarations in _portions(declared, DECLARATIONS_PER_FRAME):
            yield pb.Holds(declarations=declarations)
        yield pb.Holds(last=True)


class Inventory:
    """The list of one session. Thread-safe. Part of every allocation, so no step loops over extents in Python.

    `models` are the names of the models that the session has registered and not left, with how many times.
    """

    def __init__(self) -> None:
        self.models: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._extents: set[int] = set()
        self._segments: dict[int, int] = {}
        """The generation that each hold is of, by the request that took the hold."""
        self._declarations: Declarations = {}

    def registered(self, model: str) -> None:
        """Enter one registration of a model."""
        with self._lock:
            self.models[model] += 1

    def strike_registration(self, model: str) -> bool:
        """Remove one registration of a model, but not the last one; say whether there is only one."""
        with self._lock:
            times = self.models[model]
            if times > 1:
                self.models[model] -= 1
        return times == 1

    def left(self, model: str) -> None:
        """Remove a model."""
        with self._lock:
            del self.models[model]

    def borrowed(self, extent_ids: Iterable[int]) -> None:
        """Enter extents."""
        with self._lock:
            self._extents.update(extent_ids)

    def attached(self, request_id: int, generation: int) -> None:
        """Enter the hold of a segment that a request took."""
        with self._lock:
            self._segments[request_id] = generation

    def declared(self, request: broker_pb2.DeclareMemoryRequest) -> None:
        """Enter a declaration, which replaces the one before."""
        with self._lock:
            self._declarations[request.model, request.location] = request.declared_bytes
            if not request.declared_bytes:
                del self._declarations[request.model, request.location]

    def strike_extents(self, extent_ids: Sequence[int]) -> Sequence[int]:
        """Remove extents that are released. Return those that were there: the broker must be told of them."""
        with self._lock:
            if not self._extents.issuperset(extent_ids):
                extent_ids = [extent_id for extent_id in extent_ids if extent_id in self._extents]
            self._extents.difference_update(extent_ids)
        return extent_ids

    def strike_segment(self, generation: int) -> bool:
        """Remove one hold of a segment; say whether there was one."""
        with self._lock:
            holds = (request_id for request_id, held in self._segments.items() if held == generation)
            request_id = next(holds, None)
            if request_id is not None:
                del self._segments[request_id]
        return request_id is not None

    def strike_call(self, request_id: int, extent_ids: Iterable[int]) -> None:
        """Remove what a call has brought, if that was entered already."""
        with self._lock:
            self._segments.pop(request_id, None)
            self._extents.difference_update(extent_ids)

    def forget(self, extent_ids: Iterable[int], generations: Iterable[int]) -> None:
        """Remove extents, and every hold of segments, that the broker does not know."""
        unknown = set(generations)
        with self._lock:
            self._extents.difference_update(extent_ids)
            for request_id in [one for one, generation in self._segments.items() if generation in unknown]:
                del self._segments[request_id]

    def held(self) -> HeldResources:
        """Return what is held now."""
        with self._lock:
            return HeldResources(frozenset(self._extents), Counter(self._segments.values()), dict(self._declarations))


def _portions(entries: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for first in range(0, len(entries), size):
        yield entries[first : first + size]
