"""How a rank finds its scheduler, where any other program of the same user can connect; and how their lines end."""

from __future__ import annotations

import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError, Pipe, current_process
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import Caller

from membroker.kv.lines import hang_up
from membroker.kv.rank import CONNECTIONS, _accept_scheduler

STRANGERS = {
    "silent": b"",
    "half a word": struct.pack("!i", 20) + b"half",
    "too long": struct.pack("!i", 1 << 20),
    "longer": struct.pack("!i", -1) + struct.pack("!Q", 1 << 40),
    "negative": struct.pack("!i", -7),
    "without the key": struct.pack("!i", 16) + 16 * b"k",
}


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "rank.sock"))
        one.listen(CONNECTIONS)
        yield one


def stranger(listener: socket.socket, said: bytes) -> socket.socket:
    """Connect, and say this."""
    end = socket.socket(socket.AF_UNIX)
    end.connect(listener.getsockname())  # it waits while the backlog is full
    end.settimeout(DEADLINE_SECONDS)
    end.send(said)
    return end


def connect(listener: socket.socket) -> list[Connection]:
    """Connect as the scheduler does."""
    key = bytes(current_process().authkey)
    return [Client(listener.getsockname(), "AF_UNIX", key) for _ in range(CONNECTIONS)]


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_neither_ends_nor_delays_a_rank(listener: socket.socket, said: bytes) -> None:
    """More strangers than the backlog has room for come first, and one between; the engine is served all the same."""
    rank = Caller(lambda: _accept_scheduler(listener))
    strangers = [stranger(listener, said) for _ in range(2 * CONNECTIONS)]
    ours = Caller(lambda: connect(listener))
    theirs = rank.value()
    for number, (one, other) in enumerate(zip(ours.value(), theirs, strict=True)):
        one.send(number)
        assert other.recv() == number, "the connections have changed places"
        one.close()
        other.close()
    for end in strangers:
        with suppress(ConnectionResetError):
            while end.recv(1 << 16):
                pass
        end.close()
    until(lambda: not any(thread.name == "membroker-kv-rank-key" for thread in threading.enumerate()))


def test_a_second_scheduler_with_the_key_is_hung_up_on(listener: socket.socket) -> None:
    """It cannot come between: a rank that has its three connections takes no other."""
    rank = Caller(lambda: _accept_scheduler(listener))
    ours = connect(listener)
    theirs = rank.value()
    with pytest.raises((AuthenticationError, OSError)):
        Client(listener.getsockname(), "AF_UNIX", bytes(current_process().authkey))
    for connection in (*ours, *theirs):
        connection.close()


def test_a_connection_is_ended_by_a_process_without_a_free_descriptor() -> None:
    """An engine that has used up its descriptors must be able to end: a thread waits for this connection."""
    ours, theirs = Pipe()
    waits = threading.Thread(target=lambda: ours.poll(None), daemon=True)
    waits.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        hang_up(ours)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    waits.join(DEADLINE_SECONDS)
    assert not waits.is_alive()
    assert theirs.poll(0)
    ours.close()
    theirs.close()
