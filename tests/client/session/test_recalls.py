"""Recalls, from the library's side: what the program is asked, what the broker hears, and what ends a recall."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.daemons import until
from tests.support.fake_broker import MODEL, PAGE, Caller, PlayedBroker, buffer, drop_all, is_away, line, model

import membroker
from membroker.session import background, notices
from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2

DEVICE, HOST = resources_pb2.LOCATION_DEVICE, resources_pb2.LOCATION_HOST


@pytest.fixture
def broker(broker: PlayedBroker) -> PlayedBroker:
    """A broker that recalls memory."""
    broker.revision = 2
    return broker


@pytest.fixture
def served(client: membroker.Client) -> membroker.Model:
    """A model that the client has registered."""
    line(client).inventory.registered(MODEL)
    return model(client)


def answering(broker: PlayedBroker, served: membroker.Model, callback: Callable[[membroker.Recall], object]) -> None:
    """Let a callback answer, and the broker know."""
    caller = Caller(lambda: served.on_recall(callback))
    frame = broker.hear("register_model")
    assert (frame.register_model.model_id, frame.register_model.answers_recalls) == ("m", True)
    broker.reply(frame.request_id, model=resources_pb2.Model(name=MODEL))
    caller.value()


def recall(broker: PlayedBroker, recall_id: int, size: int = PAGE, **other: Any) -> None:
    """Ask for memory of the model."""
    fields = {"model": MODEL, "location": DEVICE, "within": {"seconds": 1}} | other
    broker.notice(recall=pb.Recall(recall_id=recall_id, bytes=size, **fields))


def until_heard(broker: PlayedBroker, client: membroker.Client) -> None:
    """Wait until the client has read all notices until now."""
    broker.notice(draining=pb.Draining())
    until(lambda: line(client).notices.draining)
    broker.notice(undrained=pb.Undrained())
    until(lambda: not line(client).notices.draining)


def prepared(broker: PlayedBroker, served: membroker.Model, pages: int, location: str = "device") -> Any:
    """Return a pool that has borrowed this many pages ahead."""
    pool = served.pool(page_size=PAGE, location=location)
    caller = Caller(lambda: pool.prepare(pages * PAGE))
    broker.lend(pages)
    caller.value()
    return pool


class TestAnswers:
    def test_a_callback_releases_and_keeps(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        """A program has two buffers, is asked for three pages, and can spare one: the release, then the answer."""
        kept, _ = buffer(broker, client)
        spare, extent_id = buffer(broker, client)
        told: list[Any] = []

        def give(recall: membroker.Recall) -> None:
            told.extend((recall.model is served, recall.location, recall.size, recall.deadline - time.monotonic()))
            told.extend((recall.remaining, served.pending_recall is recall, threading.current_thread().name))
            spare.close()
            told.append(recall.remaining)

        answering(broker, served, give)
        recall(broker, 5, 3 * PAGE)
        assert list(broker.hear("release").release.extent_ids) == [extent_id]
        assert broker.hear("recall_answer").recall_answer.recall_id == 5
        until(lambda: served.pending_recall is None)
        left = told.pop(3)
        assert 0 < left <= 1
        assert told == [True, "device", 3 * PAGE, 3 * PAGE, True, "membroker-recall", 2 * PAGE]
        kept.close()

    @pytest.mark.parametrize("error", [ValueError("a mistake"), SystemExit("the user's own end"), KeyboardInterrupt()])
    def test_a_callback_that_raises(
        self,
        broker: PlayedBroker,
        served: membroker.Model,
        caplog: pytest.LogCaptureFixture,
        error: BaseException,
    ) -> None:
        """The broker is told that all is kept, the log has the error, and the next recall is heard."""

        def fail(_: membroker.Recall) -> None:
            raise error

        answering(broker, served, fail)
        for recall_id in (1, 2):
            recall(broker, recall_id)
            assert broker.hear("recall_answer").recall_answer.recall_id == recall_id
        assert caplog.text.count("a callback for recalls has failed") == 2
        assert repr(error)[:8] in caplog.text

    def test_a_recall_that_is_repeated(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        """The broker repeats what was not answered yet, and once more while the answer is on its way."""
        called, go_on = [], threading.Event()

        def slow(recall: membroker.Recall) -> None:
            called.append(recall)
            assert go_on.wait(30)

        answering(broker, served, slow)
        recall(broker, 1)
        until(lambda: called)
        recall(broker, 1)
        until_heard(broker, client)
        go_on.set()
        assert broker.hear("recall_answer").recall_answer.recall_id == 1
        until(lambda: not client._recalls._open)
        recall(broker, 1)
        until_heard(broker, client)
        recall(broker, 2)
        assert broker.hear("recall_answer").recall_answer.recall_id == 2
        assert len(called) == 2

    def test_one_after_the_other(self, broker: PlayedBroker, served: membroker.Model) -> None:
        """Two locations are asked for at once: the second callback begins when the first has returned."""
        inside, most, places = [0], [0], []

        def count(recall: membroker.Recall) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            places.append(recall.location)
            until(lambda: len(places) == 2 or len(served._recalls._open) == 2)
            inside[0] -= 1

        answering(broker, served, count)
        recall(broker, 1)
        recall(broker, 2, location=HOST)
        assert [broker.hear("recall_answer").recall_answer.recall_id for _ in range(2)] == [1, 2]
        assert (most, places) == ([1], ["device", "host"])

    def test_a_recall_that_another_replaces(self, broker: PlayedBroker, served: membroker.Model) -> None:
        """The broker has ended the first one, because its time was over: it gets no answer, only the second does."""
        given: list[membroker.Recall] = []
        answering(broker, served, lambda recall: given.append(recall) or membroker.DEFERRED)
        recall(broker, 1)
        until(lambda: given)
        recall(broker, 2)
        until(lambda: len(given) == 2)
        assert served.pending_recall is given[1]
        for one in given:
            one.done()
        assert broker.hear("recall_answer").recall_answer.recall_id == 2
        assert broker.hears_nothing()

    @pytest.mark.parametrize(
        "wrong", [{"model": "tenants/red/models/other"}, {"location": 0}, {"location": 77}, {"size": 0}, {"size": -1}]
    )
    def test_a_recall_that_makes_no_sense(
        self, broker: PlayedBroker, served: membroker.Model, wrong: dict[str, Any]
    ) -> None:
        """Of a model without a callback, of no place, of nothing: all is kept, and the callback never hears of it."""
        called: list[membroker.Recall] = []
        answering(broker, served, called.append)
        recall(broker, 1, **wrong)
        assert broker.hear("recall_answer").recall_answer.recall_id == 1
        assert called == []

    def test_more_recalls_than_a_broker_sends(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A callback is slow, and the broker sends recalls without an end: few are kept, and the next one is heard."""
        monkeypatch.setattr(notices, "MOST_RECALLS", 3)
        began, go_on = threading.Event(), threading.Event()

        def slow(_: membroker.Recall) -> None:
            began.set()
            assert go_on.wait(30)

        answering(broker, served, slow)
        recall(broker, 1)
        assert began.wait(30)
        for recall_id in range(2, 30):
            recall(broker, recall_id, location=HOST)
            recall(broker, 100 + recall_id, model="tenants/red/models/other")
        until_heard(broker, client)
        recalling = line(client).notices._recalling
        assert recalling is not None
        assert recalling.backlog == 3
        assert len(client._recalls._open) <= 2
        go_on.set()
        while broker.hear("recall_answer").recall_answer.recall_id != 102:
            pass
        until(lambda: not recalling.backlog)
        recall(broker, 200)
        until(lambda: broker.hear("recall_answer").recall_answer.recall_id == 200)


