"""Answers to recalls: what the program is asked, in which order, and what the broker hears."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tests.client.session.recalls.asking import HOST, Held, answer, answering, recall, until_heard
from tests.support.daemons import until
from tests.support.fake_broker import MODEL, PAGE, PlayedBroker, buffer, line

import membroker
from membroker import Client, Model, Recall
from membroker.session import notices
from membroker.types import SleepRequest, SleepStatus
from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2


class TestAnswers:
    def test_a_callback_releases_and_keeps(self, broker: PlayedBroker, client: Client, served: Model) -> None:
        """A program has two buffers, is asked for three pages, and can spare one: the release, then the answer."""
        kept, _ = buffer(broker, client)
        spare, extent_id = buffer(broker, client)
        told: list[Any] = []

        def give(recall: Recall) -> None:
            told.extend((recall.model is served, recall.location, recall.size, recall.deadline - time.monotonic()))
            told.extend((recall.remaining, served.pending_recall is recall, threading.current_thread().name))
            spare.close()
            told.append(recall.remaining)

        assert served.recall_callback is None
        answering(broker, served, give)
        assert served.recall_callback is give
        recall(broker, 5, 3 * PAGE)
        assert list(broker.hear("release").release.extent_ids) == [extent_id]
        assert answer(broker).recall_id == 5
        until(lambda: served.pending_recall is None)
        left = told.pop(3)
        assert 0 < left <= 3600
        assert told == [True, "device", 3 * PAGE, 3 * PAGE, True, "membroker-recall", 2 * PAGE]
        kept.close()

    def test_a_callback_that_raises(
        self, broker: PlayedBroker, served: Model, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The broker is told that all is kept, the log has the error, and the next recall is heard."""
        errors = [ValueError("a mistake"), SystemExit("the user's own end"), KeyboardInterrupt()]

        def fail(_: Recall) -> None:
            raise errors.pop()

        answering(broker, served, fail)
        for recall_id in (1, 2, 3):
            recall(broker, recall_id)
            assert answer(broker).recall_id == recall_id
        assert caplog.text.count("a callback for recalls has failed") == 3
        assert "a mistake" in caplog.text

    def test_more_recalls_than_a_broker_sends(
        self, broker: PlayedBroker, client: Client, served: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A callback is slow, and the broker sends recalls without an end: few are kept, and the next one is heard."""
        monkeypatch.setattr(notices, "MOST_RECALLS", 3)
        held = Held()
        answering(broker, served, held)
        recall(broker, 1)
        until(lambda: held.called)
        for recall_id in range(2, 30):
            recall(broker, recall_id, location=HOST)
            recall(broker, 100 + recall_id, model="tenants/red/models/other")
        until_heard(broker, client)
        recalling = line(client).notices._recalling
        assert recalling is not None
        assert recalling.backlog == 3
        assert len(client._recalls._open) <= 2
        held.go_on.set()
        while answer(broker).recall_id != 102:
            pass
        until(lambda: not recalling.backlog)
        recall(broker, 200)
        until(lambda: answer(broker).recall_id == 200)


class TestDeferred:
    def test_another_thread_answers(self, broker: PlayedBroker, client: Client, served: Model) -> None:
        """An engine's scheduler polls once a step, releases, and answers: once, however often it says so."""
        page, extent_id = buffer(broker, client)
        answering(broker, served, lambda _: membroker.DEFERRED)
        assert served.pending_recall is None
        recall(broker, 7)
        until(lambda: served.pending_recall)
        pending = served.pending_recall
        assert pending is not None
        until(lambda: not line(client).notices._recalling._busy)  # type: ignore[union-attr]
        assert broker.hears_nothing()
        assert (pending.size, pending.remaining) == (PAGE, PAGE)
        page.close()
        assert pending.remaining == 0
        pending.done()
        assert served.pending_recall is None
        pending.done()
        assert list(broker.hear("release").release.extent_ids) == [extent_id]
        assert answer(broker).recall_id == 7
        assert broker.hears_nothing()


def test_a_question_about_sleep_is_answered_by_its_callback(
    broker: PlayedBroker, client: Client, served: Model
) -> None:
    """A program without a callback answers that it cannot sleep, and needs no thread for that."""
    asked: list[SleepRequest] = []

    def status() -> Any:
        return broker.hear("sleep_answer").sleep_answer.status

    broker.notice(sleep=pb.Sleep(sleep_id=7, model=MODEL, wake=True))
    assert status().state == resources_pb2.SleepStatus.UNSUPPORTED
    assert line(client).notices._recalling is None
    served.on_sleep(lambda request: asked.append(request) or SleepStatus("asleep", cache_bytes=PAGE))  # type: ignore[func-returns-value]
    broker.notice(sleep=pb.Sleep(sleep_id=8, model=MODEL, wake=True, keep_weights=True))
    assert status().state == resources_pb2.SleepStatus.ASLEEP
    assert [(one.wake, one.keep_weights) for one in asked] == [(True, True)]
