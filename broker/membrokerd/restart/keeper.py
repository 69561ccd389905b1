"""The command `membroker-fdstore`: keeps named descriptors for a daemon that may die, and does nothing else.

One packet on its SOCK_SEQPACKET socket is one JSON object, with at most 64 descriptors beside it. A request has a
number and one more key, and is answered in its turn with that number:

    {"number": 1, "put": [NAME, …]}     and a descriptor for each; a name that is there already is replaced
    {"number": 2, "drop": [NAME, …]}    a name that is not there is no error
    {"number": 3, "list": FIRST}        the names from this place on, 0 for the first
    {"number": 4, "own": OWNER}         this connection is the daemon's of OWNER, `<runtime>/<device>`

    {"number": 1}                                       done
    {"number": 3, "names": [NAME, …], "count": COUNT}   with their descriptors; there are COUNT names in all
    {"number": 1, "error": SENTENCE}                    nothing was done; number null where the packet has none
    {"number": 4, "error": SENTENCE, "owner": OWNER}    it keeps for this owner, and for no other

It serves one daemon: a newer connection replaces the older with its first request. While the owner is connected, or
something of it is worth keeping, every other owner is refused and changes nothing. It ends on SIGTERM, when its
socket's path leads no longer to it, and when no daemon is connected and nothing is left that is worth keeping. What
makes a daemon fail must not reach it, and it must start fast: it imports a little of the standard library, and never
touches CUDA.
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
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from membroker.wire import descriptors as passing
from membroker.wire.descriptors import close_all
from membroker.wire.names import MAX_DESCRIPTORS
from membroker.wire.standard import open_standard_descriptors

LISTENING = "listening"
"""What it says on its standard output once it can be connected to."""
SEGMENT, PROCESS = "segment.", "process."
"""How the names begin of what is worth keeping: of memory always, of a process's pidfd while it lives."""
MAX_PACKET_BYTES = 32_768
LOOK_SECONDS = 2.0
"""How often it looks whether it is of use, so also how long it waits for its first connection."""
PAUSE_SECONDS = 0.1
"""How long accepting rests when the machine has no descriptor left."""
RESERVED = MAX_DESCRIPTORS + 16
"""Descriptors that are not for names: a packet's, before it is accepted, and the keeper's own."""

MAX_OWNER_LENGTH = 255

_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
_MAX_NUMBER = (1 << 63) - 1
_CREDENTIALS = struct.Struct("3i")


class Refused(Exception):
    """A packet that nothing is done about. The message is a sentence for its sender."""


class Owned(Refused):
    """The keeper is another owner's."""

    def __init__(self, owner: str) -> None:
        super().__init__(
            f"it keeps the descriptors of {owner}: give each device a keeper of its own, "
            'as keeper_socket = "/run/membroker-keeper/{device}/fdstore.sock" does, '
            f"or end this keeper (process {os.getpid()}) where that device's daemon is gone for good"
        )
        self.owner = owner


class Packet(NamedTuple):
    """One packet as it was received. The descriptors are the receiver's to close."""

    data: bytes
    descriptors: list[int]
    flags: int

    def message(self) -> dict[str, Any]:
        """Return the object in it; raises `Refused`."""
        if self.flags & socket.MSG_TRUNC:
            raise Refused(f"the packet is longer than {MAX_PACKET_BYTES} bytes")
        try:
            message = json.loads(self.data)
        except (ValueError, RecursionError) as error:
            raise Refused("the packet is not JSON") from error
        if not isinstance(message, dict):
            raise Refused("the packet is not a JSON object")
        return message

    def check_descriptors(self, count: int) -> None:
        """Raise `Refused` unless it came with so many descriptors."""
        if self.flags & socket.MSG_CTRUNC:
            raise Refused(f"descriptors were lost: more than {MAX_DESCRIPTORS} were sent, or no more may be open here")
        if len(self.descriptors) != count:
            raise Refused(f"the packet has {len(self.descriptors)} descriptors and needs {count}")


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Send one packet. The descriptors stay open and the caller's; raises what `sendmsg` raises."""
    passing.send(connection, json.dumps(message).encode(), descriptors)


def receive(connection: socket.socket) -> Packet:
    """Receive one packet; no bytes mean that the other end is gone. Raises what `recvmsg` raises."""
    return Packet(*passing.receive(connection, MAX_PACKET_BYTES))


