"""Guests with a real daemon: what a process declares as recallable waits, is recalled as a whole, and is lent again."""

from __future__ import annotations

import queue
import threading

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import MIB

import membroker
from membroker import Model, OutOfMemory, Recall

CONFIG = {"capacity": 256 * MIB, "tenants": {"red": {}}, "slice_seconds": 0.0, "recall_seconds": 600.0}


class Guest:
    """A process that can release all that it has declared, and nothing less."""

    def __init__(self, daemon: Daemon, name: str) -> None:
        self.client = membroker.connect(daemon.endpoint())
        self.model: Model = self.client.register_model(name)
        self.recalls: queue.Queue[Recall] = queue.Queue()
        self.model.on_recall(self.asked)

    def asked(self, recall: Recall) -> object:
        self.recalls.put(recall)
        return membroker.DEFERRED

    @property
    def declared(self) -> int:
        return self.model.stats().books["device"].declared_bytes


def test_two_guests_that_do_not_fit_take_turns() -> None:
    with running(CONFIG) as daemon:
        one, two = Guest(daemon, "one"), Guest(daemon, "two")
        with one.client, two.client:
            one.model.declare("200MiB", recallable=True)
            with pytest.raises(OutOfMemory):
                two.model.declare("200MiB", recallable=True)
            waiting = threading.Thread(target=lambda: two.model.declare("200MiB", recallable=True, wait=600))
            waiting.start()
            recall = one.recalls.get()
            assert (recall.size, recall.remaining) == (200 * MIB, 200 * MIB)
            assert recall.model is one.model
            one.model.declare(0)
            assert recall.remaining == 0
            recall.done()
            waiting.join()
            assert (one.declared, two.declared) == (0, 200 * MIB)


def test_a_guest_is_one_after_a_restart_of_the_daemon_too() -> None:
    with running(CONFIG) as daemon:
        one, two = Guest(daemon, "one"), Guest(daemon, "two")
        with one.client, two.client:
            one.model.declare("200MiB", recallable=True)
            daemon.kill()
            daemon.start_again()
            waiting = threading.Thread(target=lambda: two.model.declare("200MiB", recallable=True, wait=600))
            waiting.start()
            recall = one.recalls.get()
            one.model.declare(0)
            recall.done()
            waiting.join()
            until(lambda: two.declared == 200 * MIB)
