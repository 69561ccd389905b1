"""Recalls with a real daemon: what is guaranteed and not used is lent to sessions that answer, and comes back.

The choice of sessions, who can answer, the repeats and the marks of those that keep memory: the transcripts `recall_*`.

The workers are bare ones, so that each can answer, lie, fall silent or die between any two frames.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.honest_worker import COUNTED, State, check_turns, honest
from tests.support.raw import Session, admin_call, allocation, info
from tests.support.sizes import MIB
from tests.support.workers import worker

from membroker.cli import doctor
from membroker.v1 import admin_pb2
from membroker.v1 import handoff_pb2 as pb

UNIT = 16 * MIB
ALL = 16
"""Units that the daemon has to lend."""
HALF = 8
"""Units that are guaranteed to red's model."""
TENANTS: dict[str, Any] = {"red": {"models": {"m": {"guarantee": "128MiB"}}}, "blue": {}, "green": {}}
HOUR = 3_600.0
_ids = itertools.count(1_000)


@contextmanager
def lending(module: str = "membrokerd.cli", **config: Any) -> Iterator[Daemon]:
    """A daemon of 256 MiB. Recalls and waits end by an answer, unless `config` says how long they take."""
    given = {"recall_seconds": HOUR, "guarantee_wait_seconds": HOUR, "tenants": TENANTS, "settle_seconds": 1.0}
    with running({**given, **config}, module=module) as daemon:
        yield daemon


class Borrower:
    """A session with the model `m`, and the extents that it has: `units` of UNIT."""

    def __init__(self, stack: ExitStack, daemon: Daemon, tenant: str, units: int = 0, *, answers: bool = True) -> None:
        self.session = stack.enter_context(Session(daemon.endpoint(tenant)))
        self.model = self.session.register("m", answers_recalls=answers)
        self.ids = self.session.borrow(self.model, UNIT, units) if units else []
        self._asked = 0

    def ask(self, units: int) -> None:
        """Send a request. It waits as long as the daemon's configuration says, if it is within the guarantee."""
        self._asked = next(_ids)
        self.session.send(pb.Frame(request_id=self._asked, allocate=allocation(self.model, UNIT, units)))

    def get(self) -> int:
        answer, ids = self.session.answer(self._asked)
        assert len(ids) == answer.count, answer
        self.ids += ids
        return len(ids)

    def recalled(self) -> pb.Recall:
        recall = self.session.recall()
        assert recall.model == self.model
        return recall

    def release(self, units: int) -> None:
        self.session.release(self.ids[:units])
        del self.ids[:units]

    def books(self, daemon: Daemon) -> Any:
        (model,) = (model for model in daemon.models() if model.name == self.model)
        return model.books[0]


def ended(daemon: Daemon) -> list[float]:
    """Return how many recalls have ended: by all that was asked, by less, and late."""
    series = "membroker_recall_seconds_count"
    return [daemon.figure(series, result=result) for result in ("returned", "kept", "late")]


def test_a_silent_borrower_is_late_until_it_answers(stack: ExitStack) -> None:
    """Another borrower is asked in its place. The log, the metrics and the doctor say who is late."""
    with lending(recall_seconds=2.0) as daemon, stack:  # green must answer in that time
        blue, green = Borrower(stack, daemon, "blue", HALF), Borrower(stack, daemon, "green", HALF)
        red = Borrower(stack, daemon, "red", answers=False)
        red.ask(HALF)
        silent, first = blue.recalled(), green.recalled()
        assert (silent.bytes, first.bytes, first.within.seconds) == (4 * UNIT, 4 * UNIT, 2)
        green.release(4)
        green.session.answer_recall(first.recall_id)
        second = green.recalled()
        assert second.bytes == 4 * UNIT
        green.release(4)
        green.session.answer_recall(second.recall_id)
        assert red.get() == HALF

        assert ended(daemon)[2] == 1
        (line,) = until(lambda: re.findall("WARNING a worker is late for a recall of memory (.*)\n", daemon.log()))
        assert line.startswith(f"session={blue.session.welcome.session} model={blue.model} ")
        assert daemon.figure("membroker_model_late_bytes", tenant="blue", location="device") == 4 * UNIT
        found = doctor.check_guarantees(str(daemon.admin), {}).found
        assert found == "blue/m owes 64.0 MiB that the broker has recalled"

        refused = blue.session.call(allocate=allocation(blue.model, UNIT))
        assert info(refused).metadata["recalled_bytes"] == str(4 * UNIT)
        assert "has not yet answered a recall of 64.0 MiB" in refused.message
        again = blue.recalled()
        assert (again.recall_id, again.bytes) == (silent.recall_id, 4 * UNIT), "it is asked again and again"
        blue.release(4)
        books = blue.books(daemon)
        assert (books.late_bytes, books.recallable_bytes) == (0, 0), "a release is no answer"
        assert len(blue.session.borrow(blue.model, UNIT)) == 1
        blue.session.answer_recall(silent.recall_id)
        until(lambda: blue.books(daemon).recallable_bytes == 5 * UNIT)
        assert len(re.findall("is late for a recall", daemon.log())) == 1


