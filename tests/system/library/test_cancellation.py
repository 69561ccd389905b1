"""Threads that give up: their waits end in the broker, and nothing that was granted meanwhile is left."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.fake_broker import Caller
from tests.support.seeds import chosen_seed
from tests.support.segments import one_transport
from tests.support.sizes import MIB, PAGE
from tests.system.library.test_waiting import waiting

import membroker
from membroker import versions
from membroker.errors import Cancelled

CAPACITY = 64 * MIB
LONG = 600
WAITS: dict[str, Callable[[membroker.Model], Any]] = {
    "a buffer": lambda model: model.allocate(PAGE, timeout=LONG),
    "a segment": lambda model: model.create_segment("s", PAGE, timeout=LONG),
    "a growable buffer": lambda model: model.growable_buffer(PAGE, CAPACITY, PAGE, timeout=LONG),
    "pages": lambda model: model.pool(page_size=PAGE, virtual_capacity=CAPACITY).allocate(0, PAGE, timeout=LONG),
    "a declaration": lambda model: model.declare(PAGE, timeout=LONG),
}


def in_scope(scope: membroker.CancelScope, work: Callable[[], Any]) -> Caller:
    """Do `work` in a scope, in a thread of its own."""

    def call() -> Any:
        with scope:
            return work()

    return Caller(call)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running({"capacity": CAPACITY}) as one:
        yield one


def test_a_wait_ends(daemon: Daemon, client: membroker.Client) -> None:
    """Memory is full, a thread waits for it and gives up: the broker forgets the request, and the session works."""
    model = client.model("m", virtual_capacity=CAPACITY)
    for wait in WAITS.values():
        held = model.allocate(CAPACITY)
        scope = membroker.CancelScope()
        caller = in_scope(scope, lambda wait=wait: wait(model))
        until(lambda: waiting(daemon) == 1)
        scope.cancel()
        assert isinstance(caller.end().error, Cancelled)
        assert waiting(daemon) == 0
        held.close()
        assert daemon.books().lent_bytes == 0
        model.allocate(CAPACITY).close()


@one_transport
def test_an_attach_ends(daemon: Daemon, client: membroker.Client) -> None:
    """It waits for a seal that does not come."""
    segment = client.model("m").create_segment("weights", PAGE)
    scope = membroker.CancelScope()
    with membroker.connect(daemon.endpoint()) as reader:
        caller = in_scope(scope, lambda: reader.attach("weights", timeout=LONG))
        until(lambda: len(reader._session.connection.calls.at_broker) == 1)
        scope.cancel()
        assert isinstance(caller.end().error, Cancelled)
        segment.seal()
        assert client.segments()[0].sessions == 1


@one_transport
def test_a_wait_for_a_newer_version_ends(client: membroker.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server waits for weights that nobody publishes, and is stopped."""
    looks, look = [], versions.rows_of

    def counted(*arguments: Any) -> Any:
        looks.append(arguments)
        return look(*arguments)

    monkeypatch.setattr(versions, "rows_of", counted)
    serving = client.model("m").create_segment("weights", PAGE)
    serving.seal()
    scope = membroker.CancelScope()
    caller = in_scope(scope, lambda: client.attach("weights", timeout=LONG, newer_than=serving))
    until(lambda: len(looks) > 1)
    scope.cancel()
    assert isinstance(caller.end().error, Cancelled)


@one_transport
def test_a_call_that_waits_for_another_call(daemon: Daemon, client: membroker.Client) -> None:
    """Two threads grow one buffer: one waits for memory, and the other for the first. Each can give up."""
    model = client.model("m")
    grown = model.growable_buffer(0, CAPACITY, PAGE)
    with model.allocate(CAPACITY):
        first, second = membroker.CancelScope(), membroker.CancelScope()
        one = in_scope(first, lambda: grown.grow(PAGE, timeout=LONG))
        until(lambda: waiting(daemon) == 1)
        two = in_scope(second, lambda: grown.grow(PAGE, timeout=LONG))
        until(lambda: len(grown._turns._changed.waiting) == 1)
        second.cancel()
        assert isinstance(two.end().error, Cancelled)
        assert one.is_alive()
        first.cancel()
        assert isinstance(one.end().error, Cancelled)
        assert grown.size == 0


@pytest.mark.parametrize("others", [0, 1])
def test_a_call_that_begins_while_the_client_closes(
    daemon: Daemon, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its addresses, and asks for memory when the close has ended all calls, over an old or a new connection."""
    reserved, closing = threading.Event(), threading.Event()
    client = membroker.connect(daemon.endpoint())
    model = client.model("m")
    held = model.allocate(CAPACITY)
    waits = [Caller(lambda: model.allocate(PAGE, timeout=LONG)) for _ in range(others)]
    until(lambda: waiting(daemon) == others)
    reconnecting = client._session.reconnecting
    call = reconnecting.call

    def call_later(*args: Any, **keywords: Any) -> Any:
        reserved.set()
        assert closing.wait(LONG)
        return call(*args, **keywords)

    monkeypatch.setattr(reconnecting, "call", call_later)
    late = Caller(lambda: model.allocate(CAPACITY, timeout=LONG))
    assert reserved.wait(LONG)
    client.close()
    assert held.closed
    closing.set()
    for caller in (*waits, late):
        assert isinstance(caller.end().error, membroker.ClosedError)


def test_while_the_broker_is_away(daemon: Daemon) -> None:
    """A call that waits for the next daemon ends too."""
    client = membroker.connect(daemon.endpoint(), outage=LONG)
    model = client.model("m")
    daemon.kill()
    scope = membroker.CancelScope()
    caller = in_scope(scope, lambda: model.allocate(PAGE, timeout=LONG))
    until(lambda: bool(client._session.reconnecting._changed.waiting))
    scope.cancel()
    assert isinstance(caller.end().error, Cancelled)
    daemon.start_again()
    with client:
        model.allocate(PAGE).close()


@pytest.mark.deep
def test_grants_and_cancellations_cross(daemon: Daemon, client: membroker.Client) -> None:
    """Threads give up at any moment while memory comes and goes: in the end all of it is there."""
    chance = random.Random(chosen_seed())
    model = client.model("m")
    for _ in range(40):
        held = [model.allocate(PAGE) for _ in range(CAPACITY // PAGE)]
        scopes = [membroker.CancelScope() for _ in range(8)]
        callers = [in_scope(scope, lambda: model.allocate(PAGE, timeout=LONG)) for scope in scopes]
        deeds: list[Callable[[], Any]] = [buffer.close for buffer in held] + [scope.cancel for scope in scopes]
        chance.shuffle(deeds)
        for deed in deeds:
            deed()
        for caller in callers:
            caller.end()
            assert isinstance(caller.error, Cancelled | None)
            if caller.error is None:
                caller.result.close()
        assert (daemon.books().lent_bytes, waiting(daemon)) == (0, 0)


@one_transport
def test_a_scope_ends_the_calls_in_the_blocks_within_it(client: membroker.Client) -> None:
    model = client.model("m")
    with model.allocate(CAPACITY), membroker.CancelScope() as outer:
        inner = membroker.CancelScope()
        canceller = Caller(outer.cancel)
        with inner, pytest.raises(Cancelled):
            model.allocate(CAPACITY, timeout=LONG)
        canceller.end()
        assert inner.cancelled
