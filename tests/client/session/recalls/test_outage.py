"""Recalls and outages: what ends with a connection, and what is said again on the next."""

from __future__ import annotations

import pytest
from tests.client.session.recalls.asking import answer, answering, recall
from tests.support.daemons import until
from tests.support.fake_broker import MODEL, Caller, PlayedBroker, drop_all, is_away, line

import membroker
from membroker import Client, Model, Recall
from membroker.session import recalls
from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2


def test_a_broker_of_another_revision(broker: PlayedBroker, client: Client, served: Model) -> None:
    """The next broker is older, and would end the connection over an answer: it gets none."""
    called: list[Recall] = []
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


def test_it_is_said_again_what_it_answers(broker: PlayedBroker, client: Client, served: Model) -> None:
    """After on_recall(None), and after the model was left, a resume does not say that the session answers."""
    answering(broker, served, lambda _: membroker.DEFERRED)
    recall(broker, 1)
    until(lambda: served.pending_recall)
    caller = Caller(lambda: served.on_recall(None))
    frame = broker.hear("register_model")
    assert frame.register_model.HasField("answers_recalls")
    assert not frame.register_model.answers_recalls
    broker.reply(frame.request_id, model=resources_pb2.Model(name=MODEL))
    assert answer(broker).recall_id == 1, "all is kept"
    caller.value()
    served.on_recall(None)
    assert broker.hears_nothing()
    recall(broker, 2)
    assert answer(broker).recall_id == 2
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
    with pytest.raises(membroker.ModelNotFound):
        served.on_recall(lambda _: None)


def test_it_is_not_waited_for_a_broker_that_is_away(
    broker: PlayedBroker, client: Client, served: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that ends with its broker would end 30 seconds later. The next broker is told so by the resume."""
    monkeypatch.setattr(recalls, "CONTROL_SECONDS", 3600.0)
    answering(broker, served, lambda _: None)
    drop_all(broker, client)
    served.on_recall(None)
    assert not broker.resume().answering_models
    until(lambda: not is_away(client))
    assert broker.hears_nothing()


def test_a_broker_that_cannot_write_it_down(broker: PlayedBroker, client: Client, served: Model) -> None:
    """Its disk is full. What it still asks for is answered at once, and the next broker is told so by the resume."""
    called: list[Recall] = []
    answering(broker, served, called.append)
    caller = Caller(lambda: served.on_recall(None))
    broker.refuse(broker.hear("register_model").request_id, "JOURNAL_FULL")
    caller.value()
    recall(broker, 1)
    assert answer(broker).recall_id == 1
    assert not called
    drop_all(broker, client)
    assert not broker.resume().answering_models
    until(lambda: not is_away(client))


def test_a_resume_that_has_begun_is_corrected(broker: PlayedBroker, client: Client, served: Model) -> None:
    """The broker has been told already that the session answers."""
    answering(broker, served, lambda _: None)
    drop_all(broker, client)
    broker.greet_again()
    request_id, held = broker.hear_holds()
    assert any(list(one.answering_models) == [MODEL] for one in held)
    served.on_recall(None)
    broker.agree(request_id)
    frame = broker.hear("register_model")
    assert frame.register_model.HasField("answers_recalls")
    assert not frame.register_model.answers_recalls
    broker.reply(frame.request_id, model=resources_pb2.Model(name=MODEL))
    until(lambda: not is_away(client))
    assert broker.hears_nothing()
