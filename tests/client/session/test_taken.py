"""Acknowledging by a count in the next frame: two packets for a small allocation, and never a call that waits for ever.

`transcripts/acknowledging.txt` has the rules. Here is a real broker.
"""

from __future__ import annotations

from functools import partial

from tests.support.daemons import Daemon, until
from tests.support.processes import is_settled
from tests.support.threads import together

import membroker

PAGE = 2 << 20


def test_long_and_short_calls_share_the_window(daemon: Daemon) -> None:
    """Threads borrow one page or 70 at once, all through one window of 128 extents: every call ends."""
    with membroker.connect(daemon.endpoint()) as client:
        model = client.model("m")

        def work(pages: int) -> None:
            with model.pool(page_size=PAGE, virtual_capacity=150 * PAGE) as pool:
                for _ in range(30 if pages == 1 else 6):
                    pool.allocate(0, pages * PAGE)
                    pool.free(0, pages * PAGE)

        together([partial(work, pages) for pages in (1, 1, 1, 20, 70)])
        until(lambda: is_settled(daemon))


def test_an_old_client_is_served_as_before(daemon: Daemon) -> None:
    """A library of before the count was there acknowledges by ids: 300 pages, and small ones."""
    with membroker.connect(daemon.endpoint()) as client:
        client._session.connection.calls.counts = False
        model = client.model("m")
        with model.pool(page_size=PAGE, virtual_capacity=120 * PAGE) as pool:
            for _ in range(3):
                pool.allocate(0, 120 * PAGE)
                pool.free(0, 120 * PAGE)
        for _ in range(5):
            model.allocate(PAGE).close()
        until(lambda: is_settled(daemon))
