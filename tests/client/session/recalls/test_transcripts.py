"""What becomes of a recall, as stories: each file in transcripts/ has some, and behind every command what followed.

A story begins with `==`, and has a session of its own, with a program that answers for model `m`. `run` is what the
thread for callbacks does next. Sizes are in bytes. Behind `->` is what the program was called for, with what remained
of it, what the broker was answered, and which recall is pending, if that has changed. MEMBROKER_REWRITE=1 writes again
what follows from the commands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.client.session.recalls.asking import DEVICE, HOST
from tests.client.session.test_transcripts import check
from tests.support.fake_broker import MODEL

from membroker.session.inventory import Inventory
from membroker.session.recalls import DEFERRED, LIFECYCLE, OpenRecall, SessionRecalls
from membroker.v1 import handoff_pb2 as pb

FILES = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))
PLACES = {"device": DEVICE, "host": HOST, "nowhere": 77}
MOST = 3
"""How much may wait for the thread for callbacks."""


class Connection:
    """A connection that notes what is answered over it."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def answer_recall(self, recall_id: int, size: int) -> None:
        """Note an answer."""
        self._said.append(f"answer {recall_id}: {size}")


class Story:
    """A session in play. It stands for its line and its notices, too."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.inventory = Inventory()
        self.inventory.registered(MODEL)
        self.notices = self
        self.recalls: Any = None
        self.connection = Connection(self.said)
        self.work: deque[Callable[[], None]] = deque()
        self.shown: dict[int, OpenRecall] = {}
        self.spare = 0
        self.manner = "keeps"
        self.pending = "nothing is pending"
        self.machine = SessionRecalls(self, lambda: [self])  # type: ignore[arg-type, list-item]

    # What a session has around its recalls

    def start_callbacks(self) -> None:
        """The thread is `run`."""

    def call(self, frame: pb.Frame, *, timeout: float, note: Callable[[], None]) -> None:
        """Let the broker agree."""
        note()

    def say_less(self, frame: pb.Frame, note: Callable[[], None]) -> None:
        """Let the broker know."""
        note()

    def call_back(self, work: Callable[[], None]) -> bool:
        """Queue work for the thread for callbacks, if it is not too much."""
        if len(self.work) < MOST:
            self.work.append(work)
            return True
        return False

    def give_spare(self, size: int, is_asked_for: Callable[[int], bool]) -> None:
        """Release spare pages."""
        given, self.spare = min(size, self.spare), max(0, self.spare - size)
        if given:
            self.said.append(f"{given} were spare")
            self.inventory.released_bytes[MODEL, DEVICE] += given

    # The commands

    def play(self, line: str) -> str:
        """Do a command; return what followed from it."""
        name, *words = line.split()
        self.said.clear()
        getattr(self, f"do_{name}")(*words)
        assert all(recall.state in LIFECYCLE for recall in self.shown.values())
        pending = self.machine.pending(MODEL)
        now = f"pending {pending.recall_id}" if pending else "nothing is pending"
        if now != self.pending:
            self.said.append(now)
            self.pending = now
        return "; ".join(self.said)

    def program(self, recall: OpenRecall) -> object:
        """Be called for a recall."""
        self.said.append(f"called for {recall.recall_id}: {recall.size}, {recall.remaining} remain")
        if self.manner.isdigit():
            self.do_release(self.manner)
        return DEFERRED if self.manner == "defers" else None

    def show(self, recall: OpenRecall) -> OpenRecall:
        self.shown[recall.recall_id] = recall
        return recall

    def do_serve(self, manner: str) -> None:
        """Answer from now on: `keeps` all, `defers` the answer, or releases so many bytes each time."""
        self.manner = manner
        self.machine.answer_for(MODEL, self.show, self.program)

    def do_stop(self) -> None:
        self.machine.answer_for(MODEL, self.show, None)

    def do_leave(self) -> None:
        self.machine.forget(MODEL)

    def do_recall(self, recall_id: str, size: str, place: str = "device", model: str = MODEL) -> None:
        message = pb.Recall(recall_id=int(recall_id), bytes=int(size), model=model, location=PLACES[place])  # type: ignore[arg-type]
        self.machine.heard(message, self.connection)  # type: ignore[arg-type]

    def do_run(self) -> None:
        if self.work:
            self.work.popleft()()

    def do_release(self, size: str) -> None:
        self.inventory.released_bytes[MODEL, DEVICE] += int(size)

    def do_spare(self, size: str) -> None:
        self.spare = int(size)

    def do_done(self, recall_id: str) -> None:
        self.shown[int(recall_id)].done()

    def do_lose(self) -> None:
        """The connection is lost, and there is another one."""
        self.machine.lost()
        self.connection = Connection(self.said)


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_transcript(path: Path) -> None:
    check(path, lambda _: Story().play)
