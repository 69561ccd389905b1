"""`SleepModel`: a real daemon passes an operator's word on to sessions, honest or not, and keeps nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.support import raw
from tests.support.daemons import Daemon, until
from tests.support.honest_worker import State, honest
from tests.support.sizes import MIB
from tests.support.workers import worker

import membroker
from membroker.kv import ElasticCache, Layout, Sleeper, Strided
from membroker.v1 import admin_pb2 as apb
from membroker.v1 import handoff_pb2 as pb
from membroker.v1.resources_pb2 import SleepStatus
from membroker.wire import frames as handoff
from membrokerd.runtime.sleeping import MAX_DETAIL

PAGE = 2 * MIB
CHAT = "tenants/red/models/chat"
ASLEEP = SleepStatus(state=SleepStatus.ASLEEP, cache_bytes=3, weight_bytes=4, detail="good night")


def ask(daemon: Daemon, name: str = CHAT, **fields: Any) -> Any:
    return raw.admin_call(daemon.admin, "SleepModel", apb.SleepModelRequest(name=name, **fields))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def question(session: raw.Session) -> pb.Sleep:
    """Return what a session is asked."""
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


def test_a_session_answers_for_itself_alone(daemon: Daemon, threads: ThreadPoolExecutor) -> None:
    """Another tenant guesses the number, another session of the tenant too, and the session itself lies.

    What it says is cut, and negative bytes count as 0.
    """
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


def test_a_lost_connection_is_said(daemon: Daemon) -> None:
    """The process lives and has no connection: it is not asked, and the answer says so at once."""
    with raw.Session(daemon.endpoint()) as one:
        one.register("chat")
        one.notices.close()
        one.sock.close()
        until(lambda: [row.detached for row in ask(daemon).sessions] == [True])
        one.resume()


def test_a_program_is_asked_in_its_own_thread(daemon: Daemon) -> None:
    """The library: a callback's answer, a program without one, one that fails, one that left the model."""
    with worker() as one:
        one.connect(daemon)
        one.do("model = client.register_model('chat')")
        assert [row.status.state for row in ask(daemon).sessions] == [SleepStatus.UNSUPPORTED]
        one.do(
            "told = []\n"
            "def tell(request):\n"
            "    told.append((request.wake, request.keep_weights))\n"
            "    return membroker.types.SleepStatus('waking' if request.wake else 'asleep', 5, 6, 'fine')\n"
            "model.on_sleep(tell)"
        )
        (row,) = ask(daemon, wake=True).sessions
        assert row.status == SleepStatus(state=SleepStatus.WAKING, cache_bytes=5, weight_bytes=6, detail="fine")
        (row,) = ask(daemon, keep_weights=True).sessions
        assert row.status.state == SleepStatus.ASLEEP
        assert row.pid == one.pid
        assert one.ask("told") == [[True, False], [False, True]]
        daemon.kill()
        daemon.start_again()
        until(lambda: [row.status.state for row in ask(daemon).sessions] == [SleepStatus.ASLEEP])
        one.do("model.on_sleep(lambda request: 1 / 0)")
        (row,) = ask(daemon).sessions
        assert "ZeroDivisionError" in row.status.detail
        one.do("model.on_sleep(None)")
        assert [row.status.state for row in ask(daemon).sessions] == [SleepStatus.UNSUPPORTED]
        assert one.refused("model.on_sleep(5)").error == "InvalidRequest"
        one.do("model.unregister()")
        assert one.refused("model.on_sleep(tell)").error == "ModelNotFound"


def test_an_engine_that_ends_leaves_the_next_one_its_questions(daemon: Daemon) -> None:
    """A program replaces its engine: the new one answers for the model before the old one is closed."""
    with membroker.connect(daemon.endpoint()) as client, ExitStack() as engines:
        model = client.register_model("chat")
        old, new = (engines.enter_context(an_idle_engine(model)) for _ in range(2))
        assert model.sleep_callback == new.answer
        old.close()
        assert [row.status.state for row in ask(daemon).sessions] == [SleepStatus.BUSY]
        new.close()
        assert [row.status.state for row in ask(daemon).sessions] == [SleepStatus.UNSUPPORTED]


@contextmanager
def an_idle_engine(model: membroker.Model) -> Iterator[Sleeper]:
    with model.pool(page_size=PAGE, virtual_capacity=4 * PAGE) as pool:
        layout = Layout(pool.base_address, PAGE, 4, [Strided(pool.base_address, PAGE, PAGE)])
        with ElasticCache(pool, layout) as cache, Sleeper(cache) as sleeper:
            yield sleeper


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
