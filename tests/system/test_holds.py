"""Holds, by which a process states what it has when it resumes: they are checked before anything is done by them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.raw import Connection, Session
from tests.support.workers import PAGE

from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2

DETACHED = resources_pb2.Session.DETACHED
WINDOW = 128
"""Descriptors that one delivery window can bring a session."""
GENERATIONS = itertools.count(1 << 50)


class Resumable:
    """A session of this process with an extent, a segment and a declaration, which resumes as often as one likes."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._session = Session(daemon.endpoint())
        self.model = self._session.register("m")
        (self.extent,) = self._session.borrow(self.model, PAGE)
        segment = self._session.call(create_segment=raw.segment_of(self.model, "weights", PAGE))
        assert isinstance(segment, resources_pb2.Segment), segment
        self.segment = segment.generation
        self._session.call(declare=raw.bpb.DeclareMemoryRequest(model=self.model, declared_bytes=PAGE))
        self._session.sock.close()
        self.held = pb.Holds(
            extent_ids=[self.extent],
            segments=[pb.HeldSegment(generation=self.segment, times=1)],
            declarations=[pb.HeldDeclaration(model=self.model, declared_bytes=PAGE)],
        )

    def state(self, *frames: pb.Holds) -> Connection:
        """Resume, and state this much."""
        line = Connection(self._daemon.endpoint())
        line.send(pb.Frame(request_id=1, hello=pb.Hello(protocol_version=1, resume_token=self._session.token)))
        assert line.receive().frame.welcome.resumed
        for holds in frames:
            line.send(pb.Frame(request_id=2, holds=holds))
        return line

    def end(self) -> None:
        with self.state(self.held, pb.Holds(last=True)) as line:
            assert line.receive().frame.reply.HasField("resume")
            line.send(pb.Frame(request_id=3, goodbye=pb.Goodbye()))
            assert line.receive().frame.reply.HasField("goodbye")
        self._session.notices.close()


@pytest.fixture
def resumable(daemon: Daemon) -> Iterator[Resumable]:
    one = Resumable(daemon)
    yield one
    one.end()
    until(lambda: not daemon.sessions() and daemon.books().lent_bytes == 0)


def _segments(count: int) -> list[pb.HeldSegment]:
    return [pb.HeldSegment(generation=next(GENERATIONS), times=1) for _ in range(count)]


def _refused_holds(one: Resumable) -> dict[str, tuple[str, list[pb.Holds]]]:
    declaration = pb.HeldDeclaration(model=one.model, declared_bytes=1)
    extents, segment = pb.Holds(extent_ids=[one.extent]), pb.HeldSegment(generation=one.segment, times=1)
    most = 4 + WINDOW  # an extent, a segment, a declaration and a model
    return {
        "three lists of 4,150 entries together": (
            "INVALID_COUNT",
            [pb.Holds(extent_ids=range(1, 3_971), segments=_segments(90), declarations=[declaration] * 90)],
        ),
        "an extent twice": ("PROTOCOL_VIOLATION", [pb.Holds(extent_ids=[one.extent, one.extent])]),
        "an extent in two frames": ("PROTOCOL_VIOLATION", [extents, extents]),
        "a segment twice": ("PROTOCOL_VIOLATION", [pb.Holds(segments=[segment, segment])]),
        "a declaration in two frames": ("PROTOCOL_VIOLATION", [pb.Holds(declarations=[declaration])] * 2),
        "nothing, and not the last": ("PROTOCOL_VIOLATION", [pb.Holds()]),
        "a segment for a model": ("INVALID_NAME", [pb.Holds(answering_models=[f"{one.model}/segments/s"])]),
        "a model twice": ("PROTOCOL_VIOLATION", [pb.Holds(answering_models=[one.model] * 2)]),
        "too many models": (
            "PROTOCOL_VIOLATION",
            [pb.Holds(answering_models=[f"{one.model}-{n}" for n in range(200)])],
        ),
        "too many models in a frame": ("INVALID_COUNT", [pb.Holds(answering_models=["a"] * 4_097)]),
        "more than it has and a window brings": ("PROTOCOL_VIOLATION", [pb.Holds(extent_ids=range(1, most + 2))]),
        "the same by other lists": (
            "PROTOCOL_VIOLATION",
            [pb.Holds(extent_ids=range(1, WINDOW)), pb.Holds(segments=_segments(6))],
        ),
    }


def _only_session(daemon: Daemon) -> resources_pb2.Session:
    """Return the only session, without the time at which it began, which is told to some microseconds."""
    (session,) = daemon.sessions()
    session.ClearField("create_time")
    return session  # type: ignore[no-any-return]


def test_holds_that_are_refused_change_nothing(daemon: Daemon, resumable: Resumable) -> None:
    """What a process states of its session is checked, and bounded by what the books have of it."""
    until(lambda: daemon.sessions()[0].state == DETACHED)
    before = _only_session(daemon)
    for what, (why, frames) in _refused_holds(resumable).items():
        with resumable.state(*frames) as line:
            refusal = line.last_words()
        assert raw.reason(refusal) == why, what
        assert "did not come" not in refusal.message, f"{what}: it was taken, and refused for its end"
        until(lambda: daemon.sessions()[0].state == DETACHED)
        assert _only_session(daemon) == before, what
        assert daemon.books().lent_bytes == 3 * PAGE, what
    # As much as may be stated is taken: what the books do not know is told.
    unknown = range(1, WINDOW + 1)
    with resumable.state(resumable.held, pb.Holds(extent_ids=unknown, last=True)) as line:
        assert list(line.receive().frame.reply.resume.unknown_extent_ids) == list(unknown)


@pytest.mark.deep
def test_holds_that_never_end(daemon: Daemon, resumable: Resumable) -> None:
    """A process resumes, states something and waits. It has ten seconds; its session is detached again then."""
    with resumable.state(pb.Holds(extent_ids=[resumable.extent])) as line:
        line.sock.settimeout(DEADLINE_SECONDS)
        assert raw.reason(line.last_words()) == "PROTOCOL_VIOLATION"
    assert daemon.sessions()[0].state == DETACHED
    assert daemon.books().lent_bytes == 3 * PAGE


def test_each_frame_of_a_resume_has_its_turn(daemon: Daemon, resumable: Resumable) -> None:
    """A Goodbye may not come before the Holds, and no Holds behind the last ones. What is not stated is released."""
    with resumable.state() as line:
        line.send(pb.Frame(request_id=2, goodbye=pb.Goodbye()))
        assert raw.reason(line.last_words()) == "PROTOCOL_VIOLATION"
    assert daemon.books().lent_bytes == 3 * PAGE
    with resumable.state(pb.Holds(extent_ids=[resumable.extent], last=True)) as line:
        assert list(line.receive().frame.reply.resume.models) == [resumable.model]
        until(lambda: daemon.books().lent_bytes == PAGE)
        line.send(pb.Frame(request_id=3, holds=pb.Holds(last=True)))
        assert raw.reason(line.last_words()) == "PROTOCOL_VIOLATION"
