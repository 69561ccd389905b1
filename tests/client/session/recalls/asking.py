"""What these tests share: a callback of the program, and what the broker asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import MODEL, PAGE, Caller, PlayedBroker, line

import membroker
from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2

DEVICE, HOST = resources_pb2.LOCATION_DEVICE, resources_pb2.LOCATION_HOST


class Held:
    """A callback that stands still until it may return."""

    def __init__(self) -> None:
        self.called: list[membroker.Recall] = []
        self.go_on = threading.Event()

    def __call__(self, one: membroker.Recall) -> None:
        self.called.append(one)
        assert self.go_on.wait(DEADLINE_SECONDS)


def answer(broker: PlayedBroker) -> pb.RecallAnswer:
    """Return the next answer that the broker hears."""
    return broker.hear("recall_answer").recall_answer


def answering(broker: PlayedBroker, served: membroker.Model, callback: Callable[[membroker.Recall], object]) -> None:
    """Let a callback answer, and the broker know."""
    caller = Caller(lambda: served.on_recall(callback))
    frame = broker.hear("register_model")
    assert (frame.register_model.model_id, frame.register_model.answers_recalls) == ("m", True)
    broker.reply(frame.request_id, model=resources_pb2.Model(name=MODEL))
    caller.value()


def recall(broker: PlayedBroker, recall_id: int, size: int = PAGE, **other: Any) -> None:
    """Ask for memory of the model."""
    fields = {"model": MODEL, "location": DEVICE, "within": {"seconds": 3600}} | other
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
