"""The command `membroker-fdstore`: keeps named descriptors for a daemon that may die, and does nothing else.

Each packet on its SOCK_SEQPACKET socket is one JSON object with at most 64 descriptors. A request has a number and one
more key. Requests are answered in order, each with its number:

    {"number": 1, "put": [NAME, …]}     with a descriptor for each name; a name that exists is replaced
    {"number": 2, "drop": [NAME, …]}    names that do not exist are ignored
    {"number": 3, "list": FIRST}        list names from this index on; the first is 0
    {"number": 4, "own": OWNER}         this connection belongs to the daemon of OWNER, `<runtime>/<device>`

    {"number": 1}                                       done
    {"number": 3, "names": [NAME, …], "count": COUNT}   with their descriptors; COUNT is the number of all names
    {"number": 1, "error": SENTENCE}                    refused, nothing was changed; number null if the packet had none
    {"number": 4, "error": SENTENCE, "owner": OWNER}    refused: the keeper belongs to this other owner

It serves one daemon: the first request of a newer connection closes the older connection. While the owner is connected
or has something there that is worth keeping, requests of every other owner are refused and change nothing.

It ends on SIGTERM, when another file is at its socket's path, and, without `--stay`, when no daemon is connected and
nothing is left that is worth keeping. A fault of the daemon must not affect it, and it must start fast: it imports only
a little of the standard library and never touches CUDA.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import itertools
import json
import os
import re
import resource
import select
import selectors
import signal
import socket
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from membroker.wire import descriptors as passing
from membroker.wire.descriptors import close_all
from membroker.wire.names import MAX_DESCRIPTORS
from membroker.wire.ownership import stranger_in
from membroker.wire.standard import forget_inheritance

LISTENING = "listening"
"""The line on its standard output that says that it accepts connections."""
SEGMENT, PROCESS = "segment.", "process."
"""Prefixes of names that are worth keeping: a segment's always, a process's pidfd while the process lives."""
MAX_PACKET_BYTES = 32_768
LOOK_SECONDS = 2.0
"""How often it checks whether it is still needed, and so how long it waits for its first connection."""
PAUSE_SECONDS = 0.1
"""How long it stops accepting when the machine is out of descriptors."""
RESERVED = MAX_DESCRIPTORS + 16
"""Descriptors that it needs for itself and for one packet before that is accepted."""

MAX_OWNER_LENGTH = 255

_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
_MAX_NUMBER = (1 << 63) - 1


class PacketRefused(Exception):
    """A packet is refused and changes nothing. The message is a sentence for the sender."""


class Owned(PacketRefused):
    """The keeper belongs to another owner."""

    def __init__(self, owner: str) -> None:
        super().__init__(
            f"it keeps the descriptors of {owner}: give each device a keeper of its own, "
            'as keeper_socket = "/run/membroker-keeper/{device}/fdstore.sock" does, '
            f"or end this keeper (process {os.getpid()}) if that device's daemon will not run again"
        )
        self.owner = owner


class KeeperPacket(NamedTuple):
    """One packet as it was received. The receiver must close the descriptors."""

    data: bytes
    descriptors: list[int]
    flags: int

    def message(self) -> dict[str, Any]:
        """Return the JSON object in the packet; raises `PacketRefused`."""
        if self.flags & socket.MSG_TRUNC:
            raise PacketRefused(f"the packet is longer than {MAX_PACKET_BYTES} bytes")
        try:
            message = json.loads(self.data)
        except (ValueError, RecursionError) as error:
            raise PacketRefused("the packet is not JSON") from error
        if not isinstance(message, dict):
            raise PacketRefused("the packet is not a JSON object")
        return message

    def check_descriptors(self, count: int) -> None:
        """Raise `PacketRefused` unless the packet came with this many descriptors."""
        if self.flags & socket.MSG_CTRUNC:
            raise PacketRefused(
                f"descriptors were lost: more than {MAX_DESCRIPTORS} were sent, or the receiver has too many"
            )
        if len(self.descriptors) != count:
            raise PacketRefused(f"the packet has {len(self.descriptors)} descriptors and needs {count}")


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Send one packet. The caller still owns the descriptors. Raises what `sendmsg` raises."""
    passing.send(connection, json.dumps(message).encode(), descriptors)


