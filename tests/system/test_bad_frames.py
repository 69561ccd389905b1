"""What a malformed frame gets, before a Hello and after it: a closed connection, and books that did not move."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from google.rpc.status_pb2 import Status
from tests.support import raw
from tests.support.daemons import Daemon, hold_still, running, until
from tests.support.lingering import pass_lingering
from tests.support.raw import Connection, Session, reason
from tests.support.scene import CONFIG, PAGE, TAKES_DESCRIPTORS, Scene

import membroker
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2
from membroker.wire import frames as handoff
from membrokerd.system.device_directory import SO_PASSRIGHTS

# --- Before a Hello ---

MINE = "tenants/red/models/mine"
LARGEST = 65_536
UNGREETED: dict[str, bytes] = {
    "garbage": b"\xff" * 40,
    "a frame cut short": raw.hello(client="raw client").SerializeToString()[:-4],
    "a frame of no kind": pb.Frame(request_id=1).SerializeToString(),
    "a frame of a later kind": b"\x08\x01\xa2\x06\x00",
    "no UTF-8": b"\x12\x04\x1a\x02\xff\xff",
    "200 kB": b"\x12" * 200_000,
    "allocate": pb.Frame(request_id=1, allocate=raw.allocation(MINE, PAGE)).SerializeToString(),
    "release": pb.Frame(release=bpb.ReleaseExtentsRequest(no_reply=True)).SerializeToString(),
    "the broker's Welcome": pb.Frame(welcome=pb.Welcome()).SerializeToString(),
}


def test_what_is_no_hello_ends_the_connection(scene: Scene, unmoved: Callable[[], None]) -> None:
    """Each is refused for its reason, and leaves no descriptor open. tests/fuzz mutates honest frames, too."""
    unmoved()
    before = scene.daemon.descriptors()
    for case, packet in UNGREETED.items():
        assert _last_words(scene, packet) == "PROTOCOL_VIOLATION", case
    assert _last_words(scene, b"") is None
    assert _last_words(scene, raw.hello((1 << 32) - 1).SerializeToString()) == "UNSUPPORTED_VERSION"
    until(lambda: scene.daemon.descriptors() <= before)


def _last_words(scene: Scene, packet: bytes) -> str | None:
    """Return why a stranger's first packet was refused; None where it was cut without a word."""
    with Connection(scene.daemon.endpoint()) as stranger:
        stranger.send_bytes(packet)
        last = stranger.last_words()
    return None if last is None else reason(last)


def test_the_largest_frame_is_read_and_a_larger_one_is_not(scene: Scene) -> None:
    """Most of it is a field that this version does not know, and skips."""
    greeting = raw.hello((1 << 32) - 1)
    assert _last_words(scene, _filled(greeting, LARGEST)) == "UNSUPPORTED_VERSION"
    assert _last_words(scene, _filled(greeting, LARGEST + 1)) == "PROTOCOL_VIOLATION"
    with Session(scene.daemon.endpoint()) as session:
        request = pb.Frame(request_id=88, allocate=raw.allocation(session.register("mine"), PAGE))
        session.send_bytes(_filled(request, LARGEST))
        assert len(session.answer(88)[1]) == 1


def _filled(frame: pb.Frame, size: int) -> bytes:
    data = frame.SerializeToString()
    content = size - len(data) - 5
    length = bytes([content & 0x7F | 0x80, content >> 7 & 0x7F | 0x80, content >> 14])
    return data + b"\xa2\x06" + length + bytes(content)


def _can_refuse_descriptors() -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        except OSError:
            return False
        return True


@pytest.mark.skipif(not _can_refuse_descriptors(), reason="needs Linux 6.16")
def test_nobody_can_pass_a_descriptor(daemon: Daemon) -> None:
    """Who closes the last descriptor of a file waits for the file.

    If that is a file of a FUSE file system with a cache for writes, whose program answers no write, that is for as long
    as this program likes, and no signal ends the wait: it may be any user's. A daemon that has been passed such a file
    cannot end, keeps its lock, and so has no successor; with some more of them its endpoint accepts nobody.
    """
    for path, kind in (
        (daemon.endpoint("red") / "handoff.sock", socket.SOCK_SEQPACKET),
        (daemon.endpoint("red") / "grpc.sock", socket.SOCK_STREAM),
        (daemon.admin / "grpc.sock", socket.SOCK_STREAM),
    ):
        with socket.socket(socket.AF_UNIX, kind) as sock:
            with hold_still(daemon):
                sock.connect(str(path))
                with pytest.raises(PermissionError):  # it waits to be accepted
                    handoff.send(sock, b"x", [0])
            with pytest.raises(PermissionError):
                handoff.send(sock, b"x", [0])
    with Session(daemon.endpoint("red")) as session, pytest.raises(PermissionError):
        handoff.send(session.sock, b"x", [0])


PLACES: dict[str, Callable[[Daemon], AbstractContextManager[object]]] = {
    "before the Hello": lambda daemon: _passes(daemon),
    "behind a packet of 0 bytes": lambda daemon: _passes(daemon, b""),
    "unread behind garbage": lambda daemon: _passes(daemon, b"\xff" * 40),
    "in a session": lambda daemon: _passes_in_session(daemon),
    "at the gRPC socket": lambda daemon: _passes_at_grpc(daemon),
    "out of band at the gRPC socket": lambda daemon: _passes_at_grpc(daemon, socket.MSG_OOB),
    "on the socket of notices": lambda daemon: _passes_on_notices(daemon),
}


