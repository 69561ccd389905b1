"""Recalls that the broker raises, and the spare pages that go first: what the program is told, and what it answers."""

from __future__ import annotations

import pytest
from tests.client.session.recalls.asking import answer, answering, prepared, recall, until_heard
from tests.support.daemons import until
from tests.support.fake_broker import PAGE, PlayedBroker

import membroker
from membroker import Client, Model, Recall
from membroker.v1 import resources_pb2
from membroker.v1.handoff_pb2 import RecallAnswer


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
