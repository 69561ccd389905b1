"""Pages that were borrowed ahead and not used: they go before the callback is asked."""

from __future__ import annotations

import pytest
from tests.client.session.recalls.asking import answer, answering, prepared, recall
from tests.support.daemons import until
from tests.support.fake_broker import MODEL, PAGE, Caller, PlayedBroker, model

import membroker
from membroker import Client, Model, Recall
from membroker.v1 import resources_pb2


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


def test_the_callback_is_asked_for_the_rest(broker: PlayedBroker, served: Model) -> None:
    """Two pools have spare pages, of which one is at the host and stays."""
    remaining: list[int] = []
    pool = prepared(broker, served, 2)
    kept = prepared(broker, served, 1, "host")
    answering(broker, served, lambda recall: remaining.append(recall.remaining))
    recall(broker, 1, 3 * PAGE)
    broker.hear("release")
    answer(broker)
    assert remaining == [PAGE]
    assert (pool.stats().spare_pages, kept.stats().spare_pages) == (0, 1)


def test_another_models_stay(broker: PlayedBroker, client: Client, served: Model) -> None:
    other = Model(client._session, resources_pb2.Model(name="tenants/red/models/other"))
    caller = Caller(lambda: other.pool(page_size=PAGE, virtual_capacity=64 * PAGE))
    pool = caller.value()
    caller = Caller(lambda: pool.prepare(PAGE))
    broker.lend()
    caller.value()
    answering(broker, served, lambda _: None)
    recall(broker, 1)
    answer(broker)
    assert pool.stats().spare_pages == 1


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
