"""`idle_sleep_seconds`: a real daemon lets idle engines sleep when others want memory, or at once, and says so."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.support import raw
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import MIB
from tests.support.toy_engine import Request, ToyEngine
from tests.system.test_reload import reload

import membroker
from membroker.cli import explain, tables
from membroker.kv import ElasticCache, Layout, Sleeper, Strided
from membroker.v1 import handoff_pb2 as pb
from membroker.v1.resources_pb2 import SleepStatus
from membroker.wire import frames as handoff

PAGE = 2 * MIB
CAPACITY = 64 * MIB
CONFIG = {
    "capacity": CAPACITY,
    "host_capacity": CAPACITY,
    "tenants": {"red": {"idle_sleep_seconds": 100.0, "models": {"awake": {"idle_sleep_seconds": 0.0}}}, "blue": {}},
}
LONG = Duration(seconds=3_600)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running(CONFIG) as daemon:
        yield daemon


def question(session: raw.Session) -> pb.Sleep:
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


def until_let(session: raw.Session, others: list[raw.Session], idle_ms: int) -> None:
    """Answer that it has been idle for so long, until it is let sleep; the others must not be."""
    while not (asked := question(session)).idle.seconds:
        say(session, asked.sleep_id, idle_ms=idle_ms)
        for other in others:
            if raw.is_readable(other.notices):
                one = question(other)
                assert not one.idle.seconds
                say(other, one.sleep_id, idle_ms=idle_ms // 2)
    assert asked.idle.seconds == 100
    say(session, asked.sleep_id, SleepStatus.FALLING_ASLEEP)


@contextmanager
def waiting(session: raw.Session, model: str, size: int) -> Iterator[int]:
    """Let a request wait for room during a block."""
    number = next(raw._ids)
    request = raw.allocation(model, size)
    request.wait.CopyFrom(LONG)
    session.send(pb.Frame(request_id=number, allocate=request))
    yield number


def test_the_one_that_was_idle_for_longest_sleeps_when_another_tenant_waits(daemon: Daemon) -> None:
    """While nobody waits they only say how far they are. A model that never sleeps by itself is not asked at all."""
    with (
        raw.Session(daemon.endpoint()) as chat,
        raw.Session(daemon.endpoint()) as search,
        raw.Session(daemon.endpoint()) as awake,
        raw.Session(daemon.endpoint("blue")) as blue,
    ):
        ids = chat.borrow(chat.register("chat"), 32 * MIB)
        search.borrow(search.register("search"), 32 * MIB)
        awake.register("awake")
        for session in (chat, search, chat):
            asked = question(session)
            assert (asked.idle.seconds, asked.idle.nanos) == (0, 0), "nobody wants memory"
            say(session, asked.sleep_id, idle_ms=150_000)
        with waiting(blue, blue.register("chat"), 16 * MIB) as number:
            until_let(search, [chat], 400_000)
            say(search, question(search).sleep_id, SleepStatus.ASLEEP, asleep_ms=5_000, by_itself=True)
            until_let(chat, [], 150_000)
            chat.release(ids)
            assert blue.answer(number)[0].count == 1
        assert not raw.is_readable(awake.notices)


def test_all_views_say_that_it_sleeps_and_since_when(daemon: Daemon) -> None:
    """Listings, sentences and metrics; over a restart of the daemon, and until it wakes."""

    def shows_asleep() -> bool:
        return bool(daemon.device().asleep_sessions)

    with raw.Session(daemon.endpoint()) as chat:
        chat.register("chat")
        number = question(chat).sleep_id
        with membroker.connect(str(daemon.endpoint())) as client:
            (model,) = client.models()
            assert (model.idle_sleep_ms, model.asleep_sessions, model.asleep_since) == (100_000, 0, None)
            assert tables.sleeps(model) == "by itself, after 100 s without a request; awake now"
            assert 'membroker_model_asleep_sessions{gpu_uuid="host",model="chat",tenant="red"} 0.0' in daemon.metrics()
            say(chat, number, SleepStatus.ASLEEP, asleep_ms=60_000, by_itself=True)
            until(shows_asleep)
            (model,) = client.models()
        assert model.asleep_since is not None
        assert timedelta(seconds=59) < datetime.now(UTC) - model.asleep_since
        assert tables.marks(model, "device") == " (asleep)"
        assert tables.sleeps(model).endswith("Z, by itself")
        assert any("sleeps by itself, after 100 s" in line for line in explain._now(model))
        until(
            lambda: 'membroker_model_asleep_sessions{gpu_uuid="host",model="chat",tenant="red"} 1.0' in daemon.metrics()
        )
        daemon.kill()
        daemon.start_again()
        chat.resume()
        assert not shows_asleep(), "a new daemon has not asked yet"
        say(chat, question(chat).sleep_id, SleepStatus.ASLEEP, asleep_ms=61_000)
        until(shows_asleep)
        (row,) = daemon.models()
        assert not row.asleep_by_itself, "an operator had put it to sleep"
        say(chat, question(chat).sleep_id)
        until(lambda: not shows_asleep())


def test_a_reload_changes_when_and_whether(daemon: Daemon) -> None:
    """At once, while no request waits; and not at all any more."""
    with raw.Session(daemon.endpoint()) as chat:
        chat.register("chat")
        say(chat, question(chat).sleep_id, idle_ms=150_000)
        reload(daemon, idle_sleep="always", tenants={"red": {"idle_sleep_seconds": 7.5}, "blue": {}})
        while not (asked := question(chat)).HasField("idle") or not asked.idle.seconds:
            say(chat, asked.sleep_id, idle_ms=150_000)
        assert (asked.idle.seconds, asked.idle.nanos) == (7, 500_000_000)
        say(chat, asked.sleep_id, SleepStatus.ASLEEP, asleep_ms=1)
        until(lambda: daemon.device().asleep_sessions)
        reload(daemon, idle_sleep_seconds=100.0, tenants={"red": {"idle_sleep_seconds": 0.0}, "blue": {}})
        until(lambda: not daemon.device().asleep_sessions)
        (row,) = daemon.models()
        assert not row.HasField("idle_sleep_ms")


def test_an_engine_of_the_library_sleeps_for_another_and_wakes_by_its_request() -> None:
    """Its weights are no memory that can be recalled: the other one would wait forever. Then it is the other way."""
    config = {**CONFIG, "tenants": {"red": {"idle_sleep_seconds": 0.5}, "blue": {}}}
    with running(config) as daemon, ExitStack() as ends, ThreadPoolExecutor(1) as threads:
        client, beside = (ends.enter_context(membroker.connect(str(daemon.endpoint()))) for _ in range(2))
        pool = ends.enter_context(client.register_model("chat").pool(page_size=PAGE, virtual_capacity=8 * PAGE))
        weights = ends.enter_context(beside.register_model("chat").pool(page_size=PAGE, virtual_capacity=24 * PAGE))
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
            got = threads.submit(other.register_model("big").allocate, 48 * MIB, wait=3_600)
            with got.result():
                until(lambda: sleeper.state == "asleep")
                until(lambda: daemon.device().asleep_sessions == 1)
                engine.add(Request(4))
                cache.grow()
                sleeper.wake()
                until(
                    lambda: "waits for memory" in sleeper.answer(membroker.types.SleepRequest(True, False, 0.0)).detail
                )
                assert not engine.free, "a request of a sleeping engine waits for blocks"
        until(lambda: sleeper.state == "awake")
        until(lambda: cache.grow() or len(engine.free) >= 4)
        assert bytes(weights.view(0, 5)) == b"hello"
