"""Real vLLM over a real broker: the tokens are those of plain vLLM. On a CPU and the host driver, or on a GPU.

A block that is used without memory ends the engine's process, or its context on the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, hold_still, until
from tests.support.engine_batches import Story, batches_of, peak, story_of, used
from tests.support.vllm_engine import START_SECONDS, Build, Engine, write_model

import membroker

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def story(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    batches, model = batches_of(build.times), write_model(tmp_path_factory.mktemp("model"), build.config)
    with Engine(build, model, enable_prefix_caching=False) as plain:
        yield story_of(Engine, build, model, batches, plain.ready())


@pytest.fixture(scope="module")
def roomy(story: Story) -> Iterator[Daemon]:
    with story.build.running({"capacity": 512 * story.unit}) as daemon:
        yield daemon


@pytest.mark.parametrize("caches", [False, True], ids=["no prefix cache", "prefix cache"])
def test_the_tokens_are_the_same_while_memory_comes_and_goes(caches: bool, roomy: Daemon, story: Story) -> None:
    """A small request, a burst that borrows 100 units, shared prefixes, and rest: the memory goes, and comes again.

    On a CPU once with another connector beside it. Then vLLM is layer-major, as it is there anyway.
    """
    settings, beside = {"model": "chat", "keep": 16 * story.unit}, not caches and not story.build.on_gpu
    with story.engine(roomy.endpoint(), settings, enable_prefix_caching=caches, beside=beside) as engine:
        engine.ready()
        story.check(engine, "one")
        at_rest = 2 * story.group + caches * 16 * story.unit  # the first group, and one ahead
        until(lambda: used(roomy, "chat") <= at_rest)
        story.fill(engine, lambda: peak(roomy, "chat") >= story.burst)
        until(lambda: used(roomy, "chat") <= at_rest)
        for name in ("shared", "few", "shared", "burst", "one"):
            story.check(engine, name)
        until(lambda: used(roomy, "chat") <= at_rest)
        assert story.build.layout in engine.log()
    until(lambda: used(roomy, "chat") == 0)


def test_an_engine_serves_with_what_it_has(roomy: Daemon, story: Story) -> None:
    """While the broker is stopped, what fits is served: the scheduler's thread does not wait for it. And a burst of
    100 units with a limit of 24 waits inside vLLM, and finishes with the same tokens.
    """
    limit, floor = 24 * story.unit, 20 * story.unit
    with story.engine(roomy.endpoint(), {"model": "small", "limit": limit, "floor": floor}) as engine:
        engine.ready()
        story.check(engine, "one")
        until(lambda: used(roomy, "small") >= floor)
        with hold_still(roomy):
            story.check(engine, "few")
        story.fill(engine, lambda: peak(roomy, "small") > limit - story.group)
        for name in ("shared", "one"):
            story.check(engine, name)
        assert peak(roomy, "small") <= limit


def test_a_recall_takes_memory_from_an_idle_engine_and_from_a_busy_one(story: Story) -> None:
    """Another tenant wants what it is guaranteed. It gets it from cached prefixes, and from a burst by preemption.

    What preempted requests have returns from host memory. Before, the other tenant has all memory while the engine
    starts: the engine says so, and starts when there is some.
    """
    unit = story.unit
    tenants = {"red": {}, "blue": {"guarantee": 96 * unit}}
    lent = {"capacity": 128 * unit, "host_capacity": 64 * unit}
    with (
        story.build.running({**lent, "tenants": tenants, "recall_seconds": 600.0}) as daemon,
        story.engine(
            daemon.endpoint("red"),
            {"model": "chat", "keep": 1024 * unit, "swap_space": 64 * unit},
            environment={"VLLM_LOGGING_LEVEL": "DEBUG"},
        ) as engine,
        membroker.connect(daemon.endpoint("blue")) as blue,
    ):
        owner = blue.model("owner")
        with owner.allocate(128 * unit):
            until(lambda: "waits up to" in engine.log(), START_SECONDS)
        engine.ready()
        (books,) = (one.books for one in daemon.models() if one.name.endswith("/chat"))
        assert 63 * unit < books[1].declared_bytes <= 64 * unit, "the host memory for preempted requests is charged"
        story.fill(engine, lambda: used(daemon, "chat") > 96 * unit)
        with owner.allocate(96 * unit, timeout=600.0):
            assert used(daemon, "chat") <= 32 * unit
            story.check(engine, "few")
        engine.ask(*story.batches["long"])
        until(lambda: used(daemon, "chat") > 64 * unit)
        with owner.allocate(96 * unit, timeout=600.0):
            assert used(daemon, "chat") <= 32 * unit
            assert engine.is_busy, "the memory came when the requests had ended"
            story.compare(engine.answer(), "long")
        assert re.search(r"[1-9]\d* return", engine.log()), "preempted requests were computed again"
        story.check(engine, "burst")


def test_two_engines_trade_memory(story: Story) -> None:
    """Two bursts of 100 units over 128: each has most of it when the other is idle, and both at once finish.

    Then one is killed in a burst, and the other has its memory. And the broker is killed in a burst.
    """
    unit, group = story.unit, story.group
    with (
        story.build.running({"capacity": 128 * unit}) as daemon,
        story.engine(daemon.endpoint("red"), {"model": "left"}, enable_prefix_caching=False) as left,
        story.engine(daemon.endpoint("blue"), {"model": "right"}, enable_prefix_caching=False) as right,
    ):
        left.ready()
        right.ready()
        for engine, name in ((left, "left"), (right, "right"), (left, "left")):
            story.fill(engine, lambda name=name: peak(daemon, name) >= story.burst)
            until(lambda name=name: used(daemon, name) <= 2 * group)
        for engine in (left, right):
            engine.ask(*story.batches["burst"])
        for engine in (left, right):
            story.compare(engine.answer(), "burst")
        story.check(right, "few")
        until(lambda: used(daemon, "left") + used(daemon, "right") <= 4 * group)
        left.ask(*story.batches["long"])
        until(lambda: used(daemon, "left") > 64 * unit)
        left.kill()
        right.ask(*story.batches["long"])
        until(lambda: used(daemon, "right") > 64 * unit)
        daemon.kill()
        daemon.start_again()
        story.compare(right.answer(), "long")
        until(lambda: used(daemon, "right") <= 2 * group)
        story.check(right, "burst")