def receive(connection: socket.socket) -> KeeperPacket:
    """Receive one packet. An empty packet means that the other end has closed. Raises what `recvmsg` raises."""
    data, descriptors, flags = passing.receive(connection, MAX_PACKET_BYTES)
    return KeeperPacket(data, descriptors, flags)


class Keeper:
    """The descriptors by name, the socket, and the one daemon that is connected."""

    def __init__(self, path: str, stay: bool = False) -> None:
        self._path = path
        self._stay = stay
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED
        self._directory = _take_directory(os.path.dirname(path), wait=stay)
        with suppress(FileNotFoundError):
            os.unlink(path)  # left by a dead keeper: a living one would hold the directory's lock
        new = os.path.join(os.path.dirname(path), ".new")
        with suppress(FileNotFoundError):
            os.unlink(new)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        os.umask(0o177)
        self._listener.bind(new)
        self._listener.listen()
        os.rename(new, path)  # a process that has waited for the socket can connect to it
        self._identity = _identity(path)
        self._daemon: socket.socket | None = None
        self._newcomer: socket.socket | None = None
        """The latest connection, until its first request."""
        self._owner = ""
        self._kept: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the keeper is not needed any more."""
        look = time.monotonic() + LOOK_SECONDS
        while True:
            ready = [key.fileobj for key, _ in self._selector.select(max(0.0, look - time.monotonic()))]
            for connection in (self._daemon, self._newcomer):
                if connection is not None and connection in ready:
                    self._serve(connection)
            if self._listener in ready:
                self._accept()
            if time.monotonic() >= look:
                if not self._is_needed():
                    return
                look = time.monotonic() + LOOK_SECONDS

    def leave(self) -> None:
        """Remove the socket, unless another file has replaced it, or it cannot be removed."""
        if _identity(self._path) == self._identity:
            with suppress(OSError):  # the disk became read-only
                os.unlink(self._path)

    def _is_needed(self) -> bool:
        if _identity(self._path) != self._identity:
            return False
        return self._stay or self._daemon is not None or self._newcomer is not None or self._keeps_something()

    def _keeps_something(self) -> bool:
        return any(map(self._is_worth_keeping, self._kept))

    def _is_worth_keeping(self, name: str) -> bool:
        if name.startswith(PROCESS):
            poll = select.poll()
            poll.register(self._kept[name], select.POLLIN)
            return not poll.poll(0)
        return name.startswith(SEGMENT)

    # --- the daemon ---

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(PAUSE_SECONDS)
            return
        _, uid = passing.peer_of(connection)
        if uid != os.geteuid():
            connection.close()
            return
        self._hang_up(self._newcomer)
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._newcomer = connection

    def _hang_up(self, connection: socket.socket | None) -> None:
        if connection is None:
            return
        self._selector.unregister(connection)
        connection.close()
        if connection is self._daemon:
            self._daemon = None
        else:
            self._newcomer = None

    def _admit(self, connection: socket.socket, owner: str) -> None:
        """Make this the daemon's connection, and close the one before it; raises `Owned`."""
        if self._owner not in ("", owner):
            if self._daemon is not None or self._keeps_something():
                raise Owned(self._owner)
            close_all(self._kept.values())  # nothing in it is of use to another daemon
            self._kept.clear()
        self._owner = owner
        if connection is not self._daemon:
            self._hang_up(self._daemon)
            self._daemon, self._newcomer = connection, None

    def _serve(self, connection: socket.socket) -> None:
        """Answer one packet. Close a connection that the other end has closed, or that does not read its answers."""
        try:
            packet = receive(connection)
            answer, descriptors = self._answer(packet, connection)
            close_all(packet.descriptors)
            if not packet.data:
                self._hang_up(connection)
                return
            try:
                send(connection, answer, descriptors)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                send(connection, {"number": answer["number"], "error": f"cannot be sent now: {error.strerror}"}, [])
        except OSError:
            self._hang_up(connection)

    def _answer(self, packet: KeeperPacket, connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        """Carry out a request and return the answer. Descriptors that stay in the packet were not taken."""
        answer: dict[str, Any] = {"number": None}
        try:
            message = packet.message()
            number = message.pop("number", None)
            if type(number) is not int or not 0 <= number <= _MAX_NUMBER:
                raise PacketRefused("the request has no number")
            answer["number"] = number
            if connection is not self._daemon or "own" in message:
                self._admit(connection, _checked_owner(message.get("own", "")))
            match list(message.items()):
                case [("own", _)]:
                    packet.check_descriptors(0)
                case [("put", names)]:
                    self._put(_checked(names), packet)
                case [("drop", names)]:
                    packet.check_descriptors(0)
                    close_all(self._kept.pop(name) for name in _checked(names) if name in self._kept)
                case [("list", int(first))] if 0 <= first <= len(self._kept):
                    packet.check_descriptors(0)
                    names = list(itertools.islice(self._kept, first, first + MAX_DESCRIPTORS))
                    return answer | {"names": names, "count": len(self._kept)}, [self._kept[name] for name in names]
                case _:
                    raise PacketRefused("the request is not own, put, drop or list")
        except Owned as error:
            answer |= {"error": str(error), "owner": error.owner}
        except PacketRefused as error:
            answer["error"] = str(error)
        return answer, []

    def _put(self, names: list[str], packet: KeeperPacket) -> None:
        packet.check_descriptors(len(names))
        if len(self._kept.keys() | names) > self._most:
            raise PacketRefused(
                f"it has {len(self._kept)} descriptors and may have {max(0, self._most)}: raise ulimit -n"
            )
        close_all(self._kept[name] for name in names if name in self._kept)
        self._kept.update(zip(names, packet.descriptors, strict=True))
        packet.descriptors.clear()


def _checked_owner(owner: Any) -> str:
    """Return `owner` if it is a valid owner's name; raises `PacketRefused`."""
    if not isinstance(owner, str) or len(owner) > MAX_OWNER_LENGTH:
        raise PacketRefused(f"an owner is a string of at most {MAX_OWNER_LENGTH} characters")
    return owner


def _checked(names: Any) -> list[str]:
    """Return `names` if they are valid; raises `PacketRefused`."""
    if not isinstance(names, list) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        raise PacketRefused("names must be a list of strings of 1 to 255 characters of [A-Za-z0-9._-]")
    if len(names) > MAX_DESCRIPTORS or len(set(names)) < len(names):
        raise PacketRefused(f"a request has at most {MAX_DESCRIPTORS} names, all different")
    return names


def _take_directory(directory: str, wait: bool) -> int:
    """Open and lock the directory until this process ends, created if it is missing.

    It holds one keeper, and only this user can enter it.

    With `wait`, wait until another keeper has ended: the one that a daemon has started itself.
    """
    if why := stranger_in(Path(directory)):  # before anything is made in another user's directory
        raise OSError(f"{why}: name another directory for it, created if missing")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise OSError(f"{directory} is not this user's alone: name another directory for it, created if missing")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise OSError(f"another keeper uses {directory}") from error
    return descriptor


def _identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode of the file at a path, or None if there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def main(arguments: list[str] | None = None) -> int:
    """Run the keeper until it is not needed any more. Return the exit status: 0, or 1 if it cannot listen."""
    forget_inheritance()
    parser = argparse.ArgumentParser(
        prog="membroker-fdstore",
        description="Keep descriptors for a membrokerd that may die. The daemon starts this command itself "
        "where systemd does not keep them.",
    )
    parser.add_argument(
        "socket",
        metavar="SOCKET",
        help="path to listen at, in a directory of mode 0700 that is created if missing",
    )
    parser.add_argument(
        "--stay",
        action="store_true",
        help="wait for another keeper to end, and go on without a daemon and with nothing to keep: for a container, "
        "which would be started again and again",
    )
    given = parser.parse_args(arguments)
    path = os.path.abspath(given.socket)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        keeper = Keeper(path, given.stay)
    except OSError as error:
        print(f"membroker-fdstore: cannot listen at {path}: {error}", file=sys.stderr)
        return 1
    os.chdir("/")
    try:
        print(LISTENING, flush=True)
        keeper.run()
    finally:
        keeper.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
