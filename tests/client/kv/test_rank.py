"""How a rank finds its scheduler, where any other program of the same user can connect; and how their lines end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.fake_broker import Caller

from membroker.kv import rank
from membroker.kv.rank import CONNECTIONS

STRANGERS = {
    "silent": b"",
    "half a word": b"\0half",
    "too long": b"\0" + (1 << 16) * b"k",
    "without the key": b"\0" + 32 * b"k",
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
    return [rank.connect(listener.getsockname(), number) for number in range(CONNECTIONS)]


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_neither_ends_nor_delays_a_rank(listener: socket.socket, said: bytes) -> None:
    """More strangers than the backlog has room for come first, and one between; the engine is served all the same."""
    waits = Caller(lambda: rank._accept_scheduler(listener))
    strangers = [stranger(listener, said) for _ in range(2 * CONNECTIONS)]
    ours = Caller(lambda: connect(listener))
    theirs = waits.value()
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


@pytest.mark.parametrize("number", [0, CONNECTIONS], ids=["a second one", "one too many"])
def test_another_connection_with_the_key_is_hung_up_on(listener: socket.socket, number: int) -> None:
    """It cannot come between: a rank has one connection of each number."""
    waits = Caller(lambda: rank._accept_scheduler(listener))
    first = rank.connect(listener.getsockname(), 0)
    with rank.connect(listener.getsockname(), number) as other, pytest.raises((EOFError, ConnectionResetError)):
        other.recv()
    rest = [rank.connect(listener.getsockname(), number) for number in range(1, CONNECTIONS)]
    for connection in (first, *rest, *waits.value()):
        connection.close()
