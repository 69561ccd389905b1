"""What a turn of the event loop serves, by a clock that goes on only when work is done: time is shared by tenants."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from membrokerd.system.turns import PORTION_SECONDS, Turns

COSTLY_SECONDS = 0.0015
"""A release of 4,096 ids, which is the most in a frame."""
HONEST_SECONDS = 0.0001


class SimulatedTurns:
    """Turns of a clock that stands still but for the work. Each connection of a flooder has always more to say."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = Turns(lambda: self.now)
        self.served: list[str] = []

    def work(self, name: str, seconds: float, *, goes_on: bool) -> Callable[[], bool]:
        def work() -> bool:
            self.now += seconds
            self.served.append(name)
            return goes_on

        return work


@pytest.mark.parametrize("connections", [1, 16, 160])
def test_an_honest_tenant_waits_no_longer_beside_more_connections(connections: int) -> None:
    """Five tenants flood by so many connections each. Most honest frames come first, and none after two of a tenant."""
    world = SimulatedTurns()
    for tenant in range(5):
        for number in range(connections):
            name = f"flood {tenant}"
            world.turns.put(name, world.work(f"{name}.{number}", COSTLY_SECONDS * (1 + tenant / 10), goes_on=True))
    world.turns.serve()
    ahead = []
    for _ in range(100):
        before = len(world.served)
        world.turns.put("honest", world.work("honest", HONEST_SECONDS, goes_on=False))
        while "honest" not in world.served[before:]:
            world.turns.serve()
        ahead.append(world.served[before:].index("honest"))
    assert ahead.count(0) >= 95, sorted(ahead)
    assert max(ahead) <= 5


def test_each_connection_of_a_tenant_has_its_turn() -> None:
    world = SimulatedTurns()
    for number in range(16):
        world.turns.put("red", world.work(str(number), COSTLY_SECONDS, goes_on=True))
    while len(world.served) < 32:
        world.turns.serve()
    assert world.served[:32] == [str(number) for number in [*range(16), *range(16)]]


def test_a_turn_serves_for_a_portion_and_one_step_more() -> None:
    world = SimulatedTurns()
    for tenant in range(100):
        world.turns.put(str(tenant), world.work(str(tenant), COSTLY_SECONDS, goes_on=True))
    for _ in range(100):
        began = world.now
        world.turns.serve()
        assert PORTION_SECONDS <= world.now - began < PORTION_SECONDS + COSTLY_SECONDS


_COLLECTIONS = """
import gc
from membrokerd.system import turns
turns.spare_collections()
looked_at = []
def count(phase, info):
    if phase == "start" and info["generation"] == 2:
        looked_at.append(len(gc.get_objects()))
gc.callbacks.append(count)
kept = [[number] for number in range(500_000)]
for _ in range(20):
    ended = [[number] for number in range(30_000)]
print(len(looked_at), max(looked_at))
"""


def test_a_full_garbage_collection_looks_at_few_objects() -> None:
    """However many live on: 500,000 here. Those of the start are never looked at again."""
    done = subprocess.run([sys.executable, "-c", _COLLECTIONS], check=True, capture_output=True, text=True)
    collections, most = map(int, done.stdout.split())
    assert collections > 5
    assert most < 80_000
