"""`SleepModel`: a real daemon passes an operator's word on to sessions, honest or not, and keeps nothing of it.

`idle_sleep_seconds`: it lets idle engines sleep when others want memory, or at once, and says so.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.support import raw
from tests.support.daemons import Daemon, running, until
from tests.support.honest_worker import State, honest
from tests.support.sizes import MIB, PAGE
from tests.support.toy_engine import Request, ToyEngine
from tests.support.workers import worker

import membroker
from membroker.cli import tables
from membroker.kv import ElasticCache, Layout, Sleeper, Strided
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


def test_a_program_is_asked_in_its_own_thread(daemon: Daemon) -> None:
    """The library: a callback's answer, a program without one, one that fails, one that left the model."""
    with worker() as one:
        one.connect(daemon)
        one.do("model = client.model('chat')")
        assert [row.status.state for row in ask(daemon).sessions] == [SleepStatus.UNSUPPORTED]
        one.do(
            "told = []\n"
            "def tell(request):\n"
            "    told.append((request.wake, request.keep_weights))\n"
            "    return membroker.types.SleepStatus('asleep', 5, 6, 'fine')\n"
            "model.on_sleep(tell)"
        )
        (row,) = ask(daemon, keep_weights=True).sessions
        assert row.status == SleepStatus(state=SleepStatus.ASLEEP, cache_bytes=5, weight_bytes=6, detail="fine")
        assert (row.pid, one.ask("told")) == (one.pid, [[False, True]])
        one.do("model.on_sleep(lambda request: 1 / 0)")
        (row,) = ask(daemon).sessions
        assert "ZeroDivisionError" in row.status.detail
        one.do("model.unregister()")
        assert one.refused("model.on_sleep(tell)").error == "ModelNotFound"


# --- By itself, when others want memory or at once ---

CAPACITY = 64 * MIB
IDLE_CONFIG = {
    "capacity": CAPACITY,
    "host_capacity": CAPACITY,
    "tenants": {"red": {"idle_sleep_seconds": 100.0}, "blue": {}},
}


@pytest.fixture
def lulling() -> Iterator[Daemon]:
    with running(IDLE_CONFIG) as daemon:
        yield daemon


def idle_question(session: raw.Session) -> pb.Sleep:
    """Return what the daemon asks a session by itself; recalls before it are skipped."""
    while True:
        notice = handoff.receive(session.notices).frame.notice
        if notice.HasField("sleep"):
            assert notice.sleep.HasField("idle"), notice
            assert not notice.sleep.HasField("within"), "a client that does not know the field would sleep"
            assert not notice.sleep.wake
            return notice.sleep


def say(session: raw.Session, sleep_id: int, state: Any = SleepStatus.AWAKE, **times: Any) -> None:
    session.send(pb.Frame(sleep_answer=pb.SleepAnswer(sleep_id=sleep_id, status=SleepStatus(state=state, **times))))


def test_all_views_say_that_it_sleeps_and_since_when(lulling: Daemon) -> None:
    """Listings and metrics; over a restart of the daemon, and until it wakes."""

    def shows_asleep() -> bool:
        return bool(lulling.device().asleep_sessions)

    with raw.Session(lulling.endpoint()) as chat:
        chat.register("chat")
        number = idle_question(chat).sleep_id
        with membroker.connect(str(lulling.endpoint())) as client:
            (model,) = client.models()
            assert (model.idle_sleep_ms, model.asleep_sessions, model.asleep_since) == (100_000, 0, None)
            assert lulling.figure("membroker_model_asleep_sessions", model="chat") == 0
            say(chat, number, SleepStatus.ASLEEP, asleep_ms=60_000, by_itself=True)
            until(shows_asleep)
            (model,) = client.models()
        assert model.asleep_since is not None
        assert timedelta(seconds=59) < datetime.now(UTC) - model.asleep_since
        assert tables.sleeps(model).endswith("Z, by itself")
        until(lambda: lulling.figure("membroker_model_asleep_sessions", model="chat") == 1)
        lulling.kill()
        lulling.start_again()
        chat.resume()
        assert not shows_asleep(), "a new daemon has not asked yet"
        say(chat, idle_question(chat).sleep_id, SleepStatus.ASLEEP, asleep_ms=61_000)
        until(shows_asleep)
        (row,) = lulling.models()
        assert not row.asleep_by_itself, "an operator had put it to sleep"
        say(chat, idle_question(chat).sleep_id)
        until(lambda: not shows_asleep())


def test_an_engine_of_the_library_sleeps_for_another_and_wakes_by_its_request() -> None:
    """Its weights are no memory that can be recalled: the other one would wait forever. Then it is the other way."""
    config = {**IDLE_CONFIG, "tenants": {"red": {"idle_sleep_seconds": 0.5}, "blue": {}}}
    with running(config) as daemon, ExitStack() as ends, ThreadPoolExecutor(1) as threads:
        client, beside = (ends.enter_context(membroker.connect(str(daemon.endpoint()))) for _ in range(2))
        pool = ends.enter_context(client.model("chat").pool(page_size=PAGE, virtual_capacity=8 * PAGE))
        weights = ends.enter_context(beside.model("chat").pool(page_size=PAGE, virtual_capacity=24 * PAGE))
        address = weights.allocate_anywhere(24 * PAGE)
        weights.view(0, 5)[:] = b"hello"
        assert address == weights.base_address
        layout = Layout(pool.base_address, PAGE, 8, [Strided(pool.base_address, PAGE, PAGE)])
        engine = ToyEngine(8, random.Random(0))
        cache = ends.enter_context(ElasticCache(pool, layout))
        sleeper = ends.enter_context(Sleeper(cache, weights))
        cache.attach(engine)
        cache.rest()
        with membroker.connect(str(daemon.endpoint("blue"))) as other:
            got = threads.submit(other.model("big").allocate, 48 * MIB, timeout=3_600)
            with got.result():
                until(lambda: sleeper.state == "asleep")
                until(lambda: daemon.device().asleep_sessions == 1)
                engine.add(Request(4))
                cache.grow()
                sleeper.wake()
                wake = membroker.types.SleepRequest(True, False, 0.0)
                until(lambda: "waits for memory" in sleeper.answer(wake).detail)
                assert not engine.free, "a request of a sleeping engine waits for blocks"
        until(lambda: sleeper.state == "awake")
        until(lambda: cache.grow() or len(engine.free) >= 4)
        assert bytes(weights.view(0, 5)) == b"hello"


# --- A flood ---

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
