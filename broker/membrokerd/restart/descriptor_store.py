"""The descriptor store: what must outlive the broker's process is kept here, and copied to a second process.

Segments' descriptors, so that segments outlive whoever wrote them; with a mirror, a pidfd for each session and a few of
the driver's too. `keep` is over when the mirror has the copies, and nothing of a segment is delivered before. Owns the
names by which a second process knows them, and those descriptors; decides nothing about memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from membroker.wire.descriptors import close_all

from ..observe import logs

_Key = TypeVar("_Key", int, str)
Done = Callable[[OSError | None], None]

_SEGMENT = re.compile(r"segment\.([1-9a-f][0-9a-f]*)\.([1-9a-f][0-9a-f]*)")
_PROCESS = re.compile(r"process\.([1-9a-f][0-9a-f]*)")
_DRIVER = re.compile(r"driver\.([A-Za-z0-9._-]{1,64})")


class DescriptorStore(Protocol):
    """Keeps descriptors of extents by segment and id. Not thread-safe: it belongs to the event loop's thread."""

    def keep(self, segment: int, ids: Sequence[int], descriptors: Sequence[int], done: Done) -> None:
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

    def settle(self, done: Callable[[], None]) -> None:
        """Call `done` once nobody else has what was given up before: then the caller's descriptors are the last."""
        ...

    def __len__(self) -> int:
        """Return how many descriptors of extents are kept."""
        ...


