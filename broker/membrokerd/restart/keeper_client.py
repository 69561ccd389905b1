"""The mirror where systemd keeps nothing: copies of descriptors in a keeper, `membroker-fdstore`.

The keeper is started when there is none, and outlives the daemon. Where it dies first, another is started and filled
with what the store has. All of it runs on the event loop's thread; only the start of a keeper is waited for elsewhere.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from membroker.wire.frames import close_all
from membroker.wire.names import MAX_DESCRIPTORS

from ..observe import logs
from . import keeper as fdstore
from .descriptor_store import Done, Kept, sort

PUT_SECONDS = 5.0
"""How long a put may take, the start of another keeper included."""
START_SECONDS = 5.0
"""How long a keeper may take until it listens."""
START_ATTEMPTS = 5
STEADY_SECONDS = 10.0
"""How long a keeper must have served for the next one to be started at once."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 5.0
"""Between one attempt at a keeper and the next; each pause is twice the last."""
IN_FLIGHT_SECONDS = 0.05
"""How long sending rests when as many descriptors of this user are under way as the kernel allows."""
WINDOW = 8
"""Requests that may be unanswered: the keeper hangs up on who does not take its answers."""
_CREDENTIALS = struct.Struct("3i")


class Put:
    """Copies on their way to a second process, until `end`. Raises OSError when there are no descriptors for them.

    `late` is called after PUT_SECONDS.
    """

    def __init__(self, items: Sequence[tuple[str, int]], done: Done, late: Callable[[], None]) -> None:
        self.copies: dict[str, int] = {}
        self._done = done
        try:
            for name, descriptor in items:
                self.copies[name] = os.dup(descriptor)
        except OSError:
            close_all(self.copies.values())
            raise
        self._timer = asyncio.get_running_loop().call_later(PUT_SECONDS, late)

    def end(self, error: OSError | None) -> None:
        """Close the copies and say what came of the put."""
        self._timer.cancel()
        close_all(self.copies.values())
        self._done(error)


class _KeeperPut(Put):
    """A put in several packets. Names that were dropped meanwhile are not for the next keeper."""

    dropped: frozenset[str] = frozenset()
    unanswered = 0
    error: OSError | None = None

    def left(self) -> list[str]:
        return [name for name in self.copies if name not in self.dropped]


class Lost(ConnectionError):
    """The connection to the keeper has ended: nobody knows what became of the request."""


class Owned(OSError):
    """The keeper keeps for another device's daemon. It stays so while that one lives or has something there."""


class _Answer(NamedTuple):
    """What was listed, if anything: the descriptors are the asker's to close."""

    items: list[tuple[str, int]]
    total: int


class _Request(NamedTuple):
    number: int
    message: Mapping[str, Any]
    descriptors: Sequence[int]
    answer: asyncio.Future[_Answer]


class _Line:
    """One connection to a keeper: requests out, answers in, both in order. `lost` is called when it ends by itself."""

    def __init__(self, path: Path) -> None:
        self.lost: Callable[[OSError], None] = lambda error: None
        self.closed = False
        self._io = asyncio.get_running_loop()
        self.began = self._io.time()
        self._numbers = itertools.count(1)
        self._unsent: deque[_Request] = deque()
        self._unanswered: deque[_Request] = deque()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._sock.connect(os.fspath(path))
            raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            self._sock.close()
            raise
        self.pid: int = _CREDENTIALS.unpack(raw)[0]
        self._io.add_reader(self._sock, self._readable)

    def ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> asyncio.Future[_Answer]:
        """Send a request; the descriptors stay open until it is answered. The answer may be an OSError."""
        request = _Request(next(self._numbers), message, descriptors, self._io.create_future())
        if self.closed:
            request.answer.set_exception(Lost("the connection has ended"))
        else:
            self._unsent.append(request)
            self._flush()
        return request.answer

    def _flush(self) -> None:
        while self._unsent and len(self._unanswered) < WINDOW:
            request = self._unsent[0]
            try:
                fdstore.send(self._sock, {"number": request.number, **request.message}, request.descriptors)
            except BlockingIOError:
                self._io.add_writer(self._sock, self._flush)
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    self._io.call_later(IN_FLIGHT_SECONDS, self._flush)
                else:
                    self.lose(error)
                return
            self._unanswered.append(self._unsent.popleft())
        if not self.closed:
            self._io.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            packet = fdstore.receive(self._sock)
        except BlockingIOError:
            return
        except OSError as error:
            self.lose(error)
            return
        if not packet.data:
            self.lose(Lost("it closed the connection"))
            return
        try:
            message = packet.message()
            if not self._unanswered or message["number"] != self._unanswered[0].number:
                raise fdstore.Refused("an answer to nothing that was asked")
        except (fdstore.Refused, KeyError) as error:
            close_all(packet.descriptors)
            self.lose(Lost(str(error)))
            return
        self._take(self._unanswered.popleft().answer, message, packet)
        self._flush()

    @staticmethod
    def _take(answer: asyncio.Future[_Answer], message: Mapping[str, Any], packet: fdstore.Packet) -> None:
        """Give an answer to whoever asked, if it still waits."""
        names = message.get("names", [])
        try:
            if "owner" in message:
                raise Owned(message["error"])
            if "error" in message:
                raise fdstore.Refused(message["error"])
            packet.check_descriptors(len(names))
        except (fdstore.Refused, Owned) as error:
            close_all(packet.descriptors)
            if not answer.done():
                kind = Owned if isinstance(error, Owned) else OSError
                answer.set_exception(kind(f"the keeper of descriptors: {error}"))
            return
        if answer.done():
            close_all(packet.descriptors)
        else:
            answer.set_result(_Answer(list(zip(names, packet.descriptors, strict=True)), message.get("count", 0)))

    def lose(self, error: OSError) -> None:
        """End it for a reason that is not its owner's, and tell the owner."""
        self.close()
        self.lost(error)

    def close(self) -> None:
        """End it; who waits for an answer gets `Lost`."""
        if self.closed:
            return
        self.closed = True
        self._io.remove_reader(self._sock)
        self._io.remove_writer(self._sock)
        self._sock.close()
        for request in (*self._unanswered, *self._unsent):
            if not request.answer.done():
                request.answer.set_exception(Lost("the connection has ended"))
        self._unanswered.clear()
        self._unsent.clear()


