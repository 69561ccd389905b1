"""Borrowing ahead from a real daemon: it costs nobody else anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import MIB
from tests.support.workers import PAGE, Worker, worker
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


@pytest.mark.parametrize("ahead", [8, "auto"])
def test_a_program_of_one_thread_fills_its_pool(daemon: Daemon, pair: tuple[Worker, Worker], ahead: int | str) -> None:
    """No page that the library is borrowing refuses a call, nor lets a `grow` skip it."""
    one = pair[0]
    one.connect(daemon)
    one.do("model = client.register_model('m')")
    for _ in range(5):
        one.do(f"pool = model.pool(page_size=PAGE, virtual_capacity='1GiB', ahead={ahead!r})")
        one.do("for page in range(20): pool.allocate(page * PAGE, PAGE)")
        assert one.ask("[pool.grow(PAGE) - pool.base_address for _ in range(6)]") == [
            page * PAGE for page in range(20, 26)
        ]
        one.do("pool.shrink(26 * PAGE)")
        one.do("pool.close()")


@pytest.mark.deep
def test_a_pool_that_sleeps_stays_free_of_charge() -> None:
    """After an offload its thread looks, and borrows nothing until the next allocation."""
    with running({"host_capacity": "64MiB"}) as daemon, worker() as one:
        one.connect(daemon)
        one.do("pool = client.register_model('m').pool(page_size=PAGE, virtual_capacity='1GiB', ahead=8)")
        one.do("address = pool.allocate_anywhere(4 * PAGE)")
        until(lambda: spare(one) == 8)
        one.do("pool.offload(); looks, work_out = [], pool._ahead.work_out")
        one.do("pool._ahead.work_out = lambda: (looks.append(1), work_out())[1]")
        until(lambda: one.ask("len(looks)") >= 2)
        assert daemon.books().lent_bytes == 0
        one.do("pool.restore(); address = pool.allocate_anywhere(PAGE)")
        until(lambda: spare(one) == 8)


def test_prepared_pages_stay(daemon: Daemon, pair: tuple[Worker, Worker]) -> None:
    """The thread looks for a surplus, and does not count them."""
    one = pair[0]
    one.connect(daemon)
    one.do("pool = client.register_model('m').pool(page_size=PAGE, virtual_capacity='1GiB', ahead=4)")
    one.do("pool.prepare(32 * PAGE); looks, work_out = [], pool._ahead.work_out")
    one.do("pool._ahead.work_out = lambda: (looks.append(1), work_out())[1]")
    until(lambda: one.ask("len(looks)") >= 2)
    assert daemon.books().lent_bytes >= 64 * MIB


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
