"""A fault of the broker between a Hello and its Welcome leaves no session, or one that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import faulty_daemon
from tests.support.daemons import Daemon, running, until
from tests.support.raw import Connection, Session, hello, reason
from tests.support.sizes import PAGE

from membroker.v1 import handoff_pb2 as pb

WHEN = ("before", "after")


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon with faults. It is killed, because its log has them."""
    monkeypatch.setenv(faulty_daemon.ARMED, str(tmp_path / "armed"))
    with running(module="tests.support.faulty_daemon raise_in_handshake") as found:
        with Session(found.endpoint()) as first:  # what is opened once
            first.borrow(first.register("m"), PAGE)
        until(lambda: not found.sessions())
        try:
            yield found
        finally:
            found.kill()


def arm(what: str) -> None:
    faulty_daemon.armed_path().write_text(what)


def said_to(daemon: Daemon, frame: pb.Frame) -> str:
    """Send the first frame of a connection. Return why the broker has ended that."""
    with Connection(daemon.endpoint()) as line:
        line.send(frame)
        status = line.last_words()
    assert not faulty_daemon.armed_path().exists(), "the handshake did not come there"
    return reason(status)


@pytest.mark.parametrize("when", WHEN)
def test_a_fault_in_a_handshake_leaves_no_session(daemon: Daemon, when: str) -> None:
    """At each step of it. The client hears INTERNAL, and nothing is left of the session."""
    open_before = daemon.descriptors()
    for step in faulty_daemon.HANDSHAKE:
        arm(f"{when} {step}")
        assert said_to(daemon, hello()) == "INTERNAL", step
        assert not daemon.sessions(), step
    until(lambda: daemon.descriptors() <= open_before)
    with Session(daemon.endpoint()) as session:
        assert session.borrow(session.register("m"), PAGE)


@pytest.mark.parametrize("when", WHEN)
def test_a_session_whose_resume_fails_can_be_resumed(daemon: Daemon, when: str) -> None:
    """At each step of its handshake. Until then it is detached, with all that it has."""
    with Session(daemon.endpoint()) as session:
        lent = session.borrow(session.register("m"), PAGE)
        open_before = daemon.descriptors()
        for step in [one for one in faulty_daemon.HANDSHAKE if one not in ("token", "pidfd kept")]:
            session.sock.close()
            arm(f"{when} {step}")
            again = pb.Frame(request_id=1, hello=pb.Hello(protocol_version=1, resume_token=session.token))
            assert said_to(daemon, again) == "INTERNAL", step
            (row,) = daemon.sessions()
            assert (row.state, row.books[0].used_bytes) == (row.DETACHED, PAGE), step
            session.resume(lent)
        until(lambda: daemon.descriptors() <= open_before)
        session.release(lent)
    until(lambda: not daemon.sessions())
