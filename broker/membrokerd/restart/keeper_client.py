"""The mirror for a daemon without systemd's descriptor store: copies of descriptors in a keeper, `membroker-fdstore`.

The mirror starts a keeper when none runs, and the keeper outlives the daemon. If the keeper dies first, the mirror
starts another and fills it from the store. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from membroker.wire.descriptors import close_all, copy_all
from membroker.wire.names import MAX_DESCRIPTORS

from ..system import logs
from .descriptor_store import Done, StoredDescriptors, sort
from .keeper_connection import KeeperConnection, Lost, OwnedElsewhere, dial, list_all

PUT_SECONDS = 5.0
"""How long a put may take, including the start of another keeper."""
START_ATTEMPTS = 5
STEADY_SECONDS = 10.0
"""If a connection to a keeper lasted this long, the next attempt starts without a pause."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 5.0
"""The pause between two attempts to reach a keeper. Each pause is twice the one before."""


class Put:
    """Copies of descriptors on their way to a second process, until `end`. Raises OSError if it cannot copy them.

    `late` is called after PUT_SECONDS.
    """

    def __init__(self, items: Sequence[tuple[str, int]], done: Done, late: Callable[[], None]) -> None:
        copies = copy_all(descriptor for _, descriptor in items)
        self.copies = dict(zip((name for name, _ in items), copies, strict=True))
        self._done = done
        self._timer = asyncio.get_running_loop().call_later(PUT_SECONDS, late)

    def end(self, error: OSError | None) -> None:
        """Close the copies and report the result of the put."""
        self._timer.cancel()
        close_all(self.copies.values())
        self._done(error)


class _KeeperPut(Put):
    """A put in several packets. Names in `dropped` are not sent again to the next keeper."""

    dropped: frozenset[str] = frozenset()
    unanswered = 0
    error: OSError | None = None

    def remaining(self) -> list[str]:
        return [name for name in self.copies if name not in self.dropped]


