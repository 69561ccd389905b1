"""Real vLLM, its CPU build, over a real broker on the host driver: the tokens are those of plain vLLM.

A block that is used without memory ends the engine's process, as it would end the context on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import Daemon, hold_still, running, until
from tests.support.sizes import MIB
from tests.support.vllm_engine import GROUP, Engine, write_model

import membroker

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")
pytestmark = pytest.mark.timeout(600)

Batch = tuple[list[list[int]], int]


def _batch(seed: int, count: int, length: int, tokens: int, shared: int = 0) -> Batch:
    """`count` prompts of `length` tokens, the first `shared` of which are the same."""
    rng = random.Random(seed)
    prefix = [rng.randrange(3, 512) for _ in range(shared)]
    return [prefix + [rng.randrange(3, 512) for _ in range(length - shared)] for _ in range(count)], tokens


BATCHES = {
    "one": _batch(1, 1, 200, 16),
    "burst": _batch(2, 16, 500, 48),
    "shared": _batch(3, 8, 400, 16, shared=320),
    "few": _batch(4, 2, 500, 32),
    "long": _batch(5, 16, 100, 600),
}
BURST = 16 * 548 * 12 * 1024
"""Bytes of KV cache that the burst fills."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    """What plain vLLM answers."""
    with Engine(model, enable_prefix_caching=False) as plain:
        plain.ready()
        return {name: plain.generate(*batch) for name, batch in BATCHES.items()}


@pytest.fixture
def check(expected: dict[str, Any]) -> Callable[[Engine, str], None]:
    """Return a function that lets an engine answer a batch, and compares the tokens."""

    def generate(engine: Engine, name: str) -> None:
        assert engine.generate(*BATCHES[name]) == expected[name], name

    return generate


def used(daemon: Daemon, model: str) -> int:
    """Bytes that a model has borrowed."""
    return sum(one.books[0].used_bytes for one in daemon.models() if one.name.endswith(f"/{model}"))


def peak(daemon: Daemon, model: str) -> int:
    """The most bytes that a model has borrowed: a burst fills its cache for a moment only."""
    return max(one.books[0].peak_bytes for one in daemon.models() if one.name.endswith(f"/{model}"))


@pytest.fixture(scope="module")
def roomy() -> Iterator[Daemon]:
    with running({"capacity": "512MiB"}) as daemon:
        yield daemon


@pytest.mark.parametrize("caches", [False, True], ids=["no prefix cache", "prefix cache"])
def test_the_tokens_are_the_same_while_memory_comes_and_goes(
    caches: bool,
    roomy: Daemon,
    model: Path,
    expected: dict[str, Any],
    check: Callable[[Engine, str], None],
    state: Callable[[str, str], None],
) -> None:
    """A small request, a burst that borrows 100 MiB, shared prefixes, and rest: the memory goes, and comes again.

    Once with another connector beside it.
    """
    settings = {"model": "chat", "keep": "16MiB"}
    with Engine(model, roomy.endpoint(), settings, enable_prefix_caching=caches, beside=not caches) as engine:
        engine.ready()
        check(engine, "one")
        at_rest = 2 * GROUP + caches * 16 * MIB  # the first group, and one ahead
        until(lambda: used(roomy, "chat") <= at_rest)
        engine.ask(*BATCHES["burst"])
        until(lambda: used(roomy, "chat") >= BURST)
        assert engine.answer() == expected["burst"]
        until(lambda: used(roomy, "chat") <= at_rest)
        for name in ("shared", "few", "shared", "burst", "one"):
            check(engine, name)
        until(lambda: used(roomy, "chat") <= at_rest)
        assert "layer-major" in engine.log()
    until(lambda: used(roomy, "chat") == 0)


def test_an_engine_serves_with_what_it_has(roomy: Daemon, model: Path, check: Callable[[Engine, str], None]) -> None:
    """While the broker is stopped, what fits is served: the scheduler's thread does not wait for it. And a burst of
    100 MiB with a limit of 24 waits inside vLLM, and finishes with the same tokens.
    """
    with Engine(model, roomy.endpoint(), {"model": "small", "limit": "24MiB", "floor": "20MiB"}) as engine:
        engine.ready()
        check(engine, "one")
        until(lambda: used(roomy, "small") >= 20 * MIB)
        with hold_still(roomy):
            check(engine, "few")
        for name in ("burst", "shared", "one"):
            check(engine, name)
        with membroker.connect(roomy.endpoint()) as client:
            assert client.model("small").books["device"].peak_bytes == 24 * MIB


def test_a_recall_takes_memory_from_an_idle_engine_and_from_a_busy_one(
    model: Path, expected: dict[str, Any], check: Callable[[Engine, str], None]
) -> None:
    """Another tenant wants what it is guaranteed. It gets it from cached prefixes, and from a burst by preemption."""
    tenants = {"red": {}, "blue": {"guarantee": "96MiB"}}
    with (
        running({"capacity": "128MiB", "tenants": tenants, "recall_seconds": 30.0}) as daemon,
        Engine(model, daemon.endpoint("red"), {"model": "chat", "keep": "1GiB"}) as engine,
        membroker.connect(daemon.endpoint("blue")) as blue,
    ):
        engine.ready()
        check(engine, "burst")
        assert used(daemon, "chat") > 96 * MIB
        owner = blue.register_model("owner")
        with owner.allocate("96MiB", wait=60.0):
            assert used(daemon, "chat") <= 32 * MIB
            check(engine, "few")
        engine.ask(*BATCHES["long"])
        until(lambda: used(daemon, "chat") > 64 * MIB)
        with owner.allocate("96MiB", wait=60.0):
            assert used(daemon, "chat") <= 32 * MIB
            assert engine.is_busy, "the memory came when the requests had ended"
            assert engine.answer() == expected["long"]
        check(engine, "burst")


def test_two_engines_trade_memory(model: Path, expected: dict[str, Any], check: Callable[[Engine, str], None]) -> None:
    """Two bursts of 100 MiB over 128 MiB: each has most of it when the other is idle, and both at once finish.

    Then one is killed in a burst, and the other has its memory.
    """
    with (
        running({"capacity": "128MiB"}) as daemon,
        Engine(model, daemon.endpoint("red"), {"model": "left"}, enable_prefix_caching=False) as left,
        Engine(model, daemon.endpoint("blue"), {"model": "right"}, enable_prefix_caching=False) as right,
    ):
        left.ready()
        right.ready()
        for engine, name in ((left, "left"), (right, "right"), (left, "left")):
            check(engine, "burst")
            assert peak(daemon, name) >= BURST
            until(lambda name=name: used(daemon, name) <= 2 * GROUP)
        for engine in (left, right):
            engine.ask(*BATCHES["burst"])
        assert left.answer() == right.answer() == expected["burst"]
        check(right, "few")
        until(lambda: used(daemon, "left") + used(daemon, "right") <= 4 * GROUP)
        left.ask(*BATCHES["long"])
        until(lambda: used(daemon, "left") > 64 * MIB)
        left.kill()
        right.ask(*BATCHES["long"])
        until(lambda: used(daemon, "right") > 64 * MIB)
        assert right.answer() == expected["long"]
