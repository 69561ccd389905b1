"""How many Python calls a page costs the daemon, so that a layer that is added to its way is noticed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.support import faulty_daemon
from tests.support.daemons import running, until
from tests.support.sizes import MIB, PAGE

import membroker

ROUNDS = 5
MOST_CALLS = {"allocate": 103, "release": 54}


def test_a_page_that_is_ready_takes_at_most_so_many_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker grows and shrinks its pool by a page that the daemon has in stock; the last time counts."""
    path = tmp_path / "calls"
    monkeypatch.setenv(faulty_daemon.CALLS, str(path))

    def frames_of(what: str) -> list[Counter[str]]:
        frames = [Counter(json.loads(line)) for line in path.read_text().splitlines()]
        return [calls for calls in frames if calls[f"lending.py:Lending.{what}"]]

    config = {"stock": "64MiB"}
    with (
        running(config, module="tests.support.faulty_daemon count") as daemon,
        membroker.connect(daemon.endpoint()) as client,
    ):
        pool = client.model("m").pool(page_size=PAGE, virtual_capacity=64 * MIB)
        for _ in range(ROUNDS):
            pool.allocate(0, PAGE)
            pool.free(0, PAGE)
            until(lambda: daemon.books().stock_bytes == 2 * PAGE and not daemon.books().lent_bytes)
        counted = {what: frames_of(what)[-1] for what in MOST_CALLS}
    told = ", ".join(f"{calls.total()} to {what} a page" for what, calls in counted.items())
    with capsys.disabled():
        print(f"\nPython calls in the daemon: {told}")
    assert counted["allocate"]["packets.py:Packets._take_stock"] == 1, "the page was not in stock"
    for what, calls in counted.items():
        assert calls.total() <= MOST_CALLS[what], "\n".join(f"{count:4} {name}" for name, count in calls.most_common())