class KeeperMirror:
    """Copies in a keeper, for as long as there is one or another can be started."""

    def __init__(self, path: Path, owner: str, line: _Line, contents: Callable[[], Iterable[tuple[str, int]]]) -> None:
        self._path, self._owner = path, owner
        self._contents = contents
        self._io = asyncio.get_running_loop()
        self._puts: dict[_KeeperPut, None] = {}
        self._pause = 0.0
        self._line: _Line | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._begin(line)

    @property
    def pid(self) -> int | None:
        """The keeper's process, while it is connected."""
        return None if self._line is None else self._line.pid

    def put(self, items: Sequence[tuple[str, int]], done: Done) -> None:
        """Copy descriptors; fails when the keeper may have no more, or when there is none for PUT_SECONDS."""
        try:
            put = _KeeperPut(items, done, lambda: self._late(put))
        except OSError as error:
            self._io.call_soon(done, error)
            return
        self._puts[put] = None
        if self._line is not None:
            self._send(self._line, put)

    def drop(self, names: Sequence[str]) -> None:
        """Let go of names. A keeper that is yet to be filled does not get them."""
        for put in self._puts:
            put.dropped |= put.copies.keys() & names
        if self._line is not None:
            for batch in _batches(names):
                self._line.ask({"drop": batch}).add_done_callback(_dropped)

    def fill_from(self, contents: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Say who knows what a keeper must have that is begun anew."""
        self._contents = contents

    def close(self) -> None:
        """Leave the keeper with what it has."""
        if self._restoring is not None:
            self._restoring.cancel()
        if self._line is not None:
            self._line.close()
            self._line = None
        for put in list(self._puts):
            self._end(put, Lost("the broker stops"))

    # --- puts ---

    def _send(self, line: _Line, put: _KeeperPut) -> None:
        batches = _batches(put.left()) or [[]]
        put.unanswered, put.error = len(batches), None
        for batch in batches:
            answer = line.ask({"put": batch}, [put.copies[name] for name in batch])
            answer.add_done_callback(functools.partial(self._answered, put))

    def _answered(self, put: _KeeperPut, answer: asyncio.Future[_Answer]) -> None:
        error = answer.exception()
        if isinstance(error, Lost):
            return  # it is sent again, or has ended
        assert error is None or isinstance(error, OSError)
        put.error = put.error or error
        put.unanswered -= 1
        if not put.unanswered:
            self._end(put, put.error)

    def _late(self, put: _KeeperPut) -> None:
        if self._line is not None:
            self._line.lose(Lost("it does not answer"))  # else what it was not sent yet would be sent closed
        self._end(put, TimeoutError("the keeper of descriptors does not answer, or none can be started"))

    def _end(self, put: _KeeperPut, error: OSError | None) -> None:
        if put in self._puts:
            del self._puts[put]
            put.end(error)

    # --- a keeper that dies ---

    def _begin(self, line: _Line) -> None:
        if line.closed:
            raise Lost("it closed the connection")
        self._line = line
        line.lost = self._lost

    def _lost(self, error: OSError) -> None:
        assert self._line is not None
        logs.warn("the keeper of descriptors is gone", pid=self._line.pid, error=str(error))
        if self._io.time() - self._line.began >= STEADY_SECONDS:
            self._pause = 0.0
        self._line = None
        self._restoring = self._io.create_task(self._restore())

    async def _restore(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), MAX_PAUSE_SECONDS)
            try:
                line = await _dial(self._path, self._owner)
                try:
                    await self._fill(line)
                except BaseException:
                    line.close()
                    raise
            except OSError as error:
                logs.warn("no keeper of descriptors", error=str(error), pause_seconds=self._pause)
            else:
                return

    async def _fill(self, line: _Line) -> None:
        """Give a keeper what the store has now, then what is on its way; take from it what is neither."""
        items = await _listed(line)
        close_all(descriptor for _, descriptor in items)
        there, filled = {name for name, _ in items}, set[str]()
        while batch := self._unfilled(filled):
            copies: list[int] = []
            try:
                for _, descriptor in batch:
                    copies.append(os.dup(descriptor))
                async with asyncio.timeout(PUT_SECONDS):
                    await line.ask({"put": [name for name, _ in batch]}, copies)
            except BaseException:
                line.close()  # before the copies are: it may not have sent them
                raise
            finally:
                close_all(copies)
            filled |= {name for name, _ in batch}
        self._begin(line)
        logs.log("the keeper of descriptors has them again", pid=line.pid, count=len(filled))
        wanted = {name for name, _ in self._contents()}.union(*(put.left() for put in self._puts))
        self.drop(sorted((there | filled) - wanted))
        for put in list(self._puts):
            self._send(line, put)

    def _unfilled(self, filled: set[str]) -> list[tuple[str, int]]:
        left = (item for item in self._contents() if item[0] not in filled)
        return list(itertools.islice(left, MAX_DESCRIPTORS))


async def open_keeper(path: Path, owner: str) -> tuple[KeeperMirror, Kept]:
    """Return a mirror in the keeper at this path, and what it has of a predecessor; raises OSError.

    Starts a keeper if none runs, and tries again when one is just ending or starting. `owner` is
    the same for each daemon of a device, and another for each device: `Owned` is raised at once.
    """
    pause = FIRST_PAUSE_SECONDS
    for _ in range(START_ATTEMPTS - 1):
        try:
            return await _open(path, owner)
        except Owned:
            raise
        except OSError as error:
            logs.warn("no keeper of descriptors", error=str(error), pause_seconds=pause)
        await asyncio.sleep(pause)
        pause *= 2
    return await _open(path, owner)


async def _open(path: Path, owner: str) -> tuple[KeeperMirror, Kept]:
    line = await _dial(path, owner)
    try:
        items = await _listed(line)
    except BaseException:
        line.close()
        raise
    kept, unknown = sort(items)
    known = [item for item in items if item[0] not in unknown]
    mirror = KeeperMirror(path, owner, line, lambda: known)
    mirror.drop(unknown)
    return mirror, kept


async def _dial(path: Path, owner: str) -> _Line:
    try:
        line = _Line(path)
    except (FileNotFoundError, ConnectionRefusedError):
        await asyncio.to_thread(_start, path)
        line = _Line(path)
    try:
        async with asyncio.timeout(PUT_SECONDS):
            await line.ask({"own": owner})
    except (Lost, Owned, TimeoutError, asyncio.CancelledError):
        line.close()
        raise
    except OSError as error:  # a keeper that an older membrokerd started: it serves the newest connection
        logs.debug("the keeper of descriptors knows no owners", error=str(error))
    return line


def _start(path: Path) -> None:
    """Start a keeper and wait until it listens. It holds nothing of this process's: no terminal, no log, no pipe."""
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "membrokerd.restart.keeper", os.fspath(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    threading.Thread(target=keeper.wait, name="keeper", daemon=True).start()  # else a dead one stays a zombie
    assert keeper.stdout is not None
    with keeper.stdout as said:
        ready, _, _ = select.select([said], [], [], START_SECONDS)
        line = said.readline() if ready else b""
        if line.decode(errors="replace").strip() != fdstore.LISTENING:
            keeper.kill()
            why = (line + said.read()).decode(errors="replace").strip()
            raise OSError(why or f"membroker-fdstore does not listen after {START_SECONDS:.0f} seconds")
    logs.log("keeper of descriptors started", pid=keeper.pid, socket=str(path))


async def _listed(line: _Line) -> list[tuple[str, int]]:
    """Return what the keeper has; the descriptors are the caller's."""
    items: list[tuple[str, int]] = []
    try:
        async with asyncio.timeout(PUT_SECONDS):
            while True:
                answer = await line.ask({"list": len(items)})
                items += answer.items
                if not answer.items or len(items) >= answer.total:
                    return items
    except BaseException:
        close_all(descriptor for _, descriptor in items)
        raise


def _dropped(answer: asyncio.Future[_Answer]) -> None:
    error = answer.exception()
    if error is not None and not isinstance(error, Lost):
        logs.warn("the keeper of descriptors did not drop what it was told to", error=str(error))


def _batches(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[first : first + MAX_DESCRIPTORS] for first in range(0, len(names), MAX_DESCRIPTORS)]
