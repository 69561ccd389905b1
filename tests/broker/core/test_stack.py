"""The parts of the core are a straight stack: at run time too, none holds a part that stands above it.

`make check` proves the same of imports. This is for a reference that needs none: a part that hands out itself.
"""

from __future__ import annotations

from typing import Any

from tests.simulation.world import World

from membrokerd.core.books import Books
from membrokerd.core.deaths import Releasing
from membrokerd.core.lending import Lending
from membrokerd.core.machine import Broker
from membrokerd.core.models import Models
from membrokerd.core.segments import Segments
from membrokerd.core.sessions import Sessions
from membrokerd.core.stock import WarmPool
from membrokerd.core.waiting import Waiting

STACK = (Books, WarmPool, Waiting, Lending, Segments, Models, Sessions, Releasing, Broker)


def _held(value: Any) -> list[Any]:
    """Return what an attribute holds: itself, or what is in the container that it is."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else [value]


def test_no_part_holds_one_above_it() -> None:
    """Looked at in the middle of a busy world: what a part picks up on the way counts, too."""
    world = World(7)
    world.play_steps(2_000)
    parts = [part for part in vars(world.broker).values() if type(part) in STACK]
    assert {type(part) for part in parts} == {*STACK} - {Broker}, "a part is missing here, or in the machine"
    for part in parts:
        above = STACK[STACK.index(type(part)) + 1 :]
        wrong = [name for name, value in vars(part).items() if any(isinstance(one, above) for one in _held(value))]
        assert not wrong, f"{type(part).__name__} holds a part above it: {wrong}"
