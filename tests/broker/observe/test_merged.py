"""The metrics of several daemons as one, over real sockets: what one that misbehaves does to the others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from tests.support.daemons import DEADLINE_SECONDS

from membrokerd.observe import merged
from membrokerd.observe.merged import Merged
from membrokerd.observe.metrics_server import MetricsServer

GOOD = b"# HELP membroker_x A figure.\n# TYPE membroker_x gauge\nmembroker_x 1.0\n"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a test that says so gives a daemon less time than a busy machine may take."""
    monkeypatch.setattr(merged, "FETCH_SECONDS", DEADLINE_SECONDS)


@pytest.fixture
def good(stack: ExitStack) -> int:
    """Return the port of a daemon that answers."""
    server = MetricsServer("127.0.0.1", 0, lambda: GOOD, {}, lambda: b"<body><h1>good</h1></body>")
    server.start()
    stack.callback(server.close)
    return server.server_port


def serve(stack: ExitStack, *said: bytes, ends: bool = True) -> int:
    """Return the port of a daemon that says this, and then closes the connection or says a byte now and then."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    over = threading.Event()

    def answer() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(4096)
                    for part in said:
                        connection.sendall(part)
                    while not ends and not over.wait(0.05):
                        connection.sendall(b"x")

    thread = threading.Thread(target=answer)
    thread.start()
    stack.callback(thread.join)
    stack.callback(listener.shutdown, socket.SHUT_RDWR)
    stack.callback(over.set)
    return int(listener.getsockname()[1])


def head(length: int) -> bytes:
    return b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % length


def scrape(**ports: int) -> list[bytes]:
    """Return the lines of a scrape that are not comments."""
    text = Merged(lambda: ports, dict).render()
    return [line for line in text.splitlines() if not line.startswith(b"#")]


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(head(len(GOOD)) + GOOD[:-9], id="dies in the middle of a line"),
        pytest.param(head(merged.MAX_TEXT_BYTES + 1) + GOOD, id="too much"),
        pytest.param(head(13) + b"# not ours\nx\n", id="another program's metrics"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\n" + GOOD, id="how much is not said"),
        pytest.param(b"\x00\xff garbage\r\n", id="no HTTP"),
        pytest.param(b"HTTP/1.0 503 no\r\nContent-Length: 3\r\n\r\nno\n", id="an error"),
    ],
)
def test_a_daemon_that_fails_to_answer_is_left_out(stack: ExitStack, good: int, said: bytes) -> None:
    """It is killed while it answers, or another program has its port. One cut line would spoil the whole scrape."""
    ports = {"a": good, "b": serve(stack, said)}
    assert scrape(**ports) == [
        b'membroker_daemon_up{gpu_uuid="a"} 1',
        b'membroker_daemon_up{gpu_uuid="b"} 0',
        b'membroker_x{gpu_uuid="a"} 1.0',
    ]
    page = Merged(lambda: ports, dict).page()
    assert b'<div id="a"><h1>good</h1></div><hr><div id="b"><h1 class="bad">' in page
    assert page.index(b"<table>") < page.index(b"<h1>good</h1>"), "the table of all comes first"
    assert b'<tr class=bad><td class="name"><a href="#b">b</a></td><td>does not answer</td>' in page


@pytest.mark.parametrize("begin", [head(1 << 20), b"HTTP/1.0 200 "])
def test_an_answer_that_never_ends_is_cut(
    stack: ExitStack, good: int, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and the last one never does."""
    monkeypatch.setattr(merged, "FETCH_SECONDS", 0.5)
    endless = serve(stack, begin, ends=False)
    assert b'membroker_daemon_up{gpu_uuid="b"} 0' in scrape(a=good, b=endless)
