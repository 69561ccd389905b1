"""One connection to a keeper, `membroker-fdstore`: requests go out and answers come in, both in order.

Starts a keeper when none listens at the path. Everything here runs on the event loop's thread, except the wait for a
keeper that is starting. It does not know which descriptors a keeper should have.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from membroker.wire.descriptors import close_all, peer_of
from membroker.wire.ownership import is_ours, user_text

from ..system import files, logs
from ..system.retry import Retry
from . import keeper as fdstore

ANSWER_SECONDS = 5.0
"""How long a keeper may take to answer while a connection is being opened."""
START_SECONDS = 30.0
"""How long a keeper may take to start listening. On an idle machine it takes 0.05 s, on a very busy one over 5."""
WINDOW = 8
"""How many requests may be unanswered. The keeper closes a connection that does not read its answers."""


class Lost(ConnectionError):
    """The connection to the keeper ended before the answer, so the request may or may not have been carried out."""


class OwnedElsewhere(OSError):
    """The keeper serves another device's daemon. Retry only after that daemon and its descriptors are gone."""


class _Answer(NamedTuple):
    """The answer to a request. `items` are the listed descriptors; the caller must close them."""

    items: list[tuple[str, int]]
    total: int


class _Request(NamedTuple):
    number: int
    message: Mapping[str, Any]
    descriptors: Sequence[int]
    answer: asyncio.Future[_Answer]


class KeeperConnection:
    """One connection to a keeper. `on_lost` is called when the connection ends without a call of `close`."""

    def __init__(self, path: Path) -> None:
        self.on_lost: Callable[[OSError], None] = lambda error: None
        self.closed = False
        self._io = asyncio.get_running_loop()
        self.began = self._io.time()
        self._numbers = itertools.count(1)
        self._unsent: deque[_Request] = deque()
        self._unanswered: deque[_Request] = deque()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._sock.connect(os.fspath(path))
            self.pid, uid = peer_of(self._sock)
            if not is_ours(uid):  # it would get the memory of every segment
                what = f"the process {self.pid} that listens there is {user_text(uid)}'s, and no keeper of this daemon"
                raise PermissionError(errno.EPERM, what, os.fspath(path))
        except OSError:
            self._sock.close()
            raise
        self._retry = Retry(self._sock)
        self._io.add_reader(self._sock, self._readable)

    def ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> asyncio.Future[_Answer]:
        """Send a request and return the future of its answer, which fails with an OSError.

        The caller keeps the descriptors open until the future is done.
        """
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
            except OSError as error:
                if not self._retry.after(error, self._flush):
                    self.lose(error)
                return
            self._unanswered.append(self._unsent.popleft())
        self._retry.stop()

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
                raise fdstore.PacketRefused("it sent an answer that matches no request")
        except (fdstore.PacketRefused, KeyError) as error:
            close_all(packet.descriptors)
            self.lose(Lost(str(error)))
            return
        self._deliver(self._unanswered.popleft().answer, message, packet)
        self._flush()

    @staticmethod
    def _deliver(answer: asyncio.Future[_Answer], message: Mapping[str, Any], packet: fdstore.KeeperPacket) -> None:
        """Complete the future of a request, unless the caller has cancelled it."""
        names = message.get("names", [])
        try:
            if "error" in message:
                raise fdstore.PacketRefused(message["error"])
            packet.check_descriptors(len(names))
        except fdstore.PacketRefused as error:
            close_all(packet.descriptors)
            if not answer.done():
                kind = OwnedElsewhere if "owner" in message else OSError
                answer.set_exception(kind(f"the keeper of descriptors: {error}"))
            return
        if answer.done():
            close_all(packet.descriptors)
        else:
            answer.set_result(_Answer(list(zip(names, packet.descriptors, strict=True)), message.get("count", 0)))

    def lose(self, error: OSError) -> None:
        """Close the connection because of an error, and call `on_lost`."""
        self.close()
        self.on_lost(error)

    def close(self) -> None:
        """Close the connection. Requests without an answer fail with `Lost`."""
        if self.closed:
            return
        self.closed = True
        self._io.remove_reader(self._sock)
        self._retry.stop()
        self._sock.close()
        for request in (*self._unanswered, *self._unsent):
            if not request.answer.done():
                request.answer.set_exception(Lost("the connection has ended"))
        self._unanswered.clear()
        self._unsent.clear()


async def dial(path: Path, owner: str) -> KeeperConnection:
    """Connect to the keeper at this path as `owner`'s daemon, and start a keeper if none listens; raises OSError.

    It is a PermissionError, which no other attempt will mend, if another user could listen there, or does.
    """
    files.check_owner(path.parent)
    try:
        connection = KeeperConnection(path)
    except (FileNotFoundError, ConnectionRefusedError):
        await asyncio.to_thread(_start, path)
        connection = KeeperConnection(path)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await connection.ask({"own": owner})
    except (Lost, OwnedElsewhere, TimeoutError, asyncio.CancelledError):
        connection.close()
        raise
    except OSError as error:  # an older membrokerd started this keeper: it serves the newest connection
        logs.debug("the keeper of descriptors is too old to know owners", error=str(error))
    return connection


def _start(path: Path) -> None:
    """Start a keeper and wait until it listens. It inherits nothing from this process: no terminal, log or pipe."""
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "membrokerd.restart.keeper", os.fspath(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    threading.Thread(target=keeper.wait, name="keeper", daemon=True).start()  # reaps the keeper when it ends
    assert keeper.stdout is not None
    with keeper.stdout as said:
        ready, _, _ = select.select([said], [], [], START_SECONDS)
        line = said.readline() if ready else b""
        if line.decode(errors="replace").strip() != fdstore.LISTENING:
            keeper.kill()
            why = (line + said.read()).decode(errors="replace").strip()
            raise OSError(why or f"membroker-fdstore does not listen after {START_SECONDS:.0f} seconds")
    logs.log("keeper of descriptors started", pid=keeper.pid, socket=str(path))


async def list_all(connection: KeeperConnection) -> list[tuple[str, int]]:
    """Return the name and descriptor of everything that the keeper has. The caller must close the descriptors."""
    items: list[tuple[str, int]] = []
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                answer = await connection.ask({"list": len(items)})
                items += answer.items
                if not answer.items or len(items) >= answer.total:
                    return items
    except BaseException:
        close_all(descriptor for _, descriptor in items)
        raise
