"""The door of a guest: clients and programs that are slow, silent, gone or many."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until

from membroker.guest import door
from membroker.guest.door import Door
from membroker.guest.keeper import Guest
from membroker.guest.settings import Ports

NEVER = 1e6
SAID_BYTES = 1 << 15
"""It fits into a socket whose other end has read nothing: a reset drops what is not under way."""


class FakeGuest:
    def __init__(self) -> None:
        self.is_awake = True
        self.connections = self.most = 0
        self.came = threading.Event()

    def connected(self, change: int) -> None:
        self.connections += change
        self.most = max(self.most, self.connections)
        if change > 0:
            self.came.set()


class Bench:
    """A door, its guest, and the port of the program, at which nobody listens yet."""

    def __init__(self) -> None:
        address = "127.0.0.1"
        self.listener = socket.create_server((address, 0))
        self.listener.settimeout(DEADLINE_SECONDS)
        self.guest = FakeGuest()
        self.program = self.listener.getsockname()[1]
        self.address = address
        self.said: list[str] = []
        self.door = Door(Ports(address, 0, self.program), self.said.append)  # 0: a port that no other program can have

    def connect(self) -> socket.socket:
        return socket.create_connection((self.address, self.door.port), timeout=DEADLINE_SECONDS)

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(DEADLINE_SECONDS)
        return connection

    def is_left(self) -> None:
        until(lambda: self.guest.connections == 0)


@contextmanager
def opened(*, is_awake: bool = True) -> Iterator[Bench]:
    bench = Bench()
    bench.door.open(cast("Guest", bench.guest))
    bench.guest.is_awake = is_awake
    until(lambda: bench.door._awake.is_set() == is_awake)
    try:
        yield bench
    finally:
        bench.door.close()
        bench.listener.close()


def test_a_probe_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "FIRST_SECONDS", NEVER)
    with opened(is_awake=False) as bench:
        for _ in range(20):
            bench.connect().close()
        with bench.connect() as client:
            client.sendall(b"GET")
            assert bench.guest.came.wait(DEADLINE_SECONDS)
            assert bench.guest.most == 1
            bench.guest.is_awake = True
            with bench.accept() as program:
                assert program.recv(100) == b"GET"


def test_a_client_that_waits_for_the_server_to_speak_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "FIRST_SECONDS", 0.01)
    with opened(is_awake=False) as bench, bench.connect() as client:
        assert bench.guest.came.wait(DEADLINE_SECONDS)
        bench.guest.is_awake = True
        with bench.accept() as program:
            program.sendall(b"220 hello")
            assert client.recv(100) == b"220 hello"


def test_a_client_that_goes_while_it_waits_is_forgotten() -> None:
    """A client with a time-out asks again and again, while the broker has no room."""
    with opened(is_awake=False) as bench:
        for _ in range(5):
            with bench.connect() as client:
                client.sendall(b"GET")
                assert bench.guest.came.wait(DEADLINE_SECONDS)
                bench.guest.came.clear()
        bench.is_left()


def test_no_more_connections_are_open_than_there_are_descriptors_and_the_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "most_connections", lambda: 2)
    monkeypatch.setattr(door, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(door, "FIRST_SECONDS", NEVER)
    with opened() as bench:
        clients = [bench.connect() for _ in range(6)]
        for client in clients:
            client.sendall(b"?")
        for served in range(6):
            with bench.accept() as program:
                assert program.recv(1) == b"?"
                assert bench.guest.most <= 2, served
                program.sendall(b"!")
        answers = []
        for client in clients:
            with client:
                answers.append(client.recv(1))
        assert answers == [b"!"] * 6
        assert [text.partition(" connections")[0] for text in bench.said] == ["its 2"], "once, however many wait"
        bench.is_left()


def test_clients_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have all places, for as long as the program lets them. One that has carried a byte, either way, stays."""
    monkeypatch.setattr(door, "most_connections", lambda: 4)
    monkeypatch.setattr(door, "FIRST_SECONDS", NEVER)
    with opened() as bench, ExitStack() as stack:

        def connect() -> tuple[socket.socket, socket.socket]:
            return stack.enter_context(bench.connect()), stack.enter_context(bench.accept())

        asks, program = connect()
        asks.sendall(b"?")
        assert program.recv(1) == b"?"
        hears, program = connect()
        program.sendall(b"220 hello")
        assert hears.recv(100) == b"220 hello"
        silent = [connect()[0] for _ in range(2)]
        monkeypatch.setattr(door, "FIRST_SECONDS", 0.0)
        for one in silent:
            client = stack.enter_context(bench.connect())
            client.sendall(b"GET")
            program = stack.enter_context(bench.accept())
            assert program.recv(100) == b"GET"
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""
        assert not select.select([asks, hears], [], [], 0.0)[0], "it was ended, and was not silent"


