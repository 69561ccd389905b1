"""Recalls that the broker raises, and the spare pages that go first: what the program is told, and what it answers."""

from __future__ import annotations

import threading

import pytest
from tests.client.session.recalls.asking import answer, answering, prepared, recall, until_heard
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import MODEL, PAGE, Caller, PlayedBroker, buffer, model

import membroker
from membroker import Client, Model, Recall
from membroker.v1 import resources_pb2
from membroker.v1.handoff_pb2 import RecallAnswer


def test_a_callback_that_looks_again(broker: PlayedBroker, client: Client, served: Model) -> None:
    """A callback waits for a step of its engine. The broker needs two pages instead of one: it releases both."""
    first, second = buffer(broker, client), buffer(broker, client)
    called, go_on = [], threading.Event()

    def give(one: Recall) -> None:
        called.append((one.size, one.deadline))
        assert go_on.wait(DEADLINE_SECONDS)
        for memory, _ in (first, second)[: one.remaining // PAGE]:
            memory.close()
        called.append((one.remaining, one.deadline))

    answering(broker, served, give)
    recall(broker, 1)
    until(lambda: called)
    recall(broker, 1, 2 * PAGE, within={"seconds": 60})
    until_heard(broker, client)
    go_on.set()
    assert [broker.hear("release").release.extent_ids[0] for _ in range(2)] == [first[1], second[1]]
    assert answer(broker) == RecallAnswer(recall_id=1, bytes=PAGE)
    (size, deadline), (remaining, same) = called
    assert (size, remaining, same) == (PAGE, 0, deadline)


def test_a_recall_that_becomes_urgent(broker: PlayedBroker, client: Client, served: Model) -> None:
    """A request within a guarantee begins to wait for what an engine is asked for already. It is woken again, once."""
    called: list[tuple[int, bool]] = []

    def wake(one: Recall) -> object:
        called.append((one.remaining, one.is_guaranteed))
        return membroker.DEFERRED

    answering(broker, served, wake)
    recall(broker, 1, 3 * PAGE)
    until(lambda: len(called) == 1)
    recall(broker, 1, 2 * PAGE, guaranteed=True)  # late by now, and the notice before was lost
    until(lambda: len(called) == 2)
    recall(broker, 1, 3 * PAGE, guaranteed=True)
    recall(broker, 1, 2 * PAGE)
    until_heard(broker, client)
    assert called == [(3 * PAGE, False), (3 * PAGE, True)]
    pending = served.pending_recall
    assert pending is not None
    assert (pending.size, pending.is_guaranteed) == (3 * PAGE, True)
    pending.done()
    assert answer(broker) == RecallAnswer(recall_id=1, bytes=3 * PAGE)


# Pages that were borrowed ahead and not used go before the callback is asked


def test_they_go_without_the_callback(broker: PlayedBroker, client: Client, served: Model) -> None:
    """A pool has prepared four pages. Three are asked for, in whole pages: the ones that it would use last."""
    called: list[Recall] = []
    pool = prepared(broker, served, 4)
    answering(broker, served, called.append)
    recall(broker, 1, 2 * PAGE + 1)
    assert list(broker.hear("release").release.extent_ids) == [2, 3, 4]
    assert answer(broker).recall_id == 1
    assert called == []
    assert (pool.stats().mapped_pages, pool.stats().spare_pages) == (1, 1)
    assert pool.allocate(0, PAGE) == pool.base_address, "the page that is left needs no broker"
    with pytest.raises(membroker.NotMapped):
        pool.view(PAGE, PAGE)


def test_the_callback_is_asked_for_the_rest(broker: PlayedBroker, client: Client, served: Model) -> None:
    """Of three pools with spare pages one is at the host, and one another model's: those stay."""
    remaining: list[int] = []
    pool = prepared(broker, served, 2)
    other = Model(client._session, resources_pb2.Model(name="tenants/red/models/other", virtual_capacity_bytes=1 << 30))
    kept = [prepared(broker, served, 1, "host"), prepared(broker, other, 1)]
    answering(broker, served, lambda recall: remaining.append(recall.remaining))
    recall(broker, 1, 3 * PAGE)
    broker.hear("release")
    answer(broker)
    assert remaining == [PAGE]
    assert [one.stats().spare_pages for one in (pool, *kept)] == [0, 1, 1]


def test_a_shared_pools_pages_go_too(broker: PlayedBroker, client: Client) -> None:
    """Its pages count for its own limit as well, which has room again."""
    caller = Caller(lambda: membroker.SharedMemoryPool(client, 2 * PAGE, PAGE))
    shared = caller.value()
    caller = Caller(lambda: shared.register_model("m", 64 * PAGE))
    frame = broker.hear("register_model")
    broker.reply(frame.request_id, model=resources_pb2.Model(name=MODEL, virtual_capacity_bytes=1 << 30))
    caller.value()
    served = model(client)
    pool = shared.pool("m")
    caller = Caller(lambda: pool.prepare(2 * PAGE))
    broker.lend(2)
    caller.value()
    answering(broker, served, lambda _: None)
    recall(broker, 1)
    assert list(broker.hear("release").release.extent_ids) == [2]
    answer(broker)
    until(lambda: shared.global_stats().physical_usage_bytes == PAGE)
