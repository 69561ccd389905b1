"""The calls and outages of a session as stories: each file in transcripts/ has some, with what follows each command.

A story begins with `==`, and has a session of its own, at a broker of the revision in its line (3), whose calls wait
for a connection for the seconds of `outage` there (30). A call has the name that its command gives it; `#2` is its
number. Behind `->` are the frames that the library sends, `^1` with the count of deliveries that a frame acknowledges,
then the calls that have ended, with what is mapped for them or how they failed, then the state of the session and what
it holds, if that has changed. Behind a command from which nothing followed there is no line. MEMBROKER_REWRITE=1 writes
again what follows from the commands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.support.fake_broker import refusal
from tests.support.pure_client import Asked, PureClient

from membroker.errors import BrokerUnavailable, MembrokerError
from membroker.session import outages
from membroker.session.machine import LIFECYCLE, MOST_PATIENT
from membroker.v1 import broker_pb2, resources_pb2
from membroker.v1 import handoff_pb2 as pb
from membroker.wire.frames import Packet

FILES = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))
SEGMENT = 77
SHOWN = 9
"""More ids than these are shown as a range, if they are one."""


class Story:
    """A session in play."""

    def __init__(self, title: str) -> None:
        given = dict(re.findall(r"(revision|outage)=(\d+)", title))
        self.client = PureClient(int(given.get("revision", 3)), float(given.get("outage", 30)))
        self.state = "connected"
        self.calls: dict[str, Asked] = {}
        self.ended: list[str] = []
        self.stated: list[str] = []
        self.held = self.holds()
        self.parts: dict[int, int] = {}

    def play(self, line: str) -> str:
        """Do a command; return what followed from it."""
        name, *words = line.split()
        self.stated.clear()
        getattr(self, f"do_{name}")(*words)
        said = [*self.stated, *map(shown, self.client.sent), *(f"warns of a {kind}" for kind in self.client.odd)]
        self.client.sent.clear()
        self.client.odd.clear()
        for called, asked in self.calls.items():
            assert asked.call is None or asked.call.state in LIFECYCLE
            if asked not in self.client.asked and called not in self.ended:
                self.ended.append(called)
                mapped = _words(asked.placed)
                failed = asked.error and type(asked.error).__name__ + _seconds_in(str(asked.error))
                said.append(f"{called}: {failed or mapped or 'done'}")
                assert asked.is_stuck or not (asked.error and mapped), "it has failed, and memory is mapped"
        if (state := self.client.outages.state) != self.state:
            assert state in outages.LIFECYCLE
            said.append(f"is {state}")
            self.state = state
        held = self.holds()
        if held != self.held:
            said.append(held)
            self.held = held
        return "; ".join(said)

    def holds(self) -> str:
        held = self.client.inventory.held()
        extents = [_words(sorted(held.extents))] if held.extents else []
        parts = [*extents, *(f"segment {one}" for one in held.segments.elements())]
        return f"holds {' '.join(parts) or 'nothing'}"

    # What the program does

    def begin(self, name: str, frame: pb.Frame, *, patient: bool | None = None) -> None:
        self.calls[name] = self.client.ask(Asked(frame, patient=patient))

    def do_allocate(self, name: str, count: str, *options: str) -> None:
        model = next((word.partition("=")[2] for word in options if word.startswith("model=")), "m")
        request = broker_pb2.AllocateExtentsRequest(
            model=model, count=int(count), extent_bytes=1, ahead="ahead" in options
        )
        patient = True if "wait" in options else False if "nowait" in options else None
        self.begin(name, pb.Frame(allocate=request), patient=patient)

    def do_fill(self, name: str) -> None:
        """Make as many calls as may wait at the broker."""
        for number in range(MOST_PATIENT):
            self.do_allocate(f"{name}{number}", "1")
        self.client.sent.clear()

    def do_attach(self, name: str) -> None:
        self.begin(name, pb.Frame(attach_segment=broker_pb2.AttachSegmentRequest(name="weights")))

    def do_register(self, name: str) -> None:
        self.begin(name, pb.Frame(register_model=broker_pb2.RegisterModelRequest(model_id="m")))

    def do_release(self, *ids: str) -> None:
        self.client.release([int(one) for one in ids])

    def do_cancel(self, name: str) -> None:
        self.client.cancel(self.calls[name])

    def do_fail(self, name: str) -> None:
        """The next placing of a call fails."""
        self.calls[name].fails_next = RuntimeError("no more mappings")

    def do_stick(self, name: str) -> None:
        """The device does not unmap what a call has mapped."""
        self.calls[name].is_stuck = True

    def do_interrupt(self, name: str) -> None:
        self.client.interrupt(self.calls[name])

    def do_hurry(self, name: str) -> None:
        self.client.hurry(self.calls[name])

    def do_take(self, name: str) -> None:
        self.client.take(self.calls[name])

    # What the broker does

    def number(self, name: str) -> int:
        call = self.calls[name].call if name in self.calls else None
        return 1000 if call is None else call.request_id

    def hear(self, frame: pb.Frame, descriptors: Sequence[int] = (), *, cut: bool = False, take: bool = True) -> None:
        asked = self.client.hear(Packet(frame, list(descriptors), cut))
        if asked is not None and take:
            self.client.take(asked)

    def do_deliver(self, name: str, *words: str, take: bool = True) -> None:
        """`deliver a 1 4..6 size=1 descriptors=4 segment reply cut`: a packet for a call; `a` may be unknown."""
        number = self.number(name)
        ids = [extent for word in words if word[0].isdigit() for extent in _range_of(word)]
        options = {word.partition("=")[0]: word.partition("=")[2] for word in words if not word[0].isdigit()}
        part = self.parts[number] = self.parts.get(number, -1) + 1
        parts = int(options.get("parts", 3))
        delivery = pb.Delivery(extent_ids=ids, extent_bytes=int(options.get("size", 1)), part=part, parts=parts)
        if "segment" in options:
            delivery.segment = SEGMENT
        if "reply" in options:
            delivery.reply.CopyFrom(self.reply(name))
        there = int(options.get("descriptors", len(ids)))
        frame = pb.Frame(request_id=number, delivery=delivery)
        self.hear(frame, range(there), cut="cut" in options, take=take)

    def do_bring(self, name: str, *words: str) -> None:
        """As `deliver`, and the call takes it later."""
        self.do_deliver(name, *words, take=False)

    def reply(self, name: str, extents: int = 0, *lies: str) -> pb.Reply:
        frame = self.calls[name].frame
        if frame.HasField("allocate"):
            return pb.Reply(allocate=broker_pb2.AllocateExtentsResponse(count=frame.allocate.count))
        if frame.HasField("attach_segment"):
            segment = resources_pb2.Segment(generation=SEGMENT, extents=extents, size_bytes=extents)
            for lie in lies:
                setattr(segment, lie.partition("=")[0], int(lie.partition("=")[2]))
            return pb.Reply(segment=segment)
        return pb.Reply(model=resources_pb2.Model(name="m"))

    def do_answer(self, name: str, extents: str = "0", *lies: str) -> None:
        self.hear(pb.Frame(request_id=self.number(name), reply=self.reply(name, int(extents), *lies)))

    def do_refuse(self, name: str, reason: str) -> None:
        self.hear(pb.Frame(request_id=self.number(name), reply=pb.Reply(error=refusal(reason))))

    def do_confuse(self, name: str, *kind: str) -> None:
        """Answer with another call's answer, or with nothing."""
        reply = pb.Reply(declare=broker_pb2.DeclareMemoryResponse()) if kind else pb.Reply()
        self.hear(pb.Frame(request_id=self.number(name), reply=reply))

    def do_lose(self, *words: str) -> None:
        """The connection is lost; `unstarted`: no thread could start that reconnects."""
        self.client.lose(starts="unstarted" not in words)
        self.parts.clear()

    def do_resume(self, *unknown: str) -> None:
        """The session goes on; the broker does not know these extents."""
        held = self.client.resume()
        self.stated.append(f"states {' '.join(map(str, sorted(held.extents))) or 'nothing'}")
        try:
            self.client.agree(held, [int(one) for one in unknown])
        except BrokerUnavailable:
            self.stated.append("too late")

    # A lost connection

    def do_start(self) -> None:
        """A thread has started that would reconnect."""
        self.stated.append("reconnects" if self.client.start() else "does not reconnect")

    def do_next(self) -> None:
        """When the next attempt to resume is made."""
        seconds = self.client.outages.next_try(self.client.now) - self.client.now
        self.stated.append(f"in {seconds:g} s")

    def do_miss(self, reason: str = "") -> None:
        """An attempt to resume has failed."""
        error = MembrokerError(reason, reason) if reason else BrokerUnavailable("nobody listens")
        if warning := self.client.failed(error):
            self.stated.append(f"warns{_seconds_in(warning)}")

    def do_wait(self, name: str) -> None:
        """How long a call waits for a connection yet."""
        failure = self.calls[name].failure
        seconds = 0.0 if failure is None else self.client.outages.wait(*failure, self.client.now)
        self.stated.append(f"{seconds:g} s")

    def do_pass(self, seconds: str) -> None:
        self.client.pass_time(float(seconds))

    def do_close(self) -> None:
        """The program closes the client."""
        self.client.close()

    def do_leave(self, cause: str) -> None:
        """`goodbye` or `closed`."""
        self.client.leave(cause)

    def do_end(self) -> None:
        """What ended the connection, if anything did."""
        end = self.client.calls.end
        self.stated.append("open" if end is None else end[0].__name__)


