"""How a fault that was put into the core is found out by the worlds around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from tests.simulation.world import World

Fault = Callable[[pytest.MonkeyPatch], None]
STEPS = 10_000
NOWHERE: Mapping[str, int] = MappingProxyType({})


class Faults(list[Fault]):
    """Faults of the core that can be planted, each with a name."""

    def plant(self, fault: Fault) -> Fault:
        """Add a fault."""
        self.append(fault)
        return fault

    def replacing(self, name: str, owner: object, attribute: str, new: object) -> None:
        """Add a fault of this name: another value or function stands in one place of the core."""

        def fault(monkeypatch: pytest.MonkeyPatch) -> None:
            monkeypatch.setattr(owner, attribute, new)

        fault.__name__ = name
        self.append(fault)

    def around(self, name: str, owner: Any, attribute: str, new: Callable[..., object]) -> None:
        """Add a fault of this name: `new` stands in the place of a function of the core, and gets that one first."""
        was = getattr(owner, attribute)
        self.replacing(name, owner, attribute, lambda *given, **named: new(was, *given, **named))

    def instead_of(self, owner: Any, attribute: str) -> Callable[[Callable[..., object]], None]:
        """Make the function below a fault as of `around`: it gets what stood there, and then the arguments."""
        return lambda new: self.around(new.__name__, owner, attribute, new)

    def each(self, *more: object) -> list[Any]:
        """Return the parameters of a test: each fault, with `more`."""
        return [pytest.param(fault, *more, id=fault.__name__.strip("_")) for fault in self]


def notice(
    fault: Fault, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch, shown_in: Mapping[str, int] = NOWHERE
) -> World:
    """Play a few worlds around a core with a fault: one of them fails, and is returned.

    The first one is what `shown_in` has for the name of the fault: others may show it much later, or not at all.
    """
    name = fault.__name__.strip("_")
    with monkeypatch.context() as faulty:
        fault(faulty)
        world = _first_to_fail(dict.fromkeys([*([shown_in[name]] if name in shown_in else []), *seeds]))
    World(world.seed).play_steps(world.referee.judged + 1)  # it is the fault that was noticed, and not another one
    return world


def _first_to_fail(seeds: Iterable[int]) -> World:
    for seed in seeds:
        world = World(seed)
        try:
            world.play_steps(STEPS)
        except (AttributeError, TypeError):  # the core has no such name or argument any more: the fault must be mended
            raise
        except Exception as error:  # noqa: BLE001 - whatever the core or the referee raises is what is looked for
            print(f"seed {seed}, after {world.referee.judged:,} steps: {type(error).__name__}: {error}")
            return world
    pytest.fail("nobody noticed")
