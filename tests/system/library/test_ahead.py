"""Borrowing ahead from a real daemon: it costs nobody else anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.daemons import Daemon, until
from tests.support.sizes import MIB
from tests.support.workers import Worker, worker
from tests.system.library.test_waiting import full, waiting


def denials(daemon: Daemon, model: str) -> int:
    """Return how many requests of a model were refused."""
    return sum(sum(one.denials_total.values()) for one in daemon.models() if one.name.endswith(model))


def spare(one: Worker) -> Any:
    """Return how many spare pages the worker's pool has."""
    return one.ask("pool.stats().spare_pages")


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    """Two workers."""
    with worker() as one, worker() as two:
        yield one, two


def test_pages_are_borrowed_before_they_are_needed(daemon: Daemon, pair: tuple[Worker, Worker]) -> None:
    """The worker allocates what is there: the daemon hears of it when the next ones are borrowed."""
    one = pair[0]
    one.connect(daemon)
    one.do("pool = client.register_model('m').pool(page_size=PAGE, virtual_capacity='1GiB', ahead=8)")
    until(lambda: spare(one) == 8)
    assert daemon.books().lent_bytes == 16 * MIB
    one.do("address = pool.allocate_anywhere(4 * PAGE)")
    until(lambda: spare(one) == 8)
    assert daemon.books().lent_bytes == 24 * MIB
    one.do("pool.close()")
    until(lambda: daemon.books().lent_bytes == 0)


@pytest.mark.deep
def test_nothing_is_borrowed_ahead_while_others_wait(daemon: Daemon, pair: tuple[Worker, Worker]) -> None:
    """The memory is full and one waits: what is released goes there, and no refusal of the other is counted."""
    one, two = pair
    one.connect(daemon, "red")
    two.connect(daemon, "red")
    two.do("model = client.register_model('waits')")
    with full(daemon) as holder:
        one.do("pool = client.register_model('ahead').pool(page_size=PAGE, virtual_capacity='1GiB', ahead=8)")
        two.begin("held = model.allocate(128 * MIB, wait=600)")
        until(lambda: waiting(daemon) == 1)
        until(lambda: one.ask("pool._ahead._pause"))
        holder.do("buffers.pop().close()")
        assert spare(one) == 0
        holder.do("buffers.pop().close()")
        two.result()
        assert denials(daemon, "ahead") == 0
        holder.do("buffers.pop().close()")
        until(lambda: spare(one) == 8)