def test_one_that_speaks_at_the_moment_at_which_the_program_is_reached_is_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fed = list[bytes]()
    feed, reach = asyncio.StreamReader.feed_data, Door._reach

    def note(reader: asyncio.StreamReader, data: bytes) -> None:
        feed(reader, data)
        fed.append(data)

    async def until_then(one: Door) -> Any:
        side = await reach(one)
        while not fed:
            await asyncio.sleep(0)
        return side

    monkeypatch.setattr(asyncio.StreamReader, "feed_data", note)
    monkeypatch.setattr(Door, "_reach", until_then)
    with opened() as bench, bench.connect() as client, bench.accept() as program:
        client.sendall(b"GET")
        assert program.recv(100) == b"GET"
        assert not bench.door._silent


@pytest.mark.parametrize("answer", [0, 1 << 16], ids=["silent", "reads nothing"])
def test_a_client_does_not_stay_when_the_program_has_closed(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    monkeypatch.setattr(door, "SILENT_SECONDS", 0.05)
    with opened() as bench, bench.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET")
        with bench.accept() as program:
            assert program.recv(100) == b"GET"
            program.sendall(bytes(answer))
        if not answer:
            assert client.recv(100) == b""
        bench.is_left()


@pytest.mark.parametrize("who", ["client", "program"])
def test_a_side_that_breaks_off_ends_the_other_as_broken(who: str) -> None:
    """Engines stop to compute for a client that is gone, and half an answer without a length is not taken for all."""
    with opened() as bench, bench.connect() as client, ExitStack() as ends:
        client.sendall(b"GET")
        program = ends.enter_context(bench.accept())
        assert program.recv(100) == b"GET"
        program.sendall(b"half")
        assert client.recv(100) == b"half"
        one, other = (client, program) if who == "client" else (program, client)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
        with pytest.raises(ConnectionResetError):
            other.recv(100)
        bench.is_left()


def test_what_a_program_says_before_it_breaks_off_reaches_the_client() -> None:
    """A server that refuses a large request answers without reading it, and closes: that is a reset."""
    with opened() as bench, bench.connect() as client:
        client.sendall(b"POST")
        with bench.accept() as program:
            assert program.recv(1) == b"P"
            program.sendall(bytes(SAID_BYTES))
        got = 0
        with suppress(ConnectionResetError):
            while data := client.recv(1 << 16):
                got += len(data)
        assert got == SAID_BYTES
        bench.is_left()


def test_a_client_that_has_vanished_is_looked_for() -> None:
    """It would be counted for ever, and the program kept awake. The kernel asks it: its timer 2 runs."""

    def timers() -> set[str]:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return {
            row[5].partition(":")[0] for row in rows if row[1].endswith(f":{bench.door.port:04X}") and row[3] == "01"
        }

    with opened() as bench, bench.connect() as client:
        client.sendall(b"GET")
        with bench.accept():
            until(lambda: timers() == {"02"})


def test_a_client_that_has_said_all_gets_all() -> None:
    with opened() as bench, bench.connect() as client:
        client.sendall(b"GET")
        client.shutdown(socket.SHUT_WR)
        with bench.accept() as program, program.makefile("rb") as heard:
            assert heard.read() == b"GET"
            program.sendall(bytes(1 << 20))
        with client.makefile("rb") as answer:
            assert len(answer.read()) == 1 << 20
        bench.is_left()


KEPT_BYTES = 256 << 10
"""What the door may keep for a connection, both directions together."""


def test_what_nobody_reads_is_not_kept() -> None:
    """Clients and the program send on and on, and read nothing: it stays in the kernel, which bounds it."""
    count = 8
    with opened() as bench, ExitStack() as stack:
        stack.callback(tracemalloc.stop)
        tracemalloc.start()
        ends = []
        for _ in range(count):
            ends += [stack.enter_context(bench.connect()), stack.enter_context(bench.accept())]
        for end in ends:
            end.setblocking(False)
        while writable := select.select([], ends, [], 0.2)[1]:  # else the door takes nothing more
            for end in writable:
                with suppress(BlockingIOError):
                    end.send(bytes(1 << 16))
        kept, _ = tracemalloc.get_traced_memory()
    assert kept < count * KEPT_BYTES
