"""Real vLLM, its CPU build, with weights that its engines share: the tokens are those of plain vLLM.

The build computes with the weights in place, as builds for GPUs do, and they are mapped read-only: an engine that wrote
to one would die with SIGSEGV.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.vllm_engine import BUILDS, Engine, write_model, write_plugins
from tests.support.vllm_held import GATE

import membroker

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")
pytestmark = pytest.mark.timeout(600)

_RNG = random.Random(7)
PROMPTS = [[_RNG.randrange(3, 512) for _ in range(length)] for length in (5, 60, 300)], 24
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of an engine that finds membroker's entry point, and those of the tests."""
    directory = write_plugins(
        tmp_path_factory.mktemp("plugins"),
        torch_linear="tests.support.vllm_torch_linear:register",
        held="tests.support.vllm_held:register",
    )
    return {"PYTHONPATH": os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose input and output embeddings are one tensor."""
    return write_model(tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture(scope="module")
def tokens(plugins: dict[str, str]) -> Callable[..., Any]:
    """Return a function that says what plain vLLM answers."""
    known: dict[Path, Any] = {}

    def answer(model: Path, **options: Any) -> Any:
        if model not in known:
            with Engine(BUILDS["cpu"], model, environment=plugins, load_format="auto", **options) as plain:
                known[model] = plain.ready().generate(*PROMPTS)
        return known[model]

    return answer


def sharing(model: Path, daemon: Daemon, environment: dict[str, str], name: str, **options: Any) -> Engine:
    extra = options.pop("weights", {})
    options = {"load_format": "membroker", "model_loader_extra_config": extra, **options}
    return Engine(BUILDS["cpu"], model, daemon.endpoint(), {"model": name}, environment=environment, **options)


def segments(daemon: Daemon) -> list[tuple[str, int]]:
    with membroker.connect(daemon.endpoint(), observer=True) as client:
        return [(one.state, one.sessions) for one in client.segments() if "/segments/weights-" in one.name]


def how(engine: Engine) -> list[str]:
    """What an engine has done: published, attached."""
    return re.findall(r"membroker: (\w+) the weights", engine.log())


def test_engines_that_start_at_once_have_one_copy_and_outlive_its_writer(
    qwen: Path, plugins: dict[str, str], tokens: Callable[..., Any]
) -> None:
    """One publishes and the other attaches, whichever comes first. The publisher is killed; the next one attaches,
    and finds the entry point in each of its processes.

    When the last engine has left, nothing is charged any more.
    """
    expected = tokens(qwen)
    with running({"capacity": "512MiB"}) as daemon:
        with sharing(qwen, daemon, plugins, "one") as one, sharing(qwen, daemon, plugins, "two") as two:
            assert one.ready().generate(*PROMPTS) == two.ready().generate(*PROMPTS) == expected
            assert sorted(how(one) + how(two)) == ["attached", "published"]
            assert segments(daemon) == [("sealed", 2)]
            with membroker.connect(daemon.endpoint(), observer=True) as client:
                (segment,) = client.segments()
                books = client.model(segment.name.split("/")[3]).books["device"]
                assert books.used_bytes == books.segment_bytes == client.segments()[0].size_bytes
            writer, other = (one, two) if how(one) == ["published"] else (two, one)
            writer.kill()
            until(lambda: segments(daemon) == [("sealed", 1)])
            assert other.generate(*PROMPTS) == expected
            with sharing(qwen, daemon, plugins, "three", fresh=True) as three:
                assert three.ready().generate(*PROMPTS) == expected
                assert how(three) == ["attached"]
        until(lambda: segments(daemon) == [])
        until(lambda: sum(one.books[0].used_bytes for one in daemon.models()) == 0)


def test_a_publisher_that_is_killed_halfway_is_replaced_by_an_engine_that_waits(
    qwen: Path, plugins: dict[str, str], tokens: Callable[..., Any], tmp_path: Path
) -> None:
    expected, gate = tokens(qwen), tmp_path / "gate"
    environment = {**plugins, GATE: str(gate)}
    held = {"weights": {"load_format": "held", "model": "weights-of-qwen", "keep": True}}
    with running({"capacity": "512MiB"}) as daemon:
        with (
            sharing(qwen, daemon, environment, "one", **held) as one,
            sharing(qwen, daemon, environment, "two", **held) as two,
        ):
            until(lambda: segments(daemon) == [("writing", 1)], 120.0)
            writer, other = (one, two) if _is_writer(daemon, one) else (two, one)
            until(lambda: "for the engine that loads weights-of-qwen/weights-" in other.log(), 120.0)
            writer.kill()
            until(lambda: segments(daemon) == [("writing", 1)] and _is_writer(daemon, other), 120.0)
            gate.touch()
            assert other.ready().generate(*PROMPTS) == expected
            assert how(other) == ["published"]
        until(lambda: segments(daemon) == [("sealed", 0)])
        with membroker.connect(daemon.endpoint()) as client:
            assert client.segments()[0].name.startswith("tenants/red/models/weights-of-qwen/segments/weights-")


def _is_writer(daemon: Daemon, engine: Engine) -> bool:
    """Return whether a segment is written by a process of the engine's group."""
    with membroker.connect(daemon.endpoint(), observer=True) as client:
        writers = {one.writer for one in client.segments() if "/segments/weights-" in one.name}
    pids = [one.pid for one in daemon.sessions() if one.name in writers]
    return bool(pids) and os.getpgid(pids[0]) == engine.process.pid


def test_another_model_class_and_dtype_has_a_copy_of_its_own(
    qwen: Path, plugins: dict[str, str], tokens: Callable[..., Any], tmp_path: Path
) -> None:
    """Llama in bfloat16, with two embeddings. And Qwen in bfloat16 never takes the float32 weights of Qwen."""
    llama = write_model(tmp_path / "llama", **LLAMA)
    half = {"dtype": "bfloat16"}
    expected = tokens(llama, **half)
    with (
        running({"capacity": "512MiB"}) as daemon,
        sharing(llama, daemon, plugins, "one", **half) as one,
        sharing(llama, daemon, plugins, "two", **half) as two,
    ):
        assert one.ready().generate(*PROMPTS) == two.ready().generate(*PROMPTS) == expected
        assert sorted(how(one) + how(two)) == ["attached", "published"]
        one.kill()
        two.kill()
        with (
            sharing(qwen, daemon, plugins, "three") as three,
            sharing(qwen, daemon, plugins, "four", **half) as four,
        ):
            assert three.ready().generate(*PROMPTS) == tokens(qwen)
            four.ready()
            assert how(three) == how(four) == ["published"]
            assert sorted(segments(daemon)) == [("sealed", 0), ("sealed", 1), ("sealed", 1)]


def test_a_segment_with_other_contents_is_refused(qwen: Path, plugins: dict[str, str]) -> None:
    """Something has the name, but not the tensors: the engine says so, and how to get rid of it."""
    import numpy

    with running({"capacity": "512MiB"}) as daemon:
        with sharing(qwen, daemon, plugins, "one", weights={"keep": True}) as one:
            one.ready()
        with membroker.connect(daemon.endpoint()) as client:
            (there,) = client.segments()
            client.delete_segment(there.name)
            until(lambda: client.segments() == [])
            own = there.name.rpartition("/")[2]
            publish = membroker.segment.publish_arrays
            publish(
                client.register_model(there.name.split("/")[3]), own, {"lm_head.weight": numpy.ones(3, "float32")}
            ).close()
            says = r"does not fit this model: .*membroker segments delete"
            with sharing(qwen, daemon, plugins, "two") as two, pytest.raises(AssertionError, match=says):
                two.ready()
            assert [one.state for one in client.segments()] == ["sealed"]