def _range_of(word: str) -> range:
    first, _, last = word.partition("..")
    return range(int(first), int(last or first) + 1)


def _words(ids: Sequence[int]) -> str:
    """Return ids as words; many that follow each other as one."""
    if len(ids) > SHOWN and ids[-1] - ids[0] == len(ids) - 1:
        return f"{ids[0]}..{ids[-1]}"
    return " ".join(map(str, ids))


def _seconds_in(text: str) -> str:
    """Return the seconds that a message tells."""
    return "".join(f" {seconds}" for seconds in re.findall(r"\b\d+ s\b", text))


def shown(frame: pb.Frame) -> str:
    """Return a frame as a few words."""
    kind = frame.WhichOneof("kind")
    details = {
        "allocate": lambda: str(frame.allocate.count),
        "release": lambda: " ".join(map(str, frame.release.extent_ids)),
        "ack": lambda: f"part {frame.ack.part}",
    }
    words = details[kind]() if kind in details else ""
    number = "" if kind in ("release", "detach_segment") else f"#{frame.request_id} "
    count = f" ^{frame.acknowledged}" if frame.acknowledged else ""
    return f"{number}{kind} {words}".strip() + count


def played(text: str, begin: Callable[[str], Callable[[str], str]]) -> str:
    """Return a file with what follows from its commands; `begin` returns what plays those of a story of this title."""
    lines: list[str] = []
    play = begin("")
    for line in text.splitlines():
        if line.startswith("    ->"):
            continue
        lines.append(line)
        if line.startswith("=="):
            play = begin(line)
        elif line and not line.startswith("#") and (followed := play(line)):
            lines.append(f"    -> {followed}")
    return "\n".join(lines) + "\n"


def check(path: Path, begin: Callable[[str], Callable[[str], str]]) -> None:
    """Play a file, and compare it with what it says."""
    told = played(path.read_text(), begin)
    if os.environ.get("MEMBROKER_REWRITE"):
        path.write_text(told)
    assert path.read_text() == told, f"{path.name} differs; MEMBROKER_REWRITE=1 writes it again"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_transcript(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda _, most: most)
    check(path, lambda title: Story(title).play)
