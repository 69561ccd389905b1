"""The door of a guest: clients and programs that are slow, silent, gone or many."""

from __future__ import annotations

import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from tests.support.daemons import until

from membroker.guest import door
from membroker.guest.door import Door
from membroker.guest.keeper import Guest
from membroker.guest.settings import Ports

NEVER = 1e6


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

    def __init__(self, family: socket.AddressFamily = socket.AF_INET) -> None:
        address = "127.0.0.1" if family == socket.AF_INET else "::1"
        self.listener = socket.create_server((address, 0), family=family)
        self.listener.settimeout(60)
        self.guest = FakeGuest()
        program = self.listener.getsockname()[1]
        self.door = Door(Ports("127.0.0.1", 0, program))  # a port that the kernel chooses: no other program can have it

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.door.port), timeout=60)

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(60)
        return connection

    def is_left(self) -> None:
        until(lambda: self.guest.connections == 0)


@contextmanager
def opened(*, is_awake: bool = True, **options: Any) -> Iterator[Bench]:
    bench = Bench(**options)
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
            assert bench.guest.came.wait(60)
            assert bench.guest.most == 1
            bench.guest.is_awake = True
            with bench.accept() as program:
                assert program.recv(100) == b"GET"


def test_a_client_that_waits_for_the_server_to_speak_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "FIRST_SECONDS", 0.01)
    with opened(is_awake=False) as bench, bench.connect() as client:
        assert bench.guest.came.wait(60)
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
                assert bench.guest.came.wait(60)
                bench.guest.came.clear()
        bench.is_left()


def test_no_more_connections_are_open_than_there_are_descriptors_and_the_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "most_connections", lambda: 2)
    monkeypatch.setattr(door, "SILENT_SECONDS", 0.01)
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
        bench.is_left()


def test_the_descriptors_that_connections_may_have_follow_the_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft // 2, 328), hard))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert door.most_connections() == min(door.MOST_CONNECTIONS, (limit - door.KEPT_DESCRIPTORS) // 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


def test_a_client_that_breaks_off_ends_the_connection_to_the_program() -> None:
    """Engines stop to compute for a client that is gone."""
    with opened() as bench:
        client = bench.connect()
        client.sendall(b"GET")
        with bench.accept() as program:
            assert program.recv(100) == b"GET"
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            assert program.recv(100) == b""
            bench.is_left()


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


def test_a_program_that_listens_at_ipv6_alone_is_found() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6")
    with opened(family=socket.AF_INET6) as bench, bench.connect() as client:
        client.sendall(b"GET")
        with bench.accept() as program:
            assert program.recv(100) == b"GET"


def test_a_door_that_is_closed_waits_for_nobody() -> None:
    with opened() as bench, bench.connect() as client:
        client.sendall(b"GET")
        bench.accept().close()
    assert bench.guest.connections == 0
