"""How many Python calls a page costs the worker, so that a layer that is added on its way is noticed."""

from __future__ import annotations

from functools import partial

import pytest
from tests.support.calls import calls_of
from tests.support.daemons import running
from tests.support.sizes import MIB, PAGE

import membroker

ROUNDS = 5
MOST_CALLS = {"allocate": 63, "free": 51}


def test_a_page_takes_at_most_so_many_calls(capsys: pytest.CaptureFixture[str]) -> None:
    """A worker grows and shrinks its pool by a page; the last time counts."""
    with running({"host_capacity": "64MiB"}) as daemon, membroker.connect(daemon.endpoint()) as client:
        pool = client.model("m").pool(page_size=PAGE, virtual_capacity=64 * MIB)
        for _ in range(ROUNDS):
            calls = {call.__name__: calls_of(partial(call, 0, PAGE)) for call in (pool.allocate, pool.free)}
    told = ", ".join(f"{made.total()} to {what} a page" for what, made in calls.items())
    with capsys.disabled():
        print(f"\nPython calls in the worker: {told}")
    for what, made in calls.items():
        assert made.total() <= MOST_CALLS[what], "\n".join(f"{n:4} {name}" for name, n in made.most_common())
