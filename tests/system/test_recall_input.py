"""What a hostile session says about recalls: it changes nothing of others, and delays nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.support.daemons import Daemon, until
from tests.support.honest_worker import State, check_turns, honest
from tests.support.raw import Connection, Session, reason
from tests.support.sizes import MIB
from tests.support.workers import worker
from tests.system.test_recalls import Borrower, ended, lending

from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb

SESSIONS = 16
ANSWERS = 20_000


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as one:
        yield one


def answer(number: int) -> pb.Frame:
    return pb.Frame(request_id=7, recall_answer=pb.RecallAnswer(recall_id=number))


def test_an_answer_before_its_time_ends_the_connection(daemon: Daemon) -> None:
    """Before the Hello, and between a resumed Welcome and the Holds."""
    with Connection(daemon.endpoint()) as line:
        line.send(answer(1))
        refused = line.last_words()
        assert (reason(refused), refused.message if refused else "") == (
            "PROTOCOL_VIOLATION",
            "the first frame must be a Hello, not recall_answer",
        )
    with Session(daemon.endpoint()) as session:
        with Connection(daemon.endpoint()) as line:
            line.send(pb.Frame(request_id=1, hello=pb.Hello(protocol_version=1, resume_token=session.token)))
            assert line.receive().frame.welcome.resumed
            line.send(answer(1))
            assert reason(line.last_words()) == "PROTOCOL_VIOLATION"
        session.resume()


def test_an_answer_to_a_recall_of_another_session_ends_nothing(stack: ExitStack) -> None:
    """Its number can be guessed. The recall stays open, and only the session that was asked can answer it."""
    with lending() as daemon, stack:
        blue, red = Borrower(stack, daemon, "blue", 16), Borrower(stack, daemon, "red", answers=False)
        green = Borrower(stack, daemon, "green")
        observer = stack.enter_context(Session(daemon.endpoint("blue"), observer=True))
        red.ask(1)
        recall = blue.recalled()
        for liar in (green.session, observer, red.session):
            for number in (recall.recall_id, recall.recall_id + 1, 0, (1 << 64) - 1):
                liar.answer_recall(number)
        for liar in (green.session, observer):
            liar.call(release=bpb.ReleaseExtentsRequest(extent_ids=[1]))  # the daemon has read all that came before
        assert blue.books(daemon).recalled_bytes == recall.bytes
        assert ended(daemon) == {"returned": 0, "kept": 0, "late": 0}
        blue.release(1)
        assert red.get() == 1


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
    """16 sessions answer recalls that never were, and not the one that each has, beside an honest worker.

    A guaranteed request waits meanwhile, so each page that the honest worker gets is decided among waiting requests.
    """
    tenants = {
        "red": {},
        "blue": {"models": {"honest": {"guarantee": "16MiB"}}},
        "green": {"models": {"m": {"guarantee": "128MiB"}}},
    }
    with lending(capacity="1GiB", tenants=tenants, log={"level": "info"}) as daemon, stack:
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
