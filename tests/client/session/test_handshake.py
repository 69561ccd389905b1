"""The first round trip, with a broker that turns us away at the worst moments."""

from __future__ import annotations

import select
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from tests.support.daemons import DEADLINE_SECONDS

from membroker.errors import AccessDenied, BrokerUnavailable
from membroker.session.handshake import open_session
from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff
from membroker.wire import names

HELLO = pb.Hello(protocol_version=names.PROTOCOL_VERSION)


def refusal() -> bytes:
    """Return the frame that turns a stranger away."""
    info = Any()
    info.Pack(ErrorInfo(reason="ENDPOINT_FORBIDDEN", domain="membroker"))
    return handoff.encode(pb.Frame(reply=pb.Reply(error=Status(code=7, message="not you", details=[info]))))


@contextmanager
def broker(answer: Callable[[socket.socket], None]) -> Iterator[Path]:
    """Listen at a path, and treat one connection with `answer`, then close it."""
    with (
        tempfile.TemporaryDirectory(prefix="mb-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        path = Path(directory, "handoff.sock")
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        thread.join()


@pytest.mark.parametrize("is_greeted", [False, True])
def test_a_refusal_before_the_greeting_is_heard(is_greeted: bool) -> None:
    """The broker knows from the kernel that we may not enter, says so, and closes without reading our Hello."""

    def answer(connection: socket.socket) -> None:
        connection.send(refusal())
        assert not is_greeted or select.select([connection], [], [], DEADLINE_SECONDS)[0]

    for _ in range(50):
        with broker(answer) as path, pytest.raises(AccessDenied) as caught:
            open_session(path, HELLO, DEADLINE_SECONDS)
        assert caught.value.reason == "ENDPOINT_FORBIDDEN"


def test_a_timer_of_the_program_does_not_keep_a_silent_broker_waited_for() -> None:
    """A watchdog's SIGALRM every 50 ms: each began the wait for the Welcome again, and `connect` never ended."""
    over = threading.Event()

    def answer_late(_: socket.socket) -> None:
        over.wait()

    before = signal.signal(signal.SIGALRM, lambda *_: None)
    late = threading.Timer(DEADLINE_SECONDS, over.set)
    try:
        with broker(answer_late) as path:
            late.start()
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            with pytest.raises(BrokerUnavailable):
                open_session(path, HELLO, 0.5)
            assert not over.is_set(), "it waited until the broker had gone"
            over.set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        late.cancel()
