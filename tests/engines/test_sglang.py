"""Real SGLang over a real broker: the tokens are those of plain SGLang. On a CPU and the host driver, or on a GPU.

A page that is used without memory ends the scheduler's process, or its context on the GPU.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest
from tests.support.daemons import hold_still, until
from tests.support.engine_batches import Story, batch_of, batches_of, peak, story_of, used
from tests.support.sglang_engine import BUILDS, Engine
from tests.support.sleeping import books, command, done, refused_at_once
from tests.support.vllm_engine import START_SECONDS, write_model

import membroker

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
import torch

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    build = BUILDS[request.param]
    if build.on_gpu != torch.cuda.is_available():
        pytest.skip("this is for another device")
    batches, model = batches_of(build.times), write_model(tmp_path_factory.mktemp("model"), build.config)
    if build.on_gpu:
        batches["long"] = batch_of(5, 32, 100, 1600)
    # Plain SGLang sleeps when it has nothing to do, because on a CPU it would take the time of the others.
    with Engine(build, model, disable_radix_cache=True, sleep_on_idle=True) as plain:
        yield story_of(Engine, build, model, batches, plain.ready())


@pytest.fixture
def story(whole: Story, state: Callable[[str, str], None]) -> Story:
    return replace(whole, state=state)


def test_the_tokens_are_the_same_while_memory_comes_and_goes(story: Story) -> None:
    """A small request, a burst, shared prefixes, and rest: the memory goes, and comes again.

    Then the broker is stopped, and later killed in a burst. Each costs growth, and nothing else.
    """
    unit, group = story.unit, story.group
    with story.build.running({"capacity": 512 * unit}) as daemon:
        with story.engine(daemon.endpoint(), {"model": "chat", "keep": 16 * unit}) as engine:
            engine.ready()
            assert story.build.layout in engine.log()
            at_rest = 2 * group + 16 * unit  # the first group, and one ahead
            story.check(engine, "one")
            until(lambda: used(daemon, "chat") <= at_rest)
            first = story.fill(engine, lambda: peak(daemon, "chat") >= story.burst)
            ended = time.monotonic()
            until(lambda: used(daemon, "chat") <= at_rest)
            story.state("released after the burst in", f"{time.monotonic() - ended:.2f} s")
            for name in ("shared", "few", "shared", "one"):
                story.check(engine, name)
            again = story.check(engine, "burst")
            story.state("the burst: plain, first, again", f"{story.seconds['burst']:.2f}, {first:.2f}, {again:.2f} s")
            until(lambda: used(daemon, "chat") <= at_rest)
            with hold_still(daemon):
                story.check(engine, "one")
            engine.ask(*story.batches["long"])
            until(lambda: used(daemon, "chat") > at_rest)
            daemon.kill()
            daemon.start_again()
            story.compare(engine.answer(), "long")
            until(lambda: used(daemon, "chat") <= at_rest)
            story.check(engine, "burst")
        until(lambda: used(daemon, "chat") == 0)


def in_use(engine: Engine, after: int) -> int:
    """The tokens in pages of requests when an engine last logged a step, after so many characters of its log."""
    found = re.findall(r"Decode batch.*#token: (\d+)", engine.log()[after:])
    return int(found[-1]) if found else 0


@pytest.mark.parametrize("caches", [False, True], ids=["no prefix cache", "prefix cache"])
def test_a_tight_limit_queues_requests(caches: bool, story: Story) -> None:
    """A burst of 100 units with a limit of 40 waits inside SGLang, and finishes with the same tokens."""
    unit = story.unit
    with (
        story.build.running({"capacity": 512 * unit}) as daemon,
        story.engine(
            daemon.endpoint(),
            {"model": "small", "limit": 40 * unit},
            disable_radix_cache=not caches,
            context_length=2048,
        ) as engine,
    ):
        engine.ready()
        story.fill(engine, lambda: peak(daemon, "small") > 40 * unit - story.group)
        for name in ("shared", "one"):
            story.check(engine, name)
        assert peak(daemon, "small") <= 40 * unit


def test_a_recall_takes_memory_from_an_idle_engine_and_from_a_busy_one(story: Story) -> None:
    """Another tenant wants what it is guaranteed. It gets it from cached prefixes, and from a burst by retraction.

    Before, while it has all of the memory, the engine waits at its start.
    """
    unit = story.unit
    tenants = {"red": {}, "blue": {"guarantee": 96 * unit}}
    with (
        story.build.running({"capacity": 144 * unit, "tenants": tenants, "recall_seconds": 600.0}) as daemon,
        story.engine(daemon.endpoint("red"), {"model": "chat", "keep": 1024 * unit}) as engine,
        membroker.connect(daemon.endpoint("blue")) as blue,
    ):
        owner = blue.model("owner")
        with owner.allocate(144 * unit):
            until(lambda: "membroker: waits up to 300 s" in engine.log(), START_SECONDS)
        engine.ready()
        story.fill(engine, lambda: used(daemon, "chat") > 96 * unit)
        began = time.monotonic()
        with owner.allocate(96 * unit, timeout=600.0):
            story.state("recalled from an idle engine in", f"{time.monotonic() - began:.2f} s")
            assert used(daemon, "chat") <= 48 * unit
            story.check(engine, "few")
        before = len(engine.log())
        engine.ask(*story.batches["long"])
        until(lambda: in_use(engine, before) * story.build.token_bytes > 64 * unit)
        began = time.monotonic()
        with owner.allocate(96 * unit, timeout=600.0):
            story.state("recalled from a busy engine in", f"{time.monotonic() - began:.2f} s")
            assert used(daemon, "chat") <= 48 * unit
            assert engine.is_busy, "the memory came when the requests had ended"
            assert "Retract requests" in engine.log()[before:]
            story.compare(engine.answer(), "long")
        story.check(engine, "burst")


def test_an_engine_sleeps_by_command_and_by_itself_and_wakes_with_the_same_tokens(story: Story) -> None:
    """Its KV cache goes, with the first page and all prefixes. A request that comes while it sleeps, or while another
    tenant has the memory, waits inside SGLang, whose scheduler goes on and counts its pages all the time.
    """
    unit, long = story.unit, story.batches["long"]
    tenants = {"red": {}, "blue": {"guarantee": 0}}
    config = {"capacity": 144 * unit, "tenants": tenants, "idle_sleep_seconds": 1.0}
    with (
        story.build.running(config) as daemon,
        story.engine(daemon.endpoint("red"), {"model": "chat", "keep": 16 * unit}) as engine,
        membroker.connect(daemon.endpoint("blue")) as blue,
    ):
        engine.ready()
        story.check(engine, "shared")
        assert used(daemon, "chat") > story.group, "it has cached prefixes"
        for _ in range(2):
            said = done(command(daemon, "sleep", "chat"))
            assert "weights kept: they are SGLang's own memory" in said
            assert books(daemon, "chat") == (0, 0)
            story.check(engine, "shared")
        done(command(daemon, "sleep", "chat"))
        assert "awake" in done(command(daemon, "wake", "chat"))
        assert used(daemon, "chat") > 0
        engine.ask(*long)
        until(lambda: used(daemon, "chat") > 32 * unit)
        assert "chat is busy" in refused_at_once(daemon, "sleep", "chat", "--timeout", "0.2")
        story.compare(engine.answer(), "long")
        with blue.model("owner").allocate(144 * unit, timeout=600.0):
            assert books(daemon, "chat") == (0, 0), "nobody typed a command"
            engine.ask(*story.batches["one"])
            until(lambda: not daemon.device().asleep_sessions)
            assert engine.is_busy
        story.compare(engine.answer(), "one")
        story.check(engine, "burst")


def test_an_engine_that_is_not_served_says_why(story: Story) -> None:
    """SGLang logs what a plugin raises, and would serve without it."""
    with story.build.running({"capacity": 64 * story.unit}) as daemon:
        for settings, options, said in (
            ({"limits": "1GiB"}, {}, "MEMBROKER_SGLANG has 'limits', and membroker knows: model, limit"),
            ({}, {"page_size": None}, "membroker.kv.sglang needs --page-size of at least 16 tokens"),
        ):
            with story.engine(daemon.endpoint(), settings, **options) as engine:
                with pytest.raises(AssertionError, match="the engine ended"):
                    engine.ready()
                assert f"InvalidRequest: {said}" in engine.log()
                assert "Load weight begin" not in engine.log()
