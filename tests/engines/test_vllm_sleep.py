"""Real vLLM, its CPU build, put to sleep by an operator: the tokens are those of plain vLLM, whenever a request comes.

The build computes with the weights in place, as builds for GPUs do: a weight that is used while its memory is away ends
the engine with SIGSEGV.
"""

from __future__ import annotations

import itertools
import random
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import until
from tests.support.engine_batches import Batch, story_of
from tests.support.sleeping import Books, books, command, done, refused_at_once, refused_with
from tests.support.vllm_engine import ANSWER_SECONDS, Build, Engine, write_model

import membroker
from membroker.v1.resources_pb2 import LOCATION_DEVICE

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")
pytestmark = pytest.mark.timeout(600)

_RNG = random.Random(11)
PROMPTS = [[_RNG.randrange(3, 512) for _ in range(length)] for length in (5, 60, 300)], 24
MIB = 1 << 20
DECLARED = 8 * MIB
RELEASED = r"released ([\d.]+ [MG]iB) \(KV cache ([\d.]+ [MG]iB), weights ([\d.]+ [MG]iB|0 B)\)"


def _long(build: Build) -> Batch:
    """A batch that takes longer than some commands, and fills much more than an engine at rest has."""
    return [[_RNG.randrange(3, 512) for _ in range(200)] for _ in range(16)], 4800 if build.on_gpu else 800


