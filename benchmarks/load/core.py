"""What the core alone costs, without a daemon and without I/O, in CPU time of its thread.

`python -m benchmarks.load.core COUNT [guaranteed]` prints the times of one extent as JSON, so that the core of another
tree can be measured by the same lines, in a process of its own. Without `guaranteed` it must use nothing that an older
core lacks. `python -m benchmarks.load.core COUNT waits` prints how long the first release takes beside so many waiting
models of 16 tenants, and each of all others that grant them. With `recalls` all that is lent can be recalled from one
moment on: the step of that moment comes before, and there are 64 releases.
"""

from __future__ import annotations

import itertools
import json
import sys
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import thread_time_ns
from typing import Any

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName, QuotaKey

GRANULE = 2 << 20
TENANTS, MODELS = 8, 8
"""Tenants that want memory at the same time, and models of each."""
ASKED = 8 * GRANULE
WAIT_NS = 3_600 * 10**9
ROOT = Path(__file__).parents[2]


class Core:
    """A core whose extents are made, delivered and acknowledged at once."""

    def __init__(self, granules: int, guarantees: dict[QuotaKey, int] | None = None, **rules: int) -> None:
        more: dict[str, Any] = {**rules, **({"guarantees": guarantees} if guarantees else {})}
        self.broker = Broker(policy.Rules(GRANULE, {"device": granules * GRANULE, "host": 0}, **more), 1)
        self._numbers = itertools.count(1)
        self.now = 1

    def open(self, tenant: str, model: str, *, answers: bool = False) -> tuple[int, ModelName]:
        """Open a session with a model."""
        name = ModelName(tenant, model)
        call = next(self._numbers)
        opened = self.step(ev.OpenSession(call, tenant, call, 0, f"process {call}", False, "benchmarks"))
        session: int = next(one.result.session for one in opened if isinstance(one, fx.Answer))  # type: ignore[union-attr]
        more: dict[str, Any] = {"answers": True} if answers else {}
        self.step(ev.RegisterModel(next(self._numbers), session, next(self._numbers), name, None, {}, False, **more))
        return session, name

    def allocate(self, session: int, name: ModelName, size: int = GRANULE, **more: Any) -> tuple[int, ...]:
        """Allocate one extent, and return its id; nothing if the request waits."""
        request = next(self._numbers)
        for effect in self.step(ev.Allocate(request, session, request, name, "device", size, 1, **more)):
            if isinstance(effect, fx.Make):
                self.step(ev.Made(session, request, effect.part))
                self.step(ev.Acknowledge(session, request, effect.part))
                return tuple(effect.ids)
        return ()

    def release(self, session: int, ids: tuple[int, ...]) -> list[Any]:
        """Release extents."""
        request = next(self._numbers)
        return self.step(ev.Release(request, session, request, ids))

    def step(self, event: ev.Event) -> list[Any]:
        """Take an event, a microsecond after the last."""
        self.now += 1_000
        return list(self.broker.step(event, self.now).effects)


def extent_times(count: int, *, guaranteed: bool = False) -> array[int]:
    """Return how long it takes to allocate and release one extent while nobody waits, in nanoseconds."""
    core = Core(1_024, {("t", "m", "device"): 64 * GRANULE} if guaranteed else None)
    session, name = core.open("t", "m")
    times = array("Q")
    for _ in range(count):
        begun = thread_time_ns()
        core.release(session, core.allocate(session, name))
        times.append(thread_time_ns() - begun)
    return times


def wait_times(models: int, *, recalls: bool = False) -> array[int]:
    """Return how long each release takes that is enough for one of many requests, each of another model.

    `recalls`: and how long the step before took, from which on all that is lent can be recalled.
    """
    core = Core(models, max_sessions=2 * models, max_models_per_tenant=models, max_waiting_per_tenant=models)
    lender = core.open("lender", "m")
    lent = [core.allocate(*lender) for _ in range(models)]
    for number in range(models):
        assert not core.allocate(*core.open(f"t{number % 16}", f"m{number}"), wait_ns=WAIT_NS), "there was room"
    times = array("Q")
    if recalls:
        begun = thread_time_ns()
        effects = core.step(ev.RegisterModel(1 << 40, lender[0], 1 << 40, lender[1], None, {}, False, True))
        times.append(thread_time_ns() - begun)
        assert any(isinstance(effect, fx.SendRecall) for effect in effects), "nothing was recalled"
    for ids in lent[: 64 if recalls else None]:
        begun = thread_time_ns()
        effects = core.release(lender[0], ids)
        times.append(thread_time_ns() - begun)
        assert any(isinstance(effect, fx.Make) for effect in effects), "nothing was granted"
    return times


def divisions(count: int) -> int:
    """Return how often shares are divided while so many extents are allocated and released, and nobody waits."""
    from membrokerd.core import shares  # older cores have none

    found = 0
    divide = shares.Shares.divide

    def counted(*arguments: Any) -> Any:
        nonlocal found
        found += 1
        return divide(*arguments)

    shares.Shares.divide = counted  # type: ignore[method-assign]
    try:
        extent_times(count, guaranteed=True)
    finally:
        shares.Shares.divide = divide  # type: ignore[method-assign]
    return found


def schedule_times(count: int) -> array[int]:
    """Return how long a release takes that is enough for one of 64 requests that wait, one of each model.

    Half of the models hold all memory and are asked for it: so the step divides shares, and decides for all.
    """
    times = array("Q")
    for _ in range(count):
        release = crowd()
        begun = thread_time_ns()
        effects = release()
        times.append(thread_time_ns() - begun)
        assert any(isinstance(effect, fx.Make) for effect in effects), "nothing was granted"
    return times


def crowd() -> Callable[[], list[Any]]:
    """Return the release that `schedule_times` measures, in a core of its own."""
    core = Core(TENANTS * MODELS * 8)
    sessions = [core.open(f"t{i}", f"m{j}", answers=True) for i in range(TENANTS) for j in range(MODELS)]
    lent = [core.allocate(*sessions[2 * number], ASKED) for number in range(TENANTS * MODELS // 2) for _ in range(2)]
    for session in sessions:
        assert not core.allocate(*session, ASKED, wait_ns=WAIT_NS), "there was room"
    return partial(core.release, sessions[0][0], lent[0])


if __name__ == "__main__":
    if "waits" in sys.argv:
        first, *others = [time / 1e6 for time in wait_times(int(sys.argv[1]), recalls="recalls" in sys.argv)]
        print(f"first {first:.1f} ms, then {sorted(others)[len(others) // 2]:.2f}, at most {max(others):.1f}")
        sys.exit()
    extent_times(1_000)
    print(json.dumps(list(extent_times(int(sys.argv[1]), guaranteed="guaranteed" in sys.argv))))
