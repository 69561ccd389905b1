"""Frames of each length from nothing to a page, and of each power of two and its neighbours to past the largest.

As noise, as the beginning of a longer frame, and as frames that are whole and filled up with fields that this version
does not know, which it skips. Whatever the length, there is a typed answer, the books stay, and the daemon goes on.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support import raw
from tests.support.daemons import Daemon, running
from tests.support.raw import Connection, Session, reason
from tests.support.workers import PAGE, descriptors_at_start, until_clean

from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb

pytestmark = pytest.mark.deep

LARGEST = 65_536
POWERS = sorted({(1 << power) + beside for power in range(18) for beside in (-1, 0, 1)})
LENGTHS = sorted({*range(4_097), *POWERS})
assert POWERS[-3:] == [131_071, 131_072, 131_073]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for all lengths; at the end it has nothing lent, and no descriptor more than at its start."""
    with running({"log": {"level": "info"}}) as one:
        at_start = descriptors_at_start(one)
        yield one
        until_clean(one, at_start)


@pytest.fixture
def unmoved(daemon: Daemon) -> Iterator[None]:
    """Nothing of the books may move: no session begins, and none is lent anything."""
    before = daemon.device().revision
    yield
    assert daemon.device().revision == before
    unharmed(daemon)


def unharmed(daemon: Daemon) -> None:
    """An honest session is lent two packets, and gives them back."""
    with Session(daemon.endpoint("blue")) as session:
        ids = session.borrow(session.register("honest"), PAGE, 65)
        assert session.call(release=bpb.ReleaseExtentsRequest(extent_ids=ids)).released_bytes == 65 * PAGE
    assert daemon.books().lent_bytes == 0


def greeting(client: str = "", version: int = 1) -> pb.Frame:
    """Return a Hello that is as short as it can be."""
    return pb.Frame(hello=pb.Hello(protocol_version=version, client=client))


def filled(frame: pb.Frame, length: int) -> bytes | None:
    """Return the frame in exactly so many bytes, with unknown fields behind what it says; None where none fit."""
    data = frame.SerializeToString()
    missing = length - len(data)
    if missing < 0 or missing in (1, 2):
        return None
    data += _unknown(missing) if missing else b""
    assert len(data) == length
    return data


def _unknown(size: int) -> bytes:
    """Return field 100 with some bytes in it, `size` bytes in all."""
    for count in (1, 2, 3):
        content = size - 2 - count
        if 0 <= content < 1 << 7 * count:
            length = [content >> 7 * number & 0x7F | (0x80 if number < count - 1 else 0) for number in range(count)]
            return b"\xa2\x06" + bytes(length) + bytes(content)
    raise AssertionError(size)


def last_words(daemon: Daemon, packet: bytes) -> str | None:
    """Return why a stranger's first packet was refused; None where it was cut without a word."""
    with Connection(daemon.endpoint()) as stranger:
        stranger.send_bytes(packet)
        last = stranger.last_words()
    return None if last is None else reason(last)


def too_long_or(why: str, length: int) -> str | None:
    """Return what a frame of a length is answered, if it is refused for `why` where its length is right."""
    if not length:
        return None
    return why if length <= LARGEST else "PROTOCOL_VIOLATION"


@pytest.mark.usefixtures("unmoved")
def test_a_hello_of_each_length(daemon: Daemon) -> None:
    """Whole, but of a later version, whose fields this one does not know: it is read, and told which one is spoken."""
    packets = {length: filled(greeting(version=9), length) for length in LENGTHS}
    whole = {length: packet for length, packet in packets.items() if packet}
    assert len(whole) > len(LENGTHS) - 20
    assert LARGEST in whole
    for length, packet in whole.items():
        assert last_words(daemon, packet) == too_long_or("UNSUPPORTED_VERSION", length), length


def test_an_allocate_of_each_power_of_two_is_granted(daemon: Daemon) -> None:
    """And a Release of the same length gives it back; all in one session."""
    with Session(daemon.endpoint()) as session:
        model = session.register("mine")
        for length in [length for length in POWERS if 64 <= length <= LARGEST]:
            packet = filled(pb.Frame(request_id=88, allocate=raw.allocation(model, PAGE)), length)
            assert packet
            session.send_bytes(packet)
            answer, ids = session.answer(88)
            assert (answer.count, len(ids)) == (1, 1), length
            packet = filled(pb.Frame(request_id=89, release=bpb.ReleaseExtentsRequest(extent_ids=ids)), length)
            assert packet
            session.send_bytes(packet)
            assert session.answer(89)[0].released_bytes == PAGE, length
    unharmed(daemon)