@pytest.fixture
def environment(build: Build, in_place: dict[str, str]) -> dict[str, str]:
    return {} if build.on_gpu else in_place


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_sleeps_and_wakes_with_the_same_tokens(
    build: Build, environment: dict[str, str], tmp_path: Path, ranks: int
) -> None:
    """By its next request and by command, over a broker that was killed meanwhile, and while it has requests.

    With two ranks each has a broker, and the operator asks one or the other.
    """
    model = write_model(tmp_path / "model", build.config, vocab_size=8192)
    batches = {"one": PROMPTS, "burst": _long(build)}
    with ExitStack() as stack:
        config = {
            "capacity": 512 * build.unit,
            "host_capacity": 64 * build.unit,
            "tenants": {"red": {}, "blue": {}},
        }
        daemons = [stack.enter_context(build.running(config, device)) for device in range(ranks)]
        words = itertools.cycle(daemons)
        settings = {"weights": "borrowed", "endpoint": [str(one.endpoint()) for one in daemons]}
        named: dict[str, Any] = {"environment": {**environment, "MEMBROKER_MODEL": "chat"}}
        if ranks > 1:
            named |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
        first = stack.enter_context(Engine(build, model, environment=environment, enable_prefix_caching=False))
        engine = stack.enter_context(Engine(build, model, Path("/nowhere"), settings, **named))
        story = story_of(Engine, build, model, batches, first.ready())

        def serves() -> None:
            story.check(engine, "one")

        def has() -> list[Books]:
            return [books(daemon, "chat") for daemon in daemons]

        engine.ready()
        serves()
        weights = _weights(engine, ranks)
        assert weights >= 4 * MIB // ranks
        assert all(one.device > weights and one.host == 0 for one in has())
        for daemon in daemons:
            (at_device,) = [one for row in daemon.models() for one in row.books if one.location == LOCATION_DEVICE]
            assert at_device.used_bytes - at_device.recallable_bytes == weights, "weights cannot be recalled"

        def sleep() -> None:
            assert re.search(RELEASED, done(command(next(words), "sleep", "chat")))
            assert has() == [(0, weights)] * ranks

        sleep()
        serves()
        assert all(one.device > weights for one in has())

        sleep()
        saved = tmp_path / "saved"
        saved.mkdir()
        engine.call("save_sharded_state", path=str(saved))  # reads the weights of each rank
        assert all(one.device > weights for one in has())
        assert sum(one.stat().st_size for one in saved.iterdir()) > ranks * weights // 2

        sleep()
        assert "awake" in done(command(next(words), "wake", "chat"))
        assert all(one.device > weights for one in has())
        serves()

        sleep()
        daemons[-1].kill()
        daemons[-1].start_again()
        serves()
        until(lambda: all(one.host == 0 for one in has()))

        # Another tenant has the memory of the last rank when a request comes.
        sleep()
        with membroker.connect(daemons[-1].endpoint("blue")) as other:
            with other.model("owner").allocate(config["capacity"] - weights // 2 // MIB * MIB):
                engine.ask(*PROMPTS)
                for daemon in daemons:
                    refused_with("waits for memory: ", daemon, "wake", "chat", "--timeout", "2")
                assert engine.is_busy
            story.compare(engine.answer(), "one")

        engine.ask(*batches["burst"])
        until(lambda: min(has()).device > weights + 3 * build.group)
        assert "chat is busy: its engine has requests after 0.2 s" in refused_at_once(
            next(words), "sleep", "chat", "--timeout", "0.2"
        )
        assert engine.is_busy, "it was not busy all the time"
        sleeping = command(next(words), "sleep", "chat", "--timeout", f"{ANSWER_SECONDS:g}")
        story.compare(engine.answer(), "burst")
        assert "released" in done(sleeping)
        assert has() == [(0, weights)] * ranks

        # A request comes as soon as the cache has begun to go, or the weights are on their way to the host.
        for at_weights in (False, True) * 2:
            serves()
            before = has()[0]
            sleeping = command(next(words), "sleep", "chat")
            until(lambda at=at_weights, before=before: has()[0][at] != before[at])
            serves()
            assert "released" in done(sleeping)
            if has()[0].device:  # it slept before the request came, which woke it
                sleep()
            assert has() == [(0, weights)] * ranks


def _weights(engine: Engine, ranks: int) -> int:
    """Return the bytes of weights that each rank of an engine says it has borrowed."""
    found = re.findall(r"moved (\d+) bytes of weights of model 'chat' into borrowed memory", engine.log())
    assert len(found) == ranks, engine.log()
    assert len(set(found)) == 1
    return int(found[0])


def test_weights_that_are_not_borrowed_stay(build: Build, tmp_path: Path) -> None:
    """The KV cache goes to nothing, and the answer says why the weights stay. What is declared stays as well."""
    model = write_model(tmp_path / "model", build.config)
    settings = {"model": "chat", "declare": DECLARED}
    with (
        build.running({"capacity": 512 * build.unit}) as daemon,
        Engine(build, model, daemon.endpoint(), settings, enable_prefix_caching=False) as engine,
    ):
        before = engine.ready().generate(*PROMPTS)
        said = done(command(daemon, "sleep", "chat"))
        assert "weights 0 B" in said
        assert "weights kept: they are vLLM's own memory" in said
        assert books(daemon, "chat") == (DECLARED, 0)
        assert engine.generate(*PROMPTS) == before
        assert books(daemon, "chat").device > DECLARED


def test_an_idle_engine_sleeps_by_itself_when_another_model_waits(
    build: Build, environment: dict[str, str], tmp_path: Path
) -> None:
    """Nobody types a command. Its next request waits until the other one has gone, and has the same tokens."""
    model = write_model(tmp_path / "model", build.config)
    config = {
        "capacity": 512 * build.unit,
        "host_capacity": 64 * build.unit,
        "tenants": {"red": {"idle_sleep_seconds": 1.0}, "blue": {}},
    }
    named = {"environment": {**environment, "MEMBROKER_MODEL": "chat"}, "enable_prefix_caching": False}
    with (
        build.running(config) as daemon,
        Engine(build, model, daemon.endpoint(), {"weights": "borrowed"}, **named) as engine,
        membroker.connect(daemon.endpoint("blue")) as other,
    ):
        before = engine.ready().generate(*PROMPTS)
        with other.model("owner").allocate(config["capacity"], timeout=600.0):
            assert books(daemon, "chat").device == 0
            until(lambda: daemon.device().asleep_sessions)
            engine.ask(*PROMPTS)
            until(lambda: not daemon.device().asleep_sessions)
            assert engine.is_busy
        assert engine.answer() == before