class Mirror(Protocol):
    """A second process that has copies by name. It takes part on the event loop's thread, and blocks it never."""

    def put(self, items: Sequence[tuple[str, int]], done: Done) -> None:
        """Copy descriptors under these names, in place of what has them; the descriptors stay the caller's.

        `done` is called later, once: when the other process has them all, or with why it may not have them. Then it may
        have some: drop them. What is put or dropped first is done first, so a put of nothing tells of what was before.
        """
        ...

    def drop(self, names: Sequence[str]) -> None:
        """Let go of these names, and of puts of them that are under way."""
        ...

    def fill_from(self, contents: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Say who knows all that should be there: a second process that dies begins anew with that."""
        ...

    def close(self) -> None:
        """Leave the other process with what it has; what is under way fails."""
        ...


@dataclass(slots=True)
class Kept:
    """What a predecessor left: descriptors of extents by segment and id, pidfds by session, the driver's by name."""

    segments: dict[int, dict[int, int]] = field(default_factory=dict)
    processes: dict[int, int] = field(default_factory=dict)
    driver: dict[str, int] = field(default_factory=dict)


class Store:
    """Keeps descriptors in this process, and copies of them in the mirror's; without a mirror they end with it."""

    def __init__(self, mirror: Mirror | None = None) -> None:
        self._mirror = mirror
        self._ends = False
        self._segments: dict[int, dict[int, int]] = {}
        self._copies: dict[str, int] = {}
        if mirror is not None:
            mirror.fill_from(self._contents)

    def adopt(self, kept: Kept) -> None:
        """Take over what a predecessor left, which the mirror has already. To be called before anything is kept."""
        assert not self._segments
        assert not self._copies
        self._segments = {segment: dict(extents) for segment, extents in kept.segments.items()}
        self._copies = {_process_name(session): pidfd for session, pidfd in kept.processes.items()}
        self._copies |= {_driver_name(name): descriptor for name, descriptor in kept.driver.items()}

    # --- extents ---

    def keep(self, segment: int, ids: Sequence[int], descriptors: Sequence[int], done: Done) -> None:
        """Take these descriptors over when the mirror has copies; before, and if it fails, they are the caller's."""
        if self._mirror is None:
            self._take(segment, ids, descriptors)
            done(None)
            return
        mirror = self._mirror
        names = [_segment_name(segment, extent) for extent in ids]

        def put(error: OSError | None) -> None:
            if error is None:
                self._take(segment, ids, descriptors)
            else:
                mirror.drop(names)
            done(error)

        mirror.put(list(zip(names, descriptors, strict=True)), put)

    def _take(self, segment: int, ids: Sequence[int], descriptors: Sequence[int]) -> None:
        self._segments.setdefault(segment, {}).update(zip(ids, descriptors, strict=True))

    def lend(self, segment: int, ids: Sequence[int]) -> list[int]:
        """Return the descriptors of these extents."""
        kept = self._segments[segment]
        return [kept[extent] for extent in ids]

    def give_up(self, segment: int, ids: Sequence[int] | None = None) -> list[int]:
        """Forget a segment, or these extents of it, here and in the mirror; return the descriptors there were."""
        if ids is None:
            given = self._segments.pop(segment, {})
        else:
            kept = self._segments.get(segment, {})
            given = {extent: kept.pop(extent) for extent in ids if extent in kept}
        self._drop([_segment_name(segment, extent) for extent in given])
        return list(given.values())

    def settle(self, done: Callable[[], None]) -> None:
        """Call `done` once the mirror has let go of what was given up, or does not answer.

        Never where this daemon ends first: then its successor gives it up.
        """
        if self._mirror is None:
            done()
            return

        def put(error: OSError | None) -> None:
            if not isinstance(error, ConnectionError):
                done()

        self._mirror.put((), put)

    def __len__(self) -> int:
        """Return how many descriptors of extents are kept."""
        return sum(map(len, self._segments.values()))

    # --- what else a successor needs ---

    def keep_process(self, session: int, pidfd: int) -> None:
        """Copy a session's pidfd, which stays the caller's, for a mirror. Nobody waits: a failure is logged."""
        self._copy({_process_name(session): pidfd})

    def forget_process(self, session: int) -> None:
        """Let go of a session's pidfd."""
        self._forget([_process_name(session)])

    def keep_driver(self, survivors: Mapping[str, int]) -> None:
        """Copy the driver's descriptors, which stay the caller's, for a mirror: all in one put, since some are no use.

        Nobody waits, as above.
        """
        self._copy({_driver_name(name): descriptor for name, descriptor in survivors.items()})

    def forget_driver(self) -> None:
        """Let go of all that is a driver's."""
        self._forget([name for name in self._copies if _DRIVER.fullmatch(name)])

    def _forget(self, names: Sequence[str]) -> None:
        there = [name for name in names if name in self._copies]
        close_all(self._copies.pop(name) for name in there)
        self._drop(there)

    def _copy(self, descriptors: Mapping[str, int]) -> None:
        # A name stands for one thing for ever. What a predecessor left stays where it is: put again it would be gone
        # from the mirror for a moment, and a death in that moment would lose it.
        fresh = {name: descriptor for name, descriptor in descriptors.items() if name not in self._copies}
        if self._mirror is None or not fresh:
            return

        def put(error: OSError | None) -> None:
            # What is the driver's was put at the start: a daemon that ends before that is over has lent nothing.
            if error is not None and not (self._ends and all(map(_DRIVER.fullmatch, fresh))):
                logs.warn("a restart would lose descriptors", names=" ".join(fresh), error=str(error))

        copies: dict[str, int] = {}
        try:
            for name, descriptor in fresh.items():
                copies[name] = os.dup(descriptor)
        except OSError as error:
            close_all(copies.values())
            put(error)
            return
        self._copies |= copies
        self._mirror.put(list(copies.items()), put)

    # --- the mirror ---

    def _drop(self, names: list[str]) -> None:
        if self._mirror is not None and names:
            self._mirror.drop(names)

    def _contents(self) -> Iterator[tuple[str, int]]:
        for segment, extents in self._segments.items():
            for extent, descriptor in extents.items():
                yield _segment_name(segment, extent), descriptor
        yield from self._copies.items()

    def close(self) -> list[int]:
        """Forget everything, and return every descriptor. The mirror's process keeps its copies."""
        self._ends = True
        if self._mirror is not None:
            self._mirror.close()
        descriptors = [descriptor for _, descriptor in self._contents()]
        self._segments, self._copies = {}, {}
        return descriptors


def sort(items: Iterable[tuple[str, int]]) -> tuple[Kept, list[str]]:
    """Sort what a second process had by its names; of two with one name the later counts.

    Returns besides the names that no broker gives: their descriptors are closed.
    """
    kept, unknown = Kept(), []
    for name, descriptor in items:
        if found := _SEGMENT.fullmatch(name):
            extents = kept.segments.setdefault(int(found[1], 16), {})
            _replace(extents, int(found[2], 16), descriptor)
        elif found := _PROCESS.fullmatch(name):
            _replace(kept.processes, int(found[1], 16), descriptor)
        elif found := _DRIVER.fullmatch(name):
            _replace(kept.driver, found[1], descriptor)
        else:
            unknown.append(name)
            os.close(descriptor)
    if unknown:
        logs.warn("dropping descriptors that are none of the broker's", names=unknown)
    return kept, unknown


def _replace(descriptors: dict[_Key, int], key: _Key, descriptor: int) -> None:
    if key in descriptors:
        os.close(descriptors[key])
    descriptors[key] = descriptor


def _segment_name(segment: int, extent: int) -> str:
    return f"segment.{segment:x}.{extent:x}"


def _process_name(session: int) -> str:
    return f"process.{session:x}"


def _driver_name(name: str) -> str:
    return f"driver.{name}"
