"""The descriptor store: keeps the descriptors that must outlive the broker, and copies them to a second process.

It keeps the descriptors of segments, so that a segment outlives the process that wrote it. With a mirror, it also
copies a pidfd for each session and a few descriptors of the driver. `keep` completes when the mirror has the copies;
nothing of a segment is delivered before that. One packet of a segment is on its way to the mirror at a time, and
tenants share the time: one with many segments does not delay those of others. Owns those descriptors, and the names
that the second process has for them. It must never decide about memory.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from membroker.wire.descriptors import close_all, copy_all

from ..system import logs
from ..system.tenant_queues import TenantQueues

_Key = TypeVar("_Key", int, str)
Done = Callable[[OSError | None], None]

_SEGMENT = re.compile(r"segment\.([1-9a-f][0-9a-f]*)\.([1-9a-f][0-9a-f]*)")
_PROCESS = re.compile(r"process\.([1-9a-f][0-9a-f]*)")
_DRIVER = re.compile(r"driver\.([A-Za-z0-9._-]{1,64})")


class Mirror(Protocol):
    """The broker's side of a second process that has copies by name. Runs on the event loop's thread; never blocks."""

    def put(self, items: Sequence[tuple[str, int]], done: Done) -> None:
        """Copy descriptors under these names, replacing what has them now. The caller still owns the descriptors.

        `done` is called once, later: with None when the other process has all of them, else with the error. After an
        error it may have some of them: drop those names. Puts and drops take effect in order, so an empty put
        completes after everything before it.
        """
        ...

    def drop(self, names: Sequence[str]) -> None:
        """Remove these names, including those in puts that are under way."""
        ...

    def fill_from(self, contents: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Set the function that returns everything that should be there. It fills a replacement if the process dies."""
        ...

    def close(self) -> None:
        """Disconnect. The other process keeps what it has; puts that are under way fail."""
        ...


@dataclass(slots=True)
class StoredDescriptors:
    """Descriptors that a predecessor left: of extents by segment and id, pidfds by session, the driver's by name."""

    segments: dict[int, dict[int, int]] = field(default_factory=dict)
    processes: dict[int, int] = field(default_factory=dict)
    driver: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Keep:
    """Extents of a segment that the mirror has not got yet. Their caller owns the descriptors until `done`."""

    segment: int
    ids: Sequence[int]
    descriptors: Sequence[int]
    done: Done

    def names(self) -> list[str]:
        return [_segment_name(self.segment, extent) for extent in self.ids]


