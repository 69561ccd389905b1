"""A callback: what it can do, when it is called, and what waits for it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest
from tests.client.session.recalls.asking import Held, answer, answering, prepared, recall, until_heard
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import MODEL, PAGE, Caller, PlayedBroker, buffer, line, model
from tests.support.garbage import collect
from tests.support.processes import threads_of_library

import membroker
from membroker import Client, Model, Recall
from membroker.session import background, notices
from membroker.v1 import handoff_pb2 as pb


class TestInTheCallback:
    def test_nothing_can_be_borrowed(self, broker: PlayedBroker, client: Client, served: Model) -> None:
        """The broker waits for this thread, so it may not wait for the broker. Another thread of the program may."""
        pool = prepared(broker, served, 1)
        page, _ = buffer(broker, client)
        errors: list[membroker.MembrokerError] = []
        calls: list[Callable[[], object]] = [
            lambda: served.allocate(PAGE),
            lambda: pool.allocate(4 * PAGE, PAGE),
            lambda: served.growable_buffer(PAGE, PAGE, PAGE),
            lambda: served.sparse_array((64, PAGE), "U8").back(0),
            lambda: served.create_segment("weights", 1),
            lambda: served.source.charge(1, membroker.vmm.Location.HOST),  # type: ignore[attr-defined]
        ]
        pool.allocate(0, PAGE)

        def greedy(_: Recall) -> None:
            for call in calls:
                try:
                    call()
                except membroker.InvalidRequest as error:
                    errors.append(error)
            assert pool.stats().mapped_pages == 1
            page.close()

        answering(broker, served, greedy)
        recall(broker, 1)
        broker.hear("release")
        answer(broker)
        assert len(errors) == len(calls)
        assert all("return membroker.DEFERRED" in str(error) for error in errors)

    def test_the_client_may_be_closed(self, broker: PlayedBroker, client: Client, served: Model) -> None:
        """A program that is asked for memory ends itself, in the callback: nothing waits for that thread."""
        _, extent_id = buffer(broker, client)
        answering(broker, served, lambda _: client.close())
        recall(broker, 1)
        assert list(broker.hear("release").release.extent_ids) == [extent_id]
        broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
        until(lambda: client._session._ended)
        until(lambda: "membroker-recall" not in {thread.name for thread in threading.enumerate()})

    def test_a_close_waits_for_a_callback_no_longer_than_it_must(
        self, broker: PlayedBroker, client: Client, served: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A callback hangs. The program closes its client all the same."""
        monkeypatch.setattr(notices, "STOPPING_SECONDS", 0.1)
        held = Held()
        answering(broker, served, held)
        recall(broker, 1)
        until(lambda: held.called)
        caller = Caller(client.close)
        broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
        caller.value()
        held.go_on.set()


class TestHeldUp:
    def test_a_block_without_recalls(self, broker: PlayedBroker, client: Client, served: Model) -> None:
        """A graph is captured: no callback runs, no spare page and no garbage goes back, until it is over."""
        called: list[Recall] = []
        pool = prepared(broker, served, 1)
        garbage, extent_id = buffer(broker, client)
        answering(broker, served, called.append)
        with client.defer_recalls():
            with client.defer_recalls():
                recall(broker, 1, 2 * PAGE)
            del garbage
            collect()
            until_heard(broker, client)
            assert broker.hears_nothing()
            assert called == []
            assert served.pending_recall is None
        # The garbage is the work of another thread than the recall.
        frames = [broker.hear_any() for _ in range(3)]
        assert sorted(id for frame in frames for id in frame.release.extent_ids) == [1, extent_id]
        assert [frame.recall_answer.recall_id for frame in frames if frame.HasField("recall_answer")] == [1]
        pool.close()

    def test_it_begins_when_a_running_callback_has_ended(
        self, broker: PlayedBroker, client: Client, served: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(background, "STOPPING_SECONDS", DEADLINE_SECONDS)  # or it would begin after five seconds
        held = Held()
        answering(broker, served, held)
        recall(broker, 1)
        until(lambda: held.called)
        inside = threading.Event()

        def capture() -> None:
            with client.defer_recalls():
                inside.set()

        caller = Caller(capture)
        recalling = line(client).notices._recalling
        assert recalling is not None
        until(lambda: recalling._changed.waiting)
        assert not inside.is_set()
        held.go_on.set()
        caller.value()
        answer(broker)

    def test_it_begins_although_a_callback_waits_for_it(
        self, broker: PlayedBroker, client: Client, served: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The callback wants a lock that the capturing thread holds: neither waits forever."""
        monkeypatch.setattr(background, "STOPPING_SECONDS", 0.1)
        lock = threading.Lock()

        def locked(_: Recall) -> None:
            with lock:
                pass

        answering(broker, served, locked)
        with lock:
            recall(broker, 1)
            until(lambda: line(client).notices._recalling._busy)  # type: ignore[union-attr]
            with client.defer_recalls():
                assert broker.hears_nothing()
        answer(broker)


def test_a_client_that_is_garbage_ends_although_its_callback_refers_to_it(broker: PlayedBroker) -> None:
    """A notebook's cell is run again: the callback has the model, the model the session, and no thread has either."""
    threads = threads_of_library()
    client: Client | None = broker.connect(timeout=DEADLINE_SECONDS)
    assert client is not None
    line(client).inventory.registered(MODEL)
    served: Model | None = model(client)
    assert served is not None

    class Engine:
        def __init__(self, served: Model) -> None:
            self.pool = served.pool(page_size=PAGE)

        def give(self, recall: Recall) -> None:
            self.pool.trim()

    answering(broker, served, Engine(served).give)
    session = weakref.ref(client._session)
    del client, served

    def is_forgotten() -> bool:
        collect()
        return session() is None

    until(is_forgotten)
    broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
    until(lambda: threads_of_library() <= threads)
