"""What a session holds, as a new broker has to be told: extents, segments, declarations, and its models.

Owns the list, and the frames that state it. It is written at the end of each call, before its caller has the result,
and at each give-back, before the broker hears of it. It must never know where a thing is mapped, or by whom.
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
class Held:
    """What a session holds at one moment; `segments` by generation, with how many times, declarations in bytes."""

    extents: frozenset[int] = frozenset()
    segments: Counter[int] = field(default_factory=Counter)
    declarations: Declarations = field(default_factory=dict)

    def minus(self, other: Held) -> Held:
        """Return the extents and segments that the other has not."""
        return Held(self.extents - other.extents, self.segments - other.segments)

    def lowered_to(self, now: Held) -> Declarations:
        """Return the declarations of this that are less now, as they are now."""
        return {key: less for key, size in self.declarations.items() if (less := now.declarations.get(key, 0)) < size}

    def without(self, extents: Iterable[int], generations: Iterable[int]) -> Held:
        """Return this without what a broker does not know."""
        unknown = set(generations)
        known = Counter({generation: times for generation, times in self.segments.items() if generation not in unknown})
        return Held(self.extents.difference(extents), known, self.declarations)

    def is_empty(self) -> bool:
        """Say whether there is neither an extent nor a segment."""
        return not self.extents and not self.segments

    def frames(self) -> Iterator[pb.Holds]:
        """Yield what states it all; the last one says that it is."""
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


class Registry:
    """The list of one session. Thread-safe; no step of it loops over extents in Python, it stands at each allocation.

    `models` are the names of the models that the session has registered, and not left, with how many times.
    """

    def __init__(self) -> None:
        self.models: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._extents: set[int] = set()
        self._segments: Counter[int] = Counter()
        self._declarations: Declarations = {}

    def registered(self, model: str) -> None:
        """Enter one registration of a model."""
        with self._lock:
            self.models[model] += 1

    def strike_registration(self, model: str) -> bool:
        """Strike one registration of a model, but not the last one; say whether there is only that one."""
        with self._lock:
            times = self.models[model]
            if times > 1:
                self.models[model] -= 1
        return times == 1

    def left(self, model: str) -> None:
        """Strike a model."""
        with self._lock:
            del self.models[model]

    def borrowed(self, extent_ids: Iterable[int]) -> None:
        """Enter extents."""
        with self._lock:
            self._extents.update(extent_ids)

    def attached(self, generation: int) -> None:
        """Enter one hold of a segment."""
        with self._lock:
            self._segments[generation] += 1

    def declared(self, request: broker_pb2.DeclareMemoryRequest) -> None:
        """Enter a declaration in the place of the one before."""
        with self._lock:
            self._declarations[request.model, request.location] = request.declared_bytes
            if not request.declared_bytes:
                del self._declarations[request.model, request.location]

    def strike_extents(self, extent_ids: Sequence[int]) -> Sequence[int]:
        """Strike extents that are given back, and return those that were there: the broker is to be told of them."""
        with self._lock:
            if not self._extents.issuperset(extent_ids):
                extent_ids = [extent_id for extent_id in extent_ids if extent_id in self._extents]
            self._extents.difference_update(extent_ids)
        return extent_ids

    def strike_segment(self, generation: int) -> bool:
        """Strike one hold of a segment; say whether it was there."""
        with self._lock:
            if not self._segments[generation]:
                return False
            self._segments -= Counter((generation,))
        return True

    def forget(self, extent_ids: Iterable[int], generations: Iterable[int]) -> None:
        """Strike what the broker does not know, every hold of it."""
        with self._lock:
            self._extents.difference_update(extent_ids)
            for generation in generations:
                del self._segments[generation]

    def held(self) -> Held:
        """Return what is held now."""
        with self._lock:
            return Held(frozenset(self._extents), Counter(self._segments), dict(self._declarations))


def _portions(entries: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for first in range(0, len(entries), size):
        yield entries[first : first + size]
