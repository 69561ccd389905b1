"""Acknowledging by a count in the next frame: two packets for a small allocation, and never a call that waits for ever.

`transcripts/acknowledging.txt` has the rules. Here is a real broker.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from tests.support.daemons import Daemon, until
from tests.support.processes import is_settled
from tests.support.threads import together

import membroker
from membroker.wire import frames as handoff

PAGE = 2 << 20


def test_threads_send_two_packets_a_page(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each borrows and releases pages. Its next frame carries the count of all, so none sends an Ack."""
    kinds: list[str | None] = []

    class Counted:
        """A socket that notes the kind of each frame that is sent."""

        def send(self, data: bytes, flags: int = 0) -> int:
            kinds.append(handoff.decode(data).WhichOneof("kind"))
            return sock.send(data, flags)

        def __getattr__(self, name: str) -> Any:
            return getattr(sock, name)

    with membroker.connect(daemon.endpoint()) as client, monkeypatch.context() as patch:
        model, connection = client.model("m"), client._session.connection
        sock = connection._socket
        patch.setattr(connection, "_socket", Counted())
        together([lambda: [model.allocate(PAGE).close() for _ in range(20)]] * 8)
        # But for one when so many extents have come that one more packet might not fit.
        assert Counter(kinds) - Counter(ack=160 // 64) == {"allocate": 160, "release": 160}
    until(lambda: is_settled(daemon))


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
