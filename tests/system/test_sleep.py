"""`SleepModel`: a real daemon passes an operator's word on to sessions, honest or not, and keeps nothing of it.

`idle_sleep_seconds`: it lets idle engines sleep when others want memory, or at once, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.support import raw
from tests.support.daemons import Daemon, running, until
from tests.support.honest_worker import State, honest
from tests.support.workers import worker

import membroker
from membroker.cli import tables
from membroker.v1 import admin_pb2 as apb
from membroker.v1 import handoff_pb2 as pb
from membroker.v1.resources_pb2 import SleepStatus
from membroker.wire import frames as handoff
from membrokerd.runtime.sleeping import MAX_DETAIL

CHAT = "tenants/red/models/chat"
ASLEEP = SleepStatus(state=SleepStatus.ASLEEP, cache_bytes=3, weight_bytes=4, detail="good night")


def ask(daemon: Daemon, name: str = CHAT, **fields: Any) -> Any:
    return raw.admin_call(daemon.admin, "SleepModel", apb.SleepModelRequest(name=name, **fields))


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running(module="tests.support.faulty_daemon wait_for_answers") as one:
        yield one


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def question(session: raw.Session) -> pb.Sleep:
    notice = handoff.receive(session.notices).frame.notice
    assert notice.HasField("sleep"), notice
    return notice.sleep


def answer(session: raw.Session, sleep_id: int, status: SleepStatus = ASLEEP) -> None:
    session.send(pb.Frame(request_id=0, sleep_answer=pb.SleepAnswer(sleep_id=sleep_id, status=status)))


def test_a_word_goes_to_each_session_of_the_model_and_comes_back(daemon: Daemon, threads: ThreadPoolExecutor) -> None:
    """Two engines serve one model: both are asked, as the operator said, and one of another model is not."""
    with (
        raw.Session(daemon.endpoint()) as one,
        raw.Session(daemon.endpoint()) as two,
        raw.Session(daemon.endpoint()) as other,
    ):
        for session, model in ((one, "chat"), (two, "chat"), (other, "search")):
            session.register(model)
        asked: Future[Any] = threads.submit(ask, daemon, keep_weights=True, within=Duration(seconds=7))
        for session in (one, two):
            heard = question(session)
            assert (heard.model, heard.wake, heard.keep_weights, heard.within.seconds) == (CHAT, False, True, 7)
            answer(session, heard.sleep_id)
        found = asked.result().sessions
        assert [row.session for row in found] == [one.welcome.session, two.welcome.session]
        assert all(row.status == ASLEEP and not row.detached for row in found)
        assert not raw.is_readable(other.notices)
        two.notices.close()
        two.sock.close()
        until(lambda: daemon.device().detached_sessions)
        asked = threads.submit(ask, daemon)
        answer(one, question(one).sleep_id)
        assert [row.detached for row in asked.result().sessions] == [False, True], "it lives, and cannot be asked"
        two.resume()


def test_a_session_answers_for_itself_alone(daemon: Daemon, threads: ThreadPoolExecutor) -> None:
    """Others guess the number, and the session lies: what it says is cut, and negative bytes count as 0."""
    with (
        raw.Session(daemon.endpoint()) as one,
        raw.Session(daemon.endpoint("blue")) as stranger,
        raw.Session(daemon.endpoint()) as beside,
    ):
        one.register("chat")
        asked: Future[Any] = threads.submit(ask, daemon)
        number = question(one).sleep_id
        for liar in (stranger, beside):
            for guess in (number, number + 1, 0, 1 << 63):
                answer(liar, guess, SleepStatus(state=SleepStatus.AWAKE, detail="a lie"))
            liar.register("search")  # it was read
        answer(one, number, SleepStatus(state=SleepStatus.ASLEEP, cache_bytes=-5, detail="x" * 10_000))
        answer(one, number, SleepStatus(state=SleepStatus.AWAKE))
        (row,) = asked.result().sessions
        assert row.status == SleepStatus(state=SleepStatus.ASLEEP, detail="x" * MAX_DETAIL)
        answer(one, number)  # it is over
        one.register("chat")


# --- By itself, when others want memory or at once ---


def idle_question(session: raw.Session) -> int:
    """Return the number of what the daemon asks a session by itself."""
    asked = question(session)
    assert (asked.HasField("idle"), asked.wake) == (True, False)
    assert not asked.HasField("within"), "a client that does not know the field would sleep"
    return int(asked.sleep_id)


def test_all_views_say_that_it_sleeps_and_since_when() -> None:
    """Listings and metrics; over a restart of the daemon, and until it wakes."""
    asleep = SleepStatus(state=SleepStatus.ASLEEP, asleep_ms=60_000, by_itself=True)
    tenants = {"red": {"idle_sleep_seconds": 100.0}}
    with running({"tenants": tenants}) as daemon, raw.Session(daemon.endpoint()) as chat:
        chat.register("chat")
        number = idle_question(chat)
        with membroker.connect(daemon.endpoint()) as client:
            (model,) = client.models()
            assert (model.idle_sleep_ms, model.asleep_sessions, model.asleep_since) == (100_000, 0, None)
            answer(chat, number, asleep)
            until(lambda: daemon.device().asleep_sessions)
            (model,) = client.models()
        assert timedelta(seconds=59) < datetime.now(UTC) - model.asleep_since
        assert tables.sleeps(model).endswith("Z, by itself")
        until(lambda: daemon.figure("membroker_model_asleep_sessions", model="chat") == 1)
        daemon.kill()
        daemon.start_again()
        chat.resume()
        assert not daemon.device().asleep_sessions, "a new daemon has not asked yet"
        answer(chat, idle_question(chat), SleepStatus(state=SleepStatus.ASLEEP, asleep_ms=61_000))
        until(lambda: daemon.device().asleep_sessions)
        assert not daemon.models()[0].asleep_by_itself, "an operator had put it to sleep"
        answer(chat, idle_question(chat), SleepStatus(state=SleepStatus.AWAKE))
        until(lambda: not daemon.device().asleep_sessions)


_FLOOD = """
from pathlib import Path
from tests.support import raw
from membroker.v1 import handoff_pb2 as pb
from membroker.v1.resources_pb2 import SleepStatus
with raw.Session(Path({endpoint!r})) as one:
    status = SleepStatus(state=SleepStatus.ASLEEP, detail="x" * 60_000)
    for number in range(4_000):
        one.send(pb.Frame(sleep_answer=pb.SleepAnswer(sleep_id=number, status=status)))
answer = 'over'
"""


@pytest.mark.deep
def test_answers_that_nobody_asked_for_hold_up_no_one(daemon: Daemon, state: State) -> None:
    """A tenant floods the daemon with the longest answers, while another one borrows."""
    with honest(daemon) as one, worker() as flood:
        assert one.beside_flood(state, "sleep answers", flood, _FLOOD.format(endpoint=str(daemon.endpoint()))) == "over"