class Keeper:
    """The descriptors by name, the socket, and the one daemon that is connected."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._most = _raise_descriptor_limit() - RESERVED
        self._directory = _take_directory(os.path.dirname(path))
        with suppress(FileNotFoundError):
            os.unlink(path)  # a dead keeper's: a living one has the directory
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        os.umask(0o177)
        self._listener.bind(path)
        self._listener.listen()
        self._place = _place(path)
        self._daemon: socket.socket | None = None
        self._newcomer: socket.socket | None = None
        """The latest connection that has not asked for anything yet."""
        self._owner = ""
        self._kept: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until it is of no use."""
        look = time.monotonic() + LOOK_SECONDS
        while True:
            ready = [key.fileobj for key, _ in self._selector.select(max(0.0, look - time.monotonic()))]
            for connection in (self._daemon, self._newcomer):
                if connection is not None and connection in ready:
                    self._serve(connection)
            if self._listener in ready:
                self._accept()
            if time.monotonic() >= look:
                if not self._is_of_use():
                    return
                look = time.monotonic() + LOOK_SECONDS

    def leave(self) -> None:
        """Take the socket away, if it is still this keeper's."""
        if _place(self._path) == self._place:
            os.unlink(self._path)

    def _is_of_use(self) -> bool:
        if _place(self._path) != self._place:
            return False
        return self._daemon is not None or self._newcomer is not None or self._keeps_something()

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
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] & 0xFFFFFFFF != os.geteuid():
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
        """Make a connection the daemon's, in the place of the one before; raises `Owned`."""
        if self._owner not in ("", owner):
            if self._daemon is not None or self._keeps_something():
                raise Owned(self._owner)
            close_all(self._kept.values())  # nothing that another daemon could use
            self._kept.clear()
        self._owner = owner
        if connection is not self._daemon:
            self._hang_up(self._daemon)
            self._daemon, self._newcomer = connection, None

    def _serve(self, connection: socket.socket) -> None:
        """Answer one packet. A connection that takes no answers is ended, and so is one that has been closed."""
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

    def _answer(self, packet: Packet, connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        """Carry a request out; what is left in the packet's descriptors was not taken."""
        answer: dict[str, Any] = {"number": None}
        try:
            message = packet.message()
            number = message.pop("number", None)
            if type(number) is not int or not 0 <= number <= _MAX_NUMBER:
                raise Refused("the request has no number")
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
                    raise Refused("the request is none of own, put, drop and list")
        except Owned as error:
            answer |= {"error": str(error), "owner": error.owner}
        except Refused as error:
            answer["error"] = str(error)
        return answer, []

    def _put(self, names: list[str], packet: Packet) -> None:
        packet.check_descriptors(len(names))
        if len(self._kept.keys() | names) > self._most:
            raise Refused(f"{len(self._kept)} descriptors are kept, of {self._most} that may be: raise ulimit -n")
        close_all(self._kept[name] for name in names if name in self._kept)
        self._kept.update(zip(names, packet.descriptors, strict=True))
        packet.descriptors.clear()


def _checked_owner(owner: Any) -> str:
    """Return an owner's name, if that is what it is."""
    if not isinstance(owner, str) or len(owner) > MAX_OWNER_LENGTH:
        raise Refused(f"an owner is a string of at most {MAX_OWNER_LENGTH} characters")
    return owner


def _checked(names: Any) -> list[str]:
    """Return the names, if that is what they are."""
    if not isinstance(names, list) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        raise Refused("names are a list of strings of 1 to 255 of [A-Za-z0-9._-]")
    if len(names) > MAX_DESCRIPTORS or len(set(names)) < len(names):
        raise Refused(f"names are at most {MAX_DESCRIPTORS}, each once")
    return names


def _take_directory(directory: str) -> int:
    """Return the directory, locked until this process ends: there is one keeper in it, and nobody else gets in."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise OSError(f"{directory} is not this user's alone: name a directory that only the keeper uses; one is made")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(f"another keeper has {directory}") from error
    return descriptor


def _place(path: str) -> tuple[int, int] | None:
    """Return what tells the file at a path from every other."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _raise_descriptor_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def main(arguments: list[str] | None = None) -> int:
    """Keep descriptors until it is of no use; returns its exit status: 0, or 1 when it cannot listen."""
    open_standard_descriptors()
    parser = argparse.ArgumentParser(
        prog="membroker-fdstore",
        description="Keep descriptors for a membrokerd that may die. Where systemd keeps none, it starts this itself.",
    )
    parser.add_argument(
        "socket", metavar="SOCKET", help="where to listen, in a directory of mode 0700; made where it is missing"
    )
    path = os.path.abspath(parser.parse_args(arguments).socket)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        keeper = Keeper(path)
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
