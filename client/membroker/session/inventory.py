"""What a session holds, as a resume states it to the broker: extents, segments and declarations; and its models.

It also counts what was released of each model, which tells how much of a recall remains.

Owns the list, and the frames that state it. It is written at the end of each call, before the caller has the result,
and at each release, before the broker hears of it. It must never know where anything is mapped.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, repeat
from typing import TypeVar

from ..v1 import broker_pb2, resources_pb2
from ..v1 import handoff_pb2 as pb
from ..wire.names import MAX_IDS_PER_FRAME

_T = TypeVar("_T")
Declarations = dict[tuple[str, resources_pb2.Location.ValueType], int]
"""Bytes by the model's name and the location."""
Kind = tuple[str, resources_pb2.Location.ValueType, int]
"""Of an extent: the model's name, the location, and its bytes."""

SEGMENTS_PER_FRAME = 1024
DECLARATIONS_PER_FRAME = 128
MODELS_PER_FRAME = 128
"""A frame has 65,536 bytes, and the name of a model up to 175."""


@dataclass(frozen=True, slots=True)
class HeldResources:
    """What a session holds at one moment: `segments` by generation, with the number of holds; declarations in bytes.

    `answering` are the models for which it answers recalls.
    """

    extents: frozenset[int] = frozenset()
    segments: Counter[int] = field(default_factory=Counter)
    declarations: Declarations = field(default_factory=dict)
    answering: frozenset[str] = frozenset()
    guests: frozenset[tuple[str, resources_pb2.Location.ValueType]] = frozenset()
    """The declarations that can be recalled."""

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
        return replace(self, extents=self.extents.difference(extents), segments=known)

    def frames(self) -> Iterator[pb.Holds]:
        """Yield the frames that state all of it; the last one is marked."""
        for extents in _portions(sorted(self.extents), MAX_IDS_PER_FRAME):
            yield pb.Holds(extent_ids=extents)
        held = [pb.HeldSegment(generation=generation, times=times) for generation, times in self.segments.items()]
        for segments in _portions(held, SEGMENTS_PER_FRAME):
            yield pb.Holds(segments=segments)
        declared = [
            pb.HeldDeclaration(
                model=place[0], location=place[1], declared_bytes=declared_bytes, recallable=place in self.guests
            )
            for place, declared_bytes in self.declarations.items()
        ]
        for declarations in _portions(declared, DECLARATIONS_PER_FRAME):
            yield pb.Holds(declarations=declarations)
        for models in _portions(sorted(self.answering), MODELS_PER_FRAME):
            yield pb.Holds(answering_models=models)
        yield pb.Holds(last=True)


class Inventory:
    """The list of one session. Thread-safe. Part of every allocation, so no step loops over extents in Python.

    `models` are the names of the models that the session has registered and not left, with how many times.
    `answering` are those of them for which it answers recalls. `released_bytes` has all that was ever released of a
    model at a location.
    """

    def __init__(self) -> None:
        self.models: Counter[str] = Counter()
        self.answering: set[str] = set()
        self.released_bytes: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._lock = threading.Lock()
        self._extents: dict[int, Kind] = {}
        self._kinds: dict[Kind, Kind] = {}
        """One object of each kind, which all its extents share."""
        self._segments: dict[int, int] = {}
        """The generation that each hold is of, by the request that took the hold."""
        self._declarations: Declarations = {}
        self._guests: set[tuple[str, resources_pb2.Location.ValueType]] = set()

    def registered(self, model: str) -> None:
        """Record one registration of a model."""
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
            self.answering.discard(model)

    def answers(self, model: str, *, answers: bool) -> None:
        """Record whether the session answers recalls of a model."""
        with self._lock:
            (self.answering.add if answers else self.answering.discard)(model)

    def borrowed(self, extent_ids: Iterable[int], kind: Kind) -> None:
        """Record extents of one kind."""
        with self._lock:
            self._extents.update(dict.fromkeys(extent_ids, self._kinds.setdefault(kind, kind)))

    def attached(self, request_id: int, generation: int) -> None:
        """Record the hold of a segment that a request took."""
        with self._lock:
            self._segments[request_id] = generation

    def declared(self, request: broker_pb2.DeclareMemoryRequest) -> None:
        """Record a declaration, which replaces the one before. What a guest declares less counts as released."""
        place = request.model, request.location
        with self._lock:
            before = self._declarations.pop(place, 0)
            if request.recallable or place in self._guests:
                self.released_bytes[place] += max(0, before - request.declared_bytes)
            self._guests.discard(place)
            if request.declared_bytes:
                self._declarations[place] = request.declared_bytes
                if request.recallable:
                    self._guests.add(place)

    def strike_extents(self, extent_ids: Sequence[int]) -> Sequence[int]:
        """Remove extents that are released. Return those that were there: the broker must be told of them."""
        with self._lock:
            kinds = list(map(self._extents.pop, extent_ids, repeat(None)))
            # In most releases all extents are of one kind, and hashing each would take as long as all the rest.
            are_alike = not kinds or kinds.count(kinds[0]) == len(kinds)
            for kind in kinds[:1] if are_alike else set(kinds):
                if kind is not None:
                    self.released_bytes[kind[:2]] += kind[2] * kinds.count(kind)
        return list(compress(extent_ids, kinds)) if None in kinds else extent_ids

    def strike_segment(self, generation: int) -> bool:
        """Remove one hold of a segment; say whether there was one."""
        with self._lock:
            holds = (request_id for request_id, held in self._segments.items() if held == generation)
            request_id = next(holds, None)
            if request_id is not None:
                del self._segments[request_id]
        return request_id is not None

    def strike_call(self, request_id: int, extent_ids: Iterable[int]) -> None:
        """Remove what a call has brought, if that was recorded already."""
        with self._lock:
            self._segments.pop(request_id, None)
            self._drop(extent_ids)

    def forget(self, extent_ids: Iterable[int], generations: Iterable[int]) -> None:
        """Remove extents, and every hold of segments, that the broker does not know."""
        unknown = set(generations)
        with self._lock:
            self._drop(extent_ids)
            for request_id in [hold for hold, generation in self._segments.items() if generation in unknown]:
                del self._segments[request_id]

    def held(self) -> HeldResources:
        """Return what is held now."""
        with self._lock:
            segments = Counter(self._segments.values())
            answering = frozenset(self.answering)
            guests = frozenset(self._guests)
            return HeldResources(frozenset(self._extents), segments, dict(self._declarations), answering, guests)

    def kind_of(self, extent_id: int) -> Kind | None:
        """Return the kind of an extent, or None if it is not held."""
        return self._extents.get(extent_id)

    def _drop(self, extent_ids: Iterable[int]) -> None:
        deque(map(self._extents.pop, extent_ids, repeat(None)), maxlen=0)


def _portions(entries: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for first in range(0, len(entries), size):
        yield entries[first : first + size]