class TestDeferred:
    def test_another_thread_answers(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
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
        assert broker.hear("recall_answer").recall_answer.recall_id == 7
        assert broker.hears_nothing()

    def test_the_oldest_is_pending(self, broker: PlayedBroker, served: membroker.Model) -> None:
        answering(broker, served, lambda _: membroker.DEFERRED)
        recall(broker, 9, location=HOST)
        recall(broker, 3)
        until(lambda: all(one.shown for one in served._recalls._open.values()) and len(served._recalls._open) == 2)
        for place, recall_id in (("host", 9), ("device", 3)):
            pending = served.pending_recall
            assert pending is not None
            assert pending.location == place
            pending.done()
            assert broker.hear("recall_answer").recall_answer.recall_id == recall_id
        assert served.pending_recall is None

    def test_remaining_counts_this_model_and_place_only(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        """A release of another model, or at the host, does not count, nor what is released beyond the recall."""
        others = [
            (resources_pb2.Model(name="tenants/red/models/other"), "device"),
            (resources_pb2.Model(name=MODEL), "host"),
        ]
        held = []
        for registered, location in others:
            caller = Caller(
                lambda one=registered, at=location: membroker.Model(client._session, one).allocate(PAGE, at)
            )
            broker.lend()
            held.append(caller.value())
        answering(broker, served, lambda _: membroker.DEFERRED)
        recall(broker, 1, PAGE)
        until(lambda: served.pending_recall)
        pending = served.pending_recall
        assert pending is not None
        for one in held:
            one.close()
            broker.hear("release")
        assert pending.remaining == PAGE
        for _ in range(2):
            buffer(broker, client)[0].close()
            broker.hear("release")
            assert pending.remaining == 0


class TestInTheCallback:
    def test_nothing_can_be_borrowed(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
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
            lambda: served._as_source.charge(1, membroker.vmm.Location.HOST),  # type: ignore[attr-defined]
        ]
        pool.allocate(0, PAGE)

        def greedy(_: membroker.Recall) -> None:
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
        broker.hear("recall_answer")
        assert len(errors) == len(calls)
        assert all("return membroker.DEFERRED" in str(error) for error in errors)

    def test_the_client_may_be_closed(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        """A program that is asked for memory ends itself, in the callback: nothing waits for that thread."""
        _, extent_id = buffer(broker, client)
        answering(broker, served, lambda _: client.close())
        recall(broker, 1)
        assert list(broker.hear("release").release.extent_ids) == [extent_id]
        broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
        until(lambda: client._session._ended)
        until(lambda: "membroker-recall" not in {thread.name for thread in threading.enumerate()})

    def test_a_close_waits_for_a_callback_no_longer_than_it_must(
        self,
        broker: PlayedBroker,
        client: membroker.Client,
        served: membroker.Model,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A callback hangs. The program closes its client all the same."""
        monkeypatch.setattr(notices, "STOPPING_SECONDS", 0.1)
        began, go_on = threading.Event(), threading.Event()

        def hang(_: membroker.Recall) -> None:
            began.set()
            assert go_on.wait(30)

        answering(broker, served, hang)
        recall(broker, 1)
        assert began.wait(30)
        caller = Caller(client.close)
        broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
        caller.value()
        go_on.set()


class TestSparePages:
    def test_they_go_without_the_callback(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        """A pool has prepared four pages. Three are asked for, in whole pages: the ones that it would use last."""
        called: list[membroker.Recall] = []
        pool = prepared(broker, served, 4)
        answering(broker, served, called.append)
        recall(broker, 1, 2 * PAGE + 1)
        assert list(broker.hear("release").release.extent_ids) == [2, 3, 4]
        assert broker.hear("recall_answer").recall_answer.recall_id == 1
        assert called == []
        assert (pool.stats().mapped_pages, pool.stats().spare_pages) == (1, 1)
        assert pool.allocate(0, PAGE) == pool.base_address, "the page that is left needs no broker"
        with pytest.raises(membroker.NotMapped):
            pool.view(PAGE, PAGE)

    def test_the_callback_is_asked_for_the_rest(self, broker: PlayedBroker, served: membroker.Model) -> None:
        """Two pools have spare pages, of which one is at the host and stays."""
        remaining: list[int] = []
        pool = prepared(broker, served, 2)
        kept = prepared(broker, served, 1, "host")
        answering(broker, served, lambda recall: remaining.append(recall.remaining))
        recall(broker, 1, 3 * PAGE)
        broker.hear("release")
        broker.hear("recall_answer")
        assert remaining == [PAGE]
        assert (pool.stats().spare_pages, kept.stats().spare_pages) == (0, 1)

    def test_another_models_stay(self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model) -> None:
        other = membroker.Model(client._session, resources_pb2.Model(name="tenants/red/models/other"))
        caller = Caller(lambda: other.pool(page_size=PAGE, virtual_capacity=64 * PAGE))
        pool = caller.value()
        caller = Caller(lambda: pool.prepare(PAGE))
        broker.lend()
        caller.value()
        answering(broker, served, lambda _: None)
        recall(broker, 1)
        broker.hear("recall_answer")
        assert pool.stats().spare_pages == 1

    def test_a_shared_pools_pages_go_too(self, broker: PlayedBroker, client: membroker.Client) -> None:
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
        broker.hear("recall_answer")
        until(lambda: shared.global_stats().physical_usage_bytes == PAGE)


class TestOutages:
    def test_a_recall_ends_with_its_connection(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        """The broker asks again for what is late, with the same id; the first one's answer would be for nobody."""
        given: list[membroker.Recall] = []
        answering(broker, served, lambda recall: given.append(recall) or membroker.DEFERRED)
        recall(broker, 1)
        until(lambda: given)
        drop_all(broker, client)
        until(lambda: served.pending_recall is None)
        given[0].done()
        assert list(broker.resume().answering_models) == [MODEL]
        until(lambda: not is_away(client))
        given[0].done()
        assert broker.hears_nothing()
        recall(broker, 1)
        until(lambda: len(given) == 2)
        assert served.pending_recall is given[1]
        given[0].done()
        assert broker.hears_nothing()
        given[1].done()
        assert broker.hear("recall_answer").recall_answer.recall_id == 1

    def test_an_answer_that_was_lost(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        """The connection ended behind the answer, and the broker asks again: it is answered again."""
        called: list[membroker.Recall] = []
        answering(broker, served, called.append)
        for turn in (1, 2):
            recall(broker, 1)
            assert broker.hear("recall_answer").recall_answer.recall_id == 1
            assert len(called) == turn
            drop_all(broker, client)
            broker.resume()
            until(lambda: not is_away(client))

    def test_a_broker_of_another_revision(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        """The next broker is older, and would end the connection over an answer: it gets none."""
        called: list[membroker.Recall] = []
        answering(broker, served, called.append)
        drop_all(broker, client)
        broker.revision = 1
        broker.resume()
        until(lambda: not is_away(client))
        recall(broker, 1)
        broker.notice(draining=pb.Draining())
        until(lambda: line(client).notices.draining)
        assert called == []
        assert broker.hears_nothing()

    def test_it_is_said_again_what_it_answers(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        """After on_recall(None), and after the model was left, a resume does not say that the session answers."""
        answering(broker, served, lambda _: membroker.DEFERRED)
        recall(broker, 1)
        until(lambda: served.pending_recall)
        caller = Caller(lambda: served.on_recall(None))
        frame = broker.hear("register_model")
        assert frame.register_model.HasField("answers_recalls")
        assert not frame.register_model.answers_recalls
        broker.reply(frame.request_id, model=resources_pb2.Model(name=MODEL))
        assert broker.hear("recall_answer").recall_answer.recall_id == 1, "all is kept"
        caller.value()
        served.on_recall(None)
        assert broker.hears_nothing()
        recall(broker, 2)
        assert broker.hear("recall_answer").recall_answer.recall_id == 2
        drop_all(broker, client)
        assert not broker.resume().answering_models
        until(lambda: not is_away(client))
        answering(broker, served, lambda _: None)
        caller = Caller(served.unregister)
        broker.reply(broker.hear("unregister_model").request_id, unregister_model={})
        caller.value()
        drop_all(broker, client)
        assert not broker.resume().answering_models
        until(lambda: not is_away(client))
        with pytest.raises(membroker.ModelNotFound, match="was left by this session"):
            served.on_recall(lambda _: None)

    def test_a_refused_registration_changes_nothing(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        caller = Caller(lambda: served.on_recall(lambda _: None))
        broker.refuse(broker.hear("register_model").request_id, "TOO_MANY_REQUESTS")
        assert isinstance(caller.end().error, membroker.TooMany)
        drop_all(broker, client)
        assert not broker.resume().answering_models
        with pytest.raises(membroker.InvalidRequest, match="on_recall takes a function"):
            served.on_recall(3)  # type: ignore[arg-type]


class TestHeldUp:
    def test_a_block_without_recalls(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        """A graph is captured: no callback runs, no spare page and no garbage goes back, until it is over."""
        called: list[membroker.Recall] = []
        pool = prepared(broker, served, 1)
        garbage, extent_id = buffer(broker, client)
        answering(broker, served, called.append)
        with client.defer_recalls():
            with client.defer_recalls():
                recall(broker, 1, 2 * PAGE)
            del garbage
            gc.collect()
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
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        began, go_on = threading.Event(), threading.Event()

        def slow(_: membroker.Recall) -> None:
            began.set()
            assert go_on.wait(30)

        answering(broker, served, slow)
        recall(broker, 1)
        assert began.wait(30)
        inside = threading.Event()

        def capture() -> None:
            with client.defer_recalls():
                inside.set()

        caller = Caller(capture)
        recalling = line(client).notices._recalling
        assert recalling is not None
        until(lambda: recalling._changed._waiting)
        assert not inside.is_set()
        go_on.set()
        caller.value()
        broker.hear("recall_answer")

    def test_it_begins_although_a_callback_waits_for_it(
        self,
        broker: PlayedBroker,
        client: membroker.Client,
        served: membroker.Model,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The callback wants a lock that the capturing thread holds: neither waits forever."""
        monkeypatch.setattr(background, "STOPPING_SECONDS", 0.1)
        lock = threading.Lock()

        def locked(_: membroker.Recall) -> None:
            with lock:
                pass

        answering(broker, served, locked)
        with lock:
            recall(broker, 1)
            until(lambda: line(client).notices._recalling._busy)  # type: ignore[union-attr]
            with client.defer_recalls():
                assert broker.hears_nothing()
        broker.hear("recall_answer")

    def test_a_client_is_closed_in_the_block(
        self, broker: PlayedBroker, client: membroker.Client, served: membroker.Model
    ) -> None:
        """What was held up is done in the end."""
        answering(broker, served, lambda _: None)
        told: list[membroker.Notice] = []
        client.on_notice(told.append)

        def end() -> None:
            with client.defer_recalls():
                broker.notice(undrained=pb.Undrained())
                until_heard(broker, client)
                assert told == []
                client.close()

        caller = Caller(end)
        broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
        caller.value()
        assert told[0] == membroker.Undrained()


def test_a_client_that_is_garbage_ends_although_its_callback_refers_to_it(broker: PlayedBroker) -> None:
    """A notebook's cell is run again: the callback has the model, the model the session, and no thread has either."""
    client: membroker.Client | None = broker.connect(timeout=30)
    assert client is not None
    line(client).inventory.registered(MODEL)
    served: membroker.Model | None = model(client)
    assert served is not None

    class Engine:
        def __init__(self, served: membroker.Model) -> None:
            self.pool = served.pool(page_size=PAGE)

        def give(self, recall: membroker.Recall) -> None:
            self.pool.trim()

    answering(broker, served, Engine(served).give)
    session = weakref.ref(client._session)
    del client, served
    until(lambda: (gc.collect() and False) or session() is None)
    broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("membroker")])


def test_the_sentinel_has_a_name() -> None:
    assert repr(membroker.DEFERRED) == "membroker.DEFERRED"
    assert sys.modules["membroker.session.recalls"].DEFERRED is membroker.DEFERRED


def test_a_log_of_a_hanging_driver_is_no_end(
    broker: PlayedBroker, client: membroker.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spare pages that the driver does not unmap are kept, the log says so, and the callback is asked."""
    line(client).inventory.registered(MODEL)
    served = model(client)
    remaining: list[int] = []
    pool = prepared(broker, served, 1)
    answering(broker, served, lambda recall: remaining.append(recall.remaining))

    def stuck(offset: int, size: int) -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "membroker"):
        patch.setattr(pool._holding.region, "unbind", stuck)
        recall(broker, 1)
        broker.hear("recall_answer")
    assert remaining == [PAGE]
    assert "spare pages that the broker wants back could not be released" in caplog.text
    assert pool.stats().spare_pages == 1
