"""The stock in a real daemon: what is kept ready is nobody's before, and is in nobody's way.

What it makes and closes is in tests/broker/runtime/test_loop_stock.py, and when, in the transcripts `stock_*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.processes import open_extents
from tests.support.workers import PAGE, worker

PAGES = 16
"""Of the capacity."""
_TOOLS = """
model = client.model('m')
def inodes():
    with open('/proc/self/maps') as maps:
        return {int(line.split()[4]) for line in maps if 'memfd:membroker-extent' in line}
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


def test_what_was_lent_never_comes_back_to_it(stocked: Daemon) -> None:
    """A worker borrows, writes and releases, on and on: each time it is memory that was never lent."""

    def used() -> int:
        return sum(map(int, re.findall(r"stock changed .*change=-?(\d+) cause=used", stocked.log())))

    with worker() as process:
        process.connect(stocked).do(_TOOLS)
        process.do("seen = set()")
        for _ in range(60):
            process.do("buffers = [model.allocate(PAGE) for _ in range(2)]")
            process.do("new = inodes(); assert len(new) == 2 and not new & seen, 'lent twice'; seen |= new")
            process.do("[write(buffer) for buffer in buffers]; [buffer.close() for buffer in buffers]")
        until(lambda: used() >= 30)
        until(lambda: stocked.books().unaccounted_bytes == 0 and not stocked.books().releasing_bytes)
        assert stocked.books().lent_bytes == 0


def test_its_descriptors_are_open_and_counted_and_go_with_it(stocked: Daemon) -> None:
    """Each extent of it is one descriptor of the daemon's; when somebody needs all of the room, all are closed."""

    def is_kept(pages: int) -> bool:
        """Return whether so many pages are ready, and their descriptors and the anchor's are open, as is said."""
        counted = stocked.figure("membroker_memory_descriptors_open")
        return (stocked.books().stock_bytes, counted) == (pages * PAGE, 1 + pages)

    with worker() as process:
        process.connect(stocked).do(_TOOLS)
        process.do("first = model.allocate(PAGE); first.close()")
        until(lambda: is_kept(2) and open_extents(stocked.process.pid) == 1 + 2)
        process.do(f"large = model.allocate({PAGES} * PAGE)")
        until(lambda: is_kept(0) and open_extents(stocked.process.pid) == 1)