class KeeperMirror:
    """Copies in a keeper. When the keeper dies, the mirror starts another and fills it again."""

    def __init__(
        self,
        path: Path,
        owner: str,
        connection: KeeperConnection,
        contents: Callable[[], Iterable[tuple[str, int]]],
    ) -> None:
        self._path, self._owner = path, owner
        self._contents = contents
        self._io = asyncio.get_running_loop()
        self._puts: dict[_KeeperPut, None] = {}
        self._pause = 0.0
        self._connection: KeeperConnection | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._use(connection)

    def put(self, items: Sequence[tuple[str, int]], done: Done) -> None:
        """Copy descriptors. Fails if the keeper is full, or if no keeper answers within PUT_SECONDS."""
        try:
            put = _KeeperPut(items, done, lambda: self._late(put))
        except OSError as error:
            self._io.call_soon(done, error)
            return
        self._puts[put] = None
        if self._connection is not None:
            self._send(self._connection, put)

    def drop(self, names: Sequence[str]) -> None:
        """Remove these names. If no keeper is connected, the next one is filled without them."""
        for put in self._puts:
            put.dropped |= put.copies.keys() & names
        if self._connection is not None:
            for batch in _batches(names):
                self._connection.ask({"drop": batch}).add_done_callback(_dropped)

    def fill_from(self, contents: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Set the function that returns what a new keeper must be filled with."""
        self._contents = contents

    def close(self) -> None:
        """Disconnect. The keeper keeps what it has."""
        if self._restoring is not None:
            self._restoring.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for put in list(self._puts):
            self._end(put, Lost("the broker is stopping"))

    # --- puts ---

    def _send(self, connection: KeeperConnection, put: _KeeperPut) -> None:
        batches = _batches(put.remaining()) or [[]]
        put.unanswered, put.error = len(batches), None
        for batch in batches:
            answer = connection.ask({"put": batch}, [put.copies[name] for name in batch])
            answer.add_done_callback(functools.partial(self._answered, put))

    def _answered(self, put: _KeeperPut, answer: asyncio.Future[Any]) -> None:
        error = answer.exception()
        if isinstance(error, Lost):
            return  # the put is sent again to the next keeper, or it has ended already
        assert error is None or isinstance(error, OSError)
        put.error = put.error or error
        put.unanswered -= 1
        if not put.unanswered:
            self._end(put, put.error)

    def _late(self, put: _KeeperPut) -> None:
        if self._connection is not None:
            # Requests of this put may still be queued, and _end closes their descriptors.
            self._connection.lose(Lost("it does not answer"))
        self._end(put, TimeoutError("the keeper of descriptors does not answer, or no keeper can be started"))

    def _end(self, put: _KeeperPut, error: OSError | None) -> None:
        if put in self._puts:
            del self._puts[put]
            put.end(error)

    # --- a keeper that dies ---

    def _use(self, connection: KeeperConnection) -> None:
        if connection.closed:
            raise Lost("it closed the connection")
        self._connection = connection
        connection.on_lost = self._lost

    def _lost(self, error: OSError) -> None:
        assert self._connection is not None
        logs.warn("the connection to the keeper of descriptors is lost", pid=self._connection.pid, error=str(error))
        if self._io.time() - self._connection.began >= STEADY_SECONDS:
            self._pause = 0.0
        self._connection = None
        self._restoring = self._io.create_task(self._restore())

    async def _restore(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), MAX_PAUSE_SECONDS)
            try:
                connection = await dial(self._path, self._owner)
                try:
                    await self._fill(connection)
                except BaseException:
                    connection.close()
                    raise
            except OSError as error:
                _warn_unreachable(error, self._pause)
            else:
                return

    async def _fill(self, connection: KeeperConnection) -> None:
        """Send a new keeper what the store has, then the pending puts. Drop every other name that the keeper has."""
        items = await list_all(connection)
        close_all(descriptor for _, descriptor in items)
        found, filled = {name for name, _ in items}, set[str]()
        while batch := self._unfilled(filled):
            copies = copy_all(descriptor for _, descriptor in batch)
            try:
                async with asyncio.timeout(PUT_SECONDS):
                    await connection.ask({"put": [name for name, _ in batch]}, copies)
            except BaseException:
                connection.close()  # first: a queued request still needs the copies
                raise
            finally:
                close_all(copies)
            filled |= {name for name, _ in batch}
        self._use(connection)
        logs.log("the keeper of descriptors has all descriptors again", pid=connection.pid, count=len(filled))
        wanted = {name for name, _ in self._contents()}.union(*(put.remaining() for put in self._puts))
        self.drop(sorted((found | filled) - wanted))
        for put in list(self._puts):
            self._send(connection, put)

    def _unfilled(self, filled: set[str]) -> list[tuple[str, int]]:
        rest = (item for item in self._contents() if item[0] not in filled)
        return list(itertools.islice(rest, MAX_DESCRIPTORS))


async def open_keeper(path: Path, owner: str) -> tuple[KeeperMirror, StoredDescriptors]:
    """Return a mirror in the keeper at this path, and the descriptors that a predecessor left there; raises OSError.

    Starts a keeper if none runs, and tries again if one is just ending or starting. All daemons of a device have the
    same `owner`, and each device has its own. `OwnedElsewhere` and `PermissionError` are raised at once.
    """
    pause = FIRST_PAUSE_SECONDS
    for _ in range(START_ATTEMPTS - 1):
        try:
            return await _open(path, owner)
        except (OwnedElsewhere, PermissionError):
            raise
        except OSError as error:
            _warn_unreachable(error, pause)
        await asyncio.sleep(pause)
        pause *= 2
    return await _open(path, owner)


async def _open(path: Path, owner: str) -> tuple[KeeperMirror, StoredDescriptors]:
    connection = await dial(path, owner)
    try:
        items = await list_all(connection)
    except BaseException:
        connection.close()
        raise
    kept, unknown = sort(items)
    known = [item for item in items if item[0] not in unknown]
    mirror = KeeperMirror(path, owner, connection, lambda: known)
    mirror.drop(unknown)
    return mirror, kept


def _warn_unreachable(error: OSError, pause: float) -> None:
    logs.warn("cannot reach or start a keeper of descriptors, trying again", error=str(error), pause_seconds=pause)


def _dropped(answer: asyncio.Future[Any]) -> None:
    error = answer.exception()
    if error is not None and not isinstance(error, Lost):
        logs.warn("the keeper of descriptors did not drop some names", error=str(error))


def _batches(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[first : first + MAX_DESCRIPTORS] for first in range(0, len(names), MAX_DESCRIPTORS)]
