"""The stock in a real daemon: what is kept ready is given out at once, is nobody's before, and is in nobody's way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.processes import mapped_extents, open_extents
from tests.support.workers import PAGE, Worker, worker

PAGES = 16
"""Of the capacity."""
_TOOLS = """
import os
def inodes():
    with open('/proc/self/maps') as maps:
        return {int(line.split()[4]) for line in maps if 'memfd:membroker' in line}
def write(buffer):
    view = buffer.view()
    assert bytes(view) == bytes(len(view)), 'lent what somebody had written'
    view[:] = b'\\xa5' * len(view)
"""


@pytest.fixture
def stocked() -> Iterator[Daemon]:
    """A daemon with a stock, and not much to lend."""
    with running({"capacity": f"{PAGES * 2}MiB", "stock": "64MiB", "audit_seconds": 0.05}) as one:
        yield one


def begin(process: Worker, daemon: Daemon) -> Worker:
    """Connect a worker, with a model and its tools."""
    process.connect(daemon)
    process.do("model = client.register_model('m')")
    process.do(_TOOLS)
    return process


def until_ready(daemon: Daemon, pages: int) -> None:
    """Wait until so many pages are kept ready."""
    until(lambda: daemon.books().stock_bytes == pages * PAGE)


def changes(daemon: Daemon, cause: str) -> int:
    """Return how many extents were made for the stock, used of it, or dropped, by the log."""
    pattern = rf"stock changed .*change=-?(\d+) cause={cause}"
    return sum(int(number) for number in re.findall(pattern, daemon.log()))


def settled(daemon: Daemon) -> Any:
    """Return the books once the device shows nothing that they do not say."""
    until(lambda: daemon.books().unaccounted_bytes == 0 and not daemon.books().releasing_bytes)
    return daemon.books()


def test_the_second_of_a_size_is_there_already(stocked: Daemon) -> None:
    """Four pages are borrowed, eight are made ahead; the next four are of those, new, and zero."""
    with worker() as process:
        begin(process, stocked)
        process.do("pool = model.pool(page_size=PAGE, virtual_capacity='256MiB')")
        process.do("pool.allocate(0, 4 * PAGE); pool.view(0, 4 * PAGE)[:] = bytes([1]) * (4 * PAGE)")
        until_ready(stocked, 8)
        assert changes(stocked, "used") == 0
        process.do("pool.allocate(4 * PAGE, 4 * PAGE)")
        until(lambda: changes(stocked, "used") == 4)
        assert process.ask("bytes(pool.view(4 * PAGE, 4 * PAGE)) == bytes(4 * PAGE)")
        assert process.ask("len(inodes())") == 8
        until_ready(stocked, 8)
        books = settled(stocked)
        assert (books.lent_bytes, books.free_bytes) == (8 * PAGE, (PAGES - 8) * PAGE)


def test_what_was_lent_never_comes_back_to_it(stocked: Daemon) -> None:
    """A worker borrows, writes and releases, on and on: each time it is memory that was never lent."""
    with worker() as process:
        begin(process, stocked)
        process.do("seen = set()")
        for _ in range(60):
            process.do("buffers = [model.allocate(PAGE) for _ in range(2)]")
            process.do("new = inodes(); assert len(new) == 2 and not new & seen, 'lent twice'; seen |= new")
            process.do("[write(buffer) for buffer in buffers]; [buffer.close() for buffer in buffers]")
        until(lambda: changes(stocked, "used") >= 30)
        assert settled(stocked).lent_bytes == 0


def test_its_descriptors_are_open_and_counted_and_go_with_it(stocked: Daemon) -> None:
    """Each extent of it is one descriptor of the daemon's; when somebody needs all of the room, all are closed."""
    with worker() as process:
        begin(process, stocked)
        process.do("first = model.allocate(PAGE); first.close()")
        until_ready(stocked, 2)
        until(lambda: open_extents(stocked.process.pid) == 1 + 2)
        assert said_to_be_open(stocked) == 1 + 2
        process.do(f"large = model.allocate({PAGES} * PAGE)")
        until_ready(stocked, 0)
        until(lambda: open_extents(stocked.process.pid) == 1)
        assert said_to_be_open(stocked) == 1


def said_to_be_open(daemon: Daemon) -> float:
    return daemon.figure("membroker_memory_descriptors_open")


def test_a_stop_leaves_nothing() -> None:
    """SIGTERM, with a stock that is on its way: the daemon ends well, and what is left is the worker's own."""
    config = {"capacity": "1GiB", "stock": "512MiB", "stock_extents": 200}
    with running(config) as daemon, worker() as process:
        begin(process, daemon)
        process.do("pool = model.pool(page_size=PAGE, virtual_capacity='1GiB'); pool.allocate(0, 40 * PAGE)")
        assert daemon.stop() == 0
        assert "a fault of the broker" not in daemon.log()
        assert "Traceback" not in daemon.log()
        assert mapped_extents(process.pid) == 40
        assert process.ask("bytes(pool.view(0, 8)) == bytes(8)")
