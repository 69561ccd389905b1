"""The stock in a real daemon: what is kept ready is nobody's before, and is in nobody's way.

What it makes and closes is in tests/broker/runtime/test_loop_stock.py, and when, in the transcripts `stock_*`.
"""

from __future__ import annotations

import re

from tests.support.daemons import running, until
from tests.support.processes import open_extents
from tests.support.workers import PAGE, worker

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


def test_what_was_lent_never_comes_back_to_it() -> None:
    """Each time it is memory that was never lent. What is ready is counted, and goes when there is no room."""

    def used() -> int:
        return sum(map(int, re.findall(r"stock changed .*change=-?(\d+) cause=used", stocked.log())))

    def is_kept(pages: int) -> bool:
        """Say whether so many pages are ready, and their descriptors and the anchor's are open, as is said."""
        counted, opened = stocked.figure("membroker_memory_descriptors_open"), open_extents(stocked.process.pid)
        return (stocked.books().stock_bytes, counted, opened) == (pages * PAGE, 1 + pages, 1 + pages)

    with running({"capacity": "32MiB", "stock": "64MiB", "audit_seconds": 0.05}) as stocked, worker() as process:
        process.connect(stocked).do(_TOOLS)
        process.do("seen = set()")
        for _ in range(60):
            process.do("buffers = [model.allocate(PAGE) for _ in range(2)]")
            process.do("new = inodes(); assert len(new) == 2 and not new & seen, 'lent twice'; seen |= new")
            process.do("[write(buffer) for buffer in buffers]; [buffer.close() for buffer in buffers]")
        until(lambda: used() >= 30)
        until(lambda: stocked.books().unaccounted_bytes == 0 and not stocked.books().releasing_bytes)
        assert stocked.books().lent_bytes == 0
        process.do("first = model.allocate(PAGE); first.close()")
        until(lambda: is_kept(2))
        process.do("large = model.allocate('32MiB')")
        until(lambda: is_kept(0))