def test_descriptors_unasked_are_never_installed(scene: Scene, unmoved: Callable[[], None]) -> None:
    """A stranger cannot fill the daemon's table of descriptors, nor hand it one that wakes it up."""
    unmoved()
    before = scene.daemon.descriptors()
    mine, theirs = socket.socketpair()
    with mine, theirs:
        for _ in range(20):
            with Connection(scene.daemon.endpoint()) as stranger:
                stranger.send_bytes(raw.hello().SerializeToString(), [theirs.fileno()] * 64)
                last = stranger.last_words()
                assert last is not None
                assert reason(last) == "PROTOCOL_VIOLATION"
    until(lambda: scene.daemon.descriptors() <= before)


@pytest.mark.parametrize("place", PLACES)
def test_a_socket_that_lingers_holds_nobody_up(place: str, scene: Scene) -> None:
    """A thread that reads or closes the last descriptor of such a socket waits for an hour."""
    before = scene.daemon.descriptors()
    for _ in range(3):
        with PLACES[place](scene.daemon):
            with Session(scene.daemon.endpoint("blue")) as other:
                other.release(other.borrow(other.register("m"), PAGE))
            until(lambda: scene.daemon.descriptors() <= before)


def _passes(daemon: Daemon, *packets: bytes) -> socket.socket:
    """Send packets, then a Hello with a socket that lingers, and leave."""
    with hold_still(daemon), Connection(daemon.endpoint("red")) as connection:
        for data in packets:
            connection.send_bytes(data)
        return pass_lingering(connection.sock, raw.hello().SerializeToString())


def _passes_in_session(daemon: Daemon) -> socket.socket:
    """Its connection ends, and the session goes on."""
    with Session(daemon.endpoint("red")) as session:
        with hold_still(daemon):
            end = pass_lingering(session.sock, raw.hello().SerializeToString())
        last = session.last_words()
        assert last is not None
        assert reason(last) == "PROTOCOL_VIOLATION"
        session.resume()
    return end


def _passes_at_grpc(daemon: Daemon, flags: int = 0) -> socket.socket:
    """Pass it with the last byte before others. The kernel has one byte at a time that is out of band."""
    with hold_still(daemon), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon.endpoint("red") / "grpc.sock"))
        end = pass_lingering(sock, b"P", flags)
        sock.send(b"RI * HTTP/2.0")
        return end


def _passes_on_notices(daemon: Daemon) -> AbstractContextManager[None]:
    """The broker reads nothing there, and its end takes nothing."""
    with Session(daemon.endpoint("red")) as session, pytest.raises(BrokenPipeError):
        pass_lingering(session.notices, b"x")
    return nullcontext()


# --- After a Hello: each of these ends the connection, and the session stays charged until its process ends ---


def _acked_twice(session: Session) -> None:
    name = session.register("mine")
    session.send(pb.Frame(request_id=5, allocate=raw.allocation(name, PAGE)))
    session.answer(5)
    session.send(pb.Frame(request_id=5, ack=pb.Ack(part=0)))


def _acked_a_part_that_is_not(session: Session) -> None:
    name = session.register("mine")
    session.send(pb.Frame(request_id=5, allocate=raw.allocation(name, PAGE)))
    session.answer(5, acknowledge=False)
    session.send(pb.Frame(request_id=5, ack=pb.Ack(part=(1 << 32) - 1)))


def _sends(frame: pb.Frame, *descriptors: int) -> Callable[[Session], None]:
    return lambda session: session.send_bytes(frame.SerializeToString(), descriptors)


VIOLATIONS: dict[str, Callable[[Session], None]] = {
    "Hello twice": _sends(raw.hello()),
    "a Welcome": _sends(pb.Frame(welcome=pb.Welcome(token="x"))),
    "a Delivery": _sends(pb.Frame(delivery=pb.Delivery(parts=1, extent_ids=[1]))),
    "a Reply": _sends(pb.Frame(reply=pb.Reply(goodbye=pb.GoodbyeResponse()))),
    "a Notice": _sends(pb.Frame(notice=pb.Notice(stopping=pb.Stopping()))),
    "an Ack of nothing": _sends(pb.Frame(request_id=77, ack=pb.Ack())),
    "an Ack twice": _acked_twice,
    "an Ack of part 2^32-1": _acked_a_part_that_is_not,
    "descriptors": _sends(pb.Frame(request_id=1, allocate=raw.allocation(MINE, PAGE)), 0, 1, 2),
    "garbage": lambda session: session.send_bytes(b"\xff" * 9),
    "65,537 bytes": _sends(pb.Frame(request_id=1, declare=bpb.DeclareMemoryRequest(model="x" * 65_527))),
    "200 kB": lambda session: session.send_bytes(bytes(200_000)),
    "an empty packet": lambda session: session.send_bytes(b""),
}


def test_violations_end_the_connection_and_nothing_else() -> None:
    """Each ends its own connection; its session stays charged, detached; nobody else notices."""
    with (
        running(CONFIG, module=TAKES_DESCRIPTORS) as daemon,
        membroker.connect(str(daemon.endpoint("blue"))) as worker,
    ):
        scene = Scene(daemon, worker, worker.model("honest"))
        for case, violate in VIOLATIONS.items():
            session = Session(daemon.endpoint())
            with session:
                violate(session)
                last = session.last_words()
                name = session.welcome.session
            if case != "an empty packet":
                assert last is not None, case
                assert reason(last) == "PROTOCOL_VIOLATION", case
            until(lambda name=name: _state(daemon, name) == resources_pb2.Session.DETACHED)
            answer = raw.grpc_call(daemon.endpoint(), session.token, "AllocateExtents", raw.allocation(MINE, PAGE))
            assert isinstance(answer, Status), "a session without a connection was lent memory"
        scene.unharmed()
        assert daemon.books().lent_bytes == 2 * PAGE, "what was delivered to two of them"


def _state(daemon: Daemon, name: str) -> Any:
    return next((one.state for one in daemon.sessions() if one.name == name), None)