def test_a_daemon_that_is_killed_amid_a_recall_and_a_wait(stack: ExitStack) -> None:
    """Its successor knows nothing of either. Both sessions resume, red asks once more, and blue is asked again."""
    with lending() as daemon, stack:
        blue, red = Borrower(stack, daemon, "blue", ALL), Borrower(stack, daemon, "red", answers=False)
        red.ask(HALF)
        lost = blue.recalled()
        daemon.kill()
        daemon.start_again()
        red.session.resume()
        red.ask(HALF)
        until(lambda: daemon.books().waiting_requests == 1)
        assert daemon.books().guarantee_shortfall_bytes == HALF * UNIT, "nobody answers yet for what is lent"
        blue.session.resume(blue.ids, [blue.model])
        recall = blue.recalled()
        assert recall.bytes == HALF * UNIT
        assert recall.recall_id != lost.recall_id
        blue.session.answer_recall(lost.recall_id)
        blue.release(HALF)
        assert red.get() == HALF
        assert ended(daemon) == [1, 0, 0]


@pytest.mark.deep
def test_a_recall_that_the_notices_had_no_room_for_comes_again(stack: ExitStack) -> None:
    """A worker has not read its notices for long. It misses the recall, is late, and then reads all of them."""
    with lending(recall_seconds=0.2) as daemon, stack:
        blue, red = Borrower(stack, daemon, "blue", ALL), Borrower(stack, daemon, "red", answers=False)
        while not re.search(r"^membroker_notices_dropped_total\S* [1-9]", daemon.metrics(), re.MULTILINE):
            for _ in range(100):
                admin_call(daemon.admin, "Drain", admin_pb2.DrainRequest())
                admin_call(daemon.admin, "Undrain", admin_pb2.UndrainRequest())
        red.ask(HALF)
        until(lambda: blue.books(daemon).late_bytes == HALF * UNIT)
        recall = blue.recalled()
        blue.release(HALF)
        blue.session.answer_recall(recall.recall_id)
        assert red.get() == HALF
        until(lambda: blue.books(daemon).late_bytes == 0)


# --- What a hostile session says about recalls changes nothing of others, and delays nobody ---

SESSIONS = 16
ANSWERS = 20_000


def test_a_foreign_model_in_holds_is_ignored(stack: ExitStack) -> None:
    """Nobody answers for the model of another tenant, nor for one of its own that it has not registered."""
    with lending() as daemon, stack:
        blue, green = Borrower(stack, daemon, "blue", 2), Borrower(stack, daemon, "green", 2, answers=False)
        other = stack.enter_context(Session(daemon.endpoint("blue")))
        name = other.register("other")
        other.borrow(name, 2 * MIB)
        answered: Any = blue.session.resume(blue.ids, [blue.model, green.model, name, "tenants/blue/models/none"])
        assert list(answered.models) == [blue.model]
        shown = {model.name: model.books[0].recallable_bytes for model in daemon.models()}
        assert shown == {blue.model: 32 * MIB, green.model: 0, name: 0}


@pytest.mark.deep
def test_a_flood_of_answers(stack: ExitStack, state: State) -> None:
    """16 sessions answer recalls that never were, while a guaranteed request waits, beside an honest worker."""
    tenants = {
        "red": {},
        "blue": {"models": {"honest": {"guarantee": "16MiB"}}},
        "green": {"models": {"m": {"guarantee": "128MiB"}}},
    }
    with lending(COUNTED, capacity="1GiB", tenants=tenants, log={"level": "info"}) as daemon, stack:
        with honest(daemon) as one, worker() as flood:
            flood.do("from tests.support.raw import *; from pathlib import Path")
            flood.do(f"sessions = [Session(Path({str(daemon.endpoint('red'))!r})) for _ in range({SESSIONS})]")
            flood.do("models = [session.register('m', answers_recalls=True) for session in sessions]")
            flood.do(f"for session, model in zip(sessions, models): session.borrow(model, {62 * MIB})")
            green = Borrower(stack, daemon, "green", answers=False)
            green.ask(8)
            until(lambda: daemon.books().waiting_requests == 1)
            before = daemon.resident_bytes()
            flood.do(f"frames = [pb.Frame(recall_answer=pb.RecallAnswer(recall_id=n)) for n in range({ANSWERS})]")
            flood.do("frames = [frame.SerializeToString() for frame in frames]")
            one.beside_flood(
                state,
                f"{SESSIONS} sessions that answer {ANSWERS:,} recalls that never were",
                flood,
                f"""
for number, frame in enumerate(frames):
    sessions[number % {SESSIONS}].sock.send(frame)
answer = [reason(session.call(release=bpb.ReleaseExtentsRequest(extent_ids=[1]))) for session in sessions]
""",
            )
            assert daemon.books().waiting_requests == 1
            assert daemon.resident_bytes() - before < 4 * MIB
            one.do("client.close()")
            flood.kill()
            assert green.get() == 8
        check_turns(daemon, state, "a flood of answers to recalls")