class Store:
    """Keeps descriptors of extents by segment and id, and copies of them in the mirror. Not thread-safe.

    Without a mirror, the descriptors end with this process.
    """

    def __init__(self, mirror: Mirror | None = None) -> None:
        self._mirror = mirror
        self._closed = False
        self._segments: dict[int, dict[int, int]] = {}
        self._waiting: TenantQueues[_Keep] = TenantQueues()
        self._is_putting = False
        """Whether extents of a segment are on their way to the mirror."""
        self._copies: dict[str, int] = {}
        self._untold: dict[str, None] = {}
        """Names of pidfds that the mirror must still get."""
        self._alone = 0
        """How many of the first of these are put each by itself: together there was no room for them."""
        self._unwanted: list[str] = []
        """Names of pidfds that it must still drop."""
        self._is_telling = False
        if mirror is not None:
            mirror.fill_from(self._contents)

    def adopt(self, kept: StoredDescriptors) -> None:
        """Take over what a predecessor left, which the mirror already has. Call it before anything is kept."""
        assert not self._segments
        assert not self._copies
        self._segments = {segment: dict(extents) for segment, extents in kept.segments.items()}
        self._copies = {_process_name(session): pidfd for session, pidfd in kept.processes.items()}
        self._copies |= {_driver_name(name): descriptor for name, descriptor in kept.driver.items()}

    # --- extents ---

    def keep(self, tenant: str, segment: int, ids: Sequence[int], descriptors: Sequence[int], done: Done) -> None:
        """Take ownership of these descriptors, and call `done` with None, once the mirror has copies.

        If they cannot be kept, `done` gets the error and the caller still owns them.
        """
        keep = _Keep(segment, ids, descriptors, done)
        if self._mirror is None:
            self._take(keep)
            done(None)
        else:
            self._waiting.put(tenant, keep)
            self._put_next(self._mirror)

    def _put_next(self, mirror: Mirror) -> None:
        """Send the mirror the extents that come next, if it has answered all before."""
        if self._is_putting or self._closed or not self._waiting:
            return
        tenant, keep = self._waiting.take()
        names, began = keep.names(), time.perf_counter()

        def put(error: OSError | None) -> None:
            self._is_putting = False
            self._waiting.charge(tenant, time.perf_counter() - began)
            if error is None:
                self._take(keep)
            else:
                mirror.drop(names)
            if isinstance(error, TimeoutError):
                self._refuse_all(error)  # or each would wait as long for a mirror that does not answer
            self._put_next(mirror)
            keep.done(error)

        self._is_putting = True
        mirror.put(list(zip(names, keep.descriptors, strict=True)), put)

    def _refuse_all(self, error: OSError) -> None:
        """Say of all extents that wait that they cannot be kept."""
        waiting = []
        while self._waiting:
            waiting.append(self._waiting.take()[1])
        for keep in waiting:
            keep.done(error)

    def _take(self, keep: _Keep) -> None:
        self._segments.setdefault(keep.segment, {}).update(zip(keep.ids, keep.descriptors, strict=True))

    def lend(self, segment: int, ids: Sequence[int]) -> list[int]:
        """Return the descriptors of these extents, which the store still owns; KeyError if it does not have them."""
        kept = self._segments[segment]
        return [kept[extent] for extent in ids]

    def give_up(self, segment: int, ids: Sequence[int] | None = None) -> list[int]:
        """Forget a segment, or these extents of it, here and in the mirror. The caller must close what is returned."""
        if ids is None:
            given = self._segments.pop(segment, {})
        else:
            kept = self._segments.get(segment, {})
            given = {extent: kept.pop(extent) for extent in ids if extent in kept}
        self._drop([_segment_name(segment, extent) for extent in given])
        return list(given.values())

    def settle(self, done: Callable[[], None]) -> None:
        """Call `done` once the mirror has dropped what was given up, or does not answer.

        The caller then has the last descriptors of it. `done` is never called if this daemon ends first: its successor
        then gives up the same descriptors.
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

    # --- pidfds and the driver's descriptors ---

    def keep_process(self, session: int, pidfd: int) -> None:
        """Copy a session's pidfd to the mirror. The caller still owns it. A failure is only logged."""
        for name in self._hold({_process_name(session): pidfd}):
            self._untold[name] = None
            self._tell()

    def forget_process(self, session: int) -> None:
        """Drop a session's pidfd."""
        name = _process_name(session)
        if name in self._copies:
            os.close(self._copies.pop(name))
            if name in self._untold:
                del self._untold[name]
            else:
                self._unwanted.append(name)
                self._tell()

    def _tell(self) -> None:
        """Tell the mirror which pidfds have come and gone, all at once, when it has done what it was told before.

        So sessions that come and go faster than it can follow are no queue in front of the segments. If the mirror has
        no room for them all, each is put by itself, and only what does not fit is lost.
        """
        if self._mirror is None or self._is_telling or self._closed or not (self._untold or self._unwanted):
            return
        names, unwanted = list(itertools.islice(self._untold, 1 if self._alone else None)), self._unwanted
        for name in names:
            del self._untold[name]
        self._alone, self._unwanted, self._is_telling = max(0, self._alone - 1), [], True

        def told(error: OSError | None) -> None:
            self._is_telling = False
            if len(names) > 1 and error is not None and not isinstance(error, ConnectionError | TimeoutError):
                again = dict.fromkeys(name for name in names if name in self._copies)
                self._alone, self._untold = len(again), again | self._untold
            elif error is not None:
                _warn_of_loss(names, error)
            self._tell()

        self._drop(unwanted)
        self._mirror.put([(name, self._copies[name]) for name in names], told)

    def keep_driver(self, survivors: Mapping[str, int]) -> None:
        """Copy the driver's descriptors to the mirror in one put: only the whole set is useful.

        The caller still owns them. A failure is only logged.
        """
        fresh = self._hold({_driver_name(name): descriptor for name, descriptor in survivors.items()})
        if self._mirror is None or not fresh:
            return

        def put(error: OSError | None) -> None:
            # They are put at the start. A daemon that ends before that completes has lent nothing.
            if error is not None and not self._closed:
                _warn_of_loss(fresh, error)

        self._mirror.put(list(fresh.items()), put)

    def forget_driver(self) -> None:
        """Drop all descriptors of the driver."""
        there = [name for name in self._copies if _DRIVER.fullmatch(name)]
        close_all(self._copies.pop(name) for name in there)
        self._drop(there)

    def _hold(self, descriptors: Mapping[str, int]) -> dict[str, int]:
        """Copy those that are new, for the mirror. Return the copies, which the store owns."""
        # A name always means the same descriptor. What a predecessor left is not put again: a put removes the old copy
        # for a moment, and a daemon that died in that moment would lose it.
        fresh = {name: descriptor for name, descriptor in descriptors.items() if name not in self._copies}
        if self._mirror is None or not fresh:
            return {}
        try:
            copies = dict(zip(fresh, copy_all(fresh.values()), strict=True))
        except OSError as error:
            _warn_of_loss(fresh, error)
            return {}
        self._copies.update(copies)
        return copies

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
        self._is_telling, self._alone = False, 0
        self._tell()
        self._closed = True
        if self._mirror is not None:
            self._mirror.close()
            self._refuse_all(ConnectionError("the broker is stopping"))
        descriptors = [descriptor for _, descriptor in self._contents()]
        self._segments, self._copies = {}, {}
        return descriptors


def _warn_of_loss(names: Iterable[str], error: OSError) -> None:
    logs.warn("a restart would lose descriptors", names=" ".join(names), error=str(error))


def sort(items: Iterable[tuple[str, int]]) -> tuple[StoredDescriptors, list[str]]:
    """Sort by name what a second process had. If a name occurs twice, the later descriptor counts.

    Also returns the names that no broker uses; their descriptors are closed.
    """
    kept, unknown = StoredDescriptors(), []
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
        logs.warn("dropped descriptors with names that no broker uses", names=unknown)
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
