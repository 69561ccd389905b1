"""Open recalls that the broker raises: what the program is told, and which part of it an answer is for."""

from __future__ import annotations

import threading

import pytest
from tests.client.session.recalls.asking import HOST, answer, answering, deferring, prepared, recall, until_heard
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import MODEL, PAGE, PlayedBroker, buffer

import membroker
from membroker import Client, Model, Recall
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


def test_a_callback_that_had_looked_before(broker: PlayedBroker, client: Client, served: Model) -> None:
    """A callback is about to return when the broker raises its recall. It has not said that it keeps the rest."""
    memory, _ = buffer(broker, client)
    called, go_on = [], threading.Event()

    def give(one: Recall) -> None:
        called.append(one.remaining)
        memory.close()
        assert go_on.wait(DEADLINE_SECONDS)

    answering(broker, served, give)
    recall(broker, 1)
    broker.hear("release")
    recall(broker, 1, 2 * PAGE)
    until_heard(broker, client)
    go_on.set()
    assert answer(broker) == RecallAnswer(recall_id=1, bytes=PAGE)
    recall(broker, 1, 3 * PAGE)  # it had not heard the answer
    recall(broker, 2)
    assert answer(broker) == RecallAnswer(recall_id=2, bytes=PAGE)
    assert called == [PAGE, PAGE]


def test_a_deferred_recall(broker: PlayedBroker, client: Client, served: Model) -> None:
    """An engine is woken for a recall, and again when it is raised. It is the same recall, and has one answer."""
    called: list[tuple[Recall, int]] = []

    def wake(one: Recall) -> object:
        called.append((one, one.remaining))
        return membroker.DEFERRED

    answering(broker, served, wake)
    recall(broker, 1, PAGE)
    until(lambda: len(called) == 1)
    recall(broker, 1, 3 * PAGE)
    until(lambda: len(called) == 2)
    recall(broker, 1, 2 * PAGE)  # late by now, and one page has come
    recall(broker, 1, -PAGE)
    until_heard(broker, client)
    pending = served.pending_recall
    assert pending is not None
    assert called == [(pending, PAGE), (pending, 3 * PAGE)]
    assert (pending.size, pending.remaining) == (3 * PAGE, 3 * PAGE)
    assert repr(pending) == f"<membroker.Recall of {3 * PAGE} bytes of {MODEL} at device>"
    pending.done()
    assert answer(broker) == RecallAnswer(recall_id=1, bytes=3 * PAGE)
    assert served.pending_recall is None


def test_an_answer_that_crosses_a_raise(broker: PlayedBroker, client: Client, served: Model) -> None:
    """A program answers while the thread for callbacks is busy with another recall. It knows of no raise."""
    called, go_on = [], threading.Event()

    def wake(one: Recall) -> object:
        called.append(one)
        assert one.location == "device" or go_on.wait(DEADLINE_SECONDS)
        return membroker.DEFERRED

    answering(broker, served, wake)
    recall(broker, 1)
    until(lambda: len(called) == 1)
    recall(broker, 2, location=HOST)
    until(lambda: len(called) == 2)
    recall(broker, 1, 2 * PAGE)
    until_heard(broker, client)
    called[0].done()
    assert answer(broker) == RecallAnswer(recall_id=1, bytes=PAGE)
    go_on.set()
    until(lambda: served.pending_recall is called[1])
    called[1].done()
    assert answer(broker) == RecallAnswer(recall_id=2, bytes=PAGE)
    assert len(called) == 2


def test_spare_pages_go_first(broker: PlayedBroker, served: Model) -> None:
    """An engine works on a recall when it is raised. Pages that nobody uses are enough for both."""
    called: list[Recall] = []
    answering(broker, served, deferring(called))
    recall(broker, 1)
    until(lambda: called)
    pool = prepared(broker, served, 2)
    recall(broker, 1, 2 * PAGE)
    assert len(broker.hear("release").release.extent_ids) == 2
    assert answer(broker) == RecallAnswer(recall_id=1, bytes=2 * PAGE)
    assert (len(called), pool.physical_usage_bytes) == (1, 0)


def test_a_broker_that_is_wrong(
    broker: PlayedBroker, client: Client, served: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """A number that is open comes with another model or location. Nothing of it is done."""
    called: list[Recall] = []
    answering(broker, served, deferring(called))
    recall(broker, 1)
    until(lambda: called)
    recall(broker, 1, 2 * PAGE, location=HOST)
    recall(broker, 1, 2 * PAGE, model="tenants/t/models/other")
    until_heard(broker, client)
    assert caplog.text.count("for other memory") == 2
    assert called[0].size == PAGE
    called[0].done()
    assert answer(broker) == RecallAnswer(recall_id=1, bytes=PAGE)
    assert len(called) == 1
