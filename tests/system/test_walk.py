"""How many Python calls a page costs the daemon, so that a layer that is added to its way is noticed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests import counting
from tests.daemons import MIB, running, until

import membroker

PAGE = 2 * MIB
ROUNDS = 10
MOST_CALLS = {"64MiB": (100, 70), "0MiB": (150, 70)}
"""For a page and for its release, by the stock: with a stock the page is ready, without one it is created."""


@pytest.mark.parametrize("stock", MOST_CALLS)
def test_a_page_takes_few_python_calls(
    stock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker grows and shrinks its pool by one page, again and again; the last time counts."""
    path = tmp_path / "calls"
    monkeypatch.setenv(counting.FILE, str(path))

    def frames() -> list[Counter[str]]:
        return [Counter(json.loads(line)) for line in path.read_text().splitlines()]

    with running({"stock": stock}, module="tests.counting") as daemon, membroker.connect(daemon.endpoint()) as client:
        pool = client.register_model("m").pool(page_size=PAGE, virtual_capacity=64 * MIB)
        before = len(frames())
        for taken in range(1, ROUNDS + 1):
            pool.allocate(0, PAGE)
            pool.deallocate(0, PAGE)
            until(lambda many=before + 2 * taken: len(frames()) == many)
        allocate, release = frames()[-2:]
    with capsys.disabled():
        print(f"\nstock {stock}: {allocate.total()} Python calls for a page, {release.total()} for its release")
    assert allocate["lending.py:Lending.allocate"] == release["lending.py:Lending.release"] == 1
    for calls, most in zip((allocate, release), MOST_CALLS[stock], strict=True):
        assert calls.total() <= most, "\n".join(f"{count:4} {name}" for name, count in calls.most_common())
