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
from tests.support.vllm_checkpoints import RANK, write_adapter, write_awq, write_gptq
from tests.support.vllm_engine import BUILDS, Engine, write_model
from tests.support.vllm_held import GATE

import membroker
from membroker.checkpoint import publish_arrays

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
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose input and output embeddings are one tensor."""
    return write_model(tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture(scope="module")
def tokens(in_place: dict[str, str]) -> Callable[..., Any]:
    """Return a function that says what plain vLLM answers."""
    known: dict[Path, Any] = {}

    def answer(model: Path, **options: Any) -> Any:
        if model not in known:
            with Engine(BUILDS["cpu"], model, environment=in_place, load_format="auto", **options) as plain:
                known[model] = plain.ready().generate(*PROMPTS)
        return known[model]

    return answer


def sharing(model: Path, daemon: Daemon, environment: dict[str, str], name: str, **options: Any) -> Engine:
    """An engine with shared weights. Without a `name` its cache is vLLM's own."""
    extra = options.pop("weights", {})
    options = {"load_format": "membroker", "model_loader_extra_config": extra, **options}
    if not name:
        environment = {**environment, "MEMBROKER_ENDPOINT": str(daemon.endpoint())}
        return Engine(BUILDS["cpu"], model, environment=environment, **options)
    return Engine(BUILDS["cpu"], model, daemon.endpoint(), {"model": name}, environment=environment, **options)


def segments(daemon: Daemon) -> list[tuple[str, int]]:
    with membroker.connect(daemon.endpoint(), observer=True) as client:
        return [(one.state, one.sessions) for one in client.segments() if "/segments/weights-" in one.name]


def model_of(segment: str) -> str:
    """Return the name that the checkpoint of a segment has in the books."""
    return segment.removeprefix("tenants/red/models/").partition("/segments/")[0]


def published_once(one: Engine, two: Engine, drafts: int = 0) -> bool:
    """Return whether one of two engines has published what both have, and the other has attached it."""
    times = 1 + drafts
    return sorted(how(one) + how(two)) == ["attached"] * times + ["published"] * times


def how(engine: Engine) -> list[str]:
    """What an engine has done: published, attached."""
    return re.findall(r"membroker: (\w+) the weights", engine.log())


def test_engines_that_start_at_once_have_one_copy_and_outlive_its_writer(
    qwen: Path, in_place: dict[str, str], tokens: Callable[..., Any]
) -> None:
    """One publishes and the other attaches, whichever comes first. The publisher is killed; the next one attaches,
    and finds the entry point in each of its processes.

    When the last engine has left, nothing is charged any more.
    """
    expected = tokens(qwen)
    with running({"capacity": "512MiB"}) as daemon:
        with sharing(qwen, daemon, in_place, "one") as one, sharing(qwen, daemon, in_place, "two") as two:
            assert one.ready().generate(*PROMPTS) == two.ready().generate(*PROMPTS) == expected
            assert published_once(one, two)
            assert segments(daemon) == [("sealed", 2)]
            with membroker.connect(daemon.endpoint(), observer=True) as client:
                (there,) = client.segments()
                books = client.model_status(model_of(there.name)).books["device"]
                assert books.used_bytes == books.segment_bytes == there.size_bytes
            writer, other = (one, two) if how(one) == ["published"] else (two, one)
            writer.kill()
            until(lambda: segments(daemon) == [("sealed", 1)])
            assert other.generate(*PROMPTS) == expected
            with sharing(qwen, daemon, in_place, "three", fresh=True) as three:
                assert three.ready().generate(*PROMPTS) == expected
                assert how(three) == ["attached"]
        until(lambda: segments(daemon) == [])
        until(lambda: sum(one.books[0].used_bytes for one in daemon.models()) == 0)


def test_a_publisher_that_is_killed_halfway_is_replaced_by_an_engine_that_waits(
    qwen: Path, in_place: dict[str, str], tokens: Callable[..., Any], tmp_path: Path
) -> None:
    expected, gate = tokens(qwen), tmp_path / "gate"
    environment = {**in_place, GATE: str(gate)}
    held = {"weights": {"load_format": "held", "model": "weights-of-qwen", "keep": True}}
    with running({"capacity": "512MiB"}) as daemon:
        with (
            sharing(qwen, daemon, environment, "one", **held) as one,
            sharing(qwen, daemon, environment, "two", **held) as two,
        ):
            until(lambda: _loads(daemon, one) or _loads(daemon, two), 120.0)
            writer, other = (one, two) if _loads(daemon, one) else (two, one)
            until(lambda: "for the engine that loads weights-of-qwen/weights-" in other.log(), 120.0)
            writer.kill()
            until(lambda: _loads(daemon, other), 120.0)
            gate.touch()
            assert other.ready().generate(*PROMPTS) == expected
            assert how(other) == ["published"]
        until(lambda: segments(daemon) == [("sealed", 0)])
        with membroker.connect(daemon.endpoint()) as client:
            assert client.segments()[0].name.startswith("tenants/red/models/weights-of-qwen/segments/weights-")


def _loads(daemon: Daemon, engine: Engine) -> bool:
    """Return whether a process of the engine's group has the claim on the weights."""
    with membroker.connect(daemon.endpoint(), observer=True) as client:
        writers = {one.writer for one in client.segments() if "/segments/loading-" in one.name}
    pids = [one.pid for one in daemon.sessions() if one.name in writers]
    return bool(pids) and os.getpgid(pids[0]) == engine.process.pid


def test_a_segment_with_other_contents_is_refused(qwen: Path, in_place: dict[str, str]) -> None:
    """Something has the name, but not the tensors: the engine says so, and how to get rid of it."""
    import numpy

    with running({"capacity": "512MiB"}) as daemon:
        with sharing(qwen, daemon, in_place, "one", weights={"keep": True}) as one:
            one.ready()
        with membroker.connect(daemon.endpoint()) as client:
            (there,) = client.segments()
            client.delete_segment(there.name)
            until(lambda: client.segments() == [])
            own = there.name.rpartition("/")[2]
            publish_arrays(
                client.model(model_of(there.name)), own, {"lm_head.weight": numpy.ones(3, "float32")}
            ).close()
            says = r"does not fit this model: .*membroker segments delete"
            with sharing(qwen, daemon, in_place, "two") as two, pytest.raises(AssertionError, match=says):
                two.ready()
            assert [one.state for one in client.segments()] == ["sealed"]


def test_two_engines_that_end_together_leave_nothing(qwen: Path, in_place: dict[str, str]) -> None:
    """Both are killed in one moment, so neither can know that it is the last."""
    with running({"capacity": "512MiB"}) as daemon:
        with sharing(qwen, daemon, in_place, "") as one, sharing(qwen, daemon, in_place, "") as two:
            one.ready()
            two.ready()
            assert segments(daemon) == [("sealed", 2)]
            one.kill()
            two.kill()
        until(lambda: segments(daemon) == [])
        until(lambda: sum(one.books[0].used_bytes for one in daemon.models()) == 0)


@pytest.mark.parametrize("write", [write_awq, write_gptq])
def test_quantized_weights_are_shared_as_vllm_has_packed_them(
    write: Callable[..., Path], in_place: dict[str, str], tokens: Callable[..., Any], tmp_path: Path
) -> None:
    """A Llama in bfloat16, of which no layer declares to vLLM that it takes processed weights. The first packs them."""
    model, half = write(tmp_path / "model", **LLAMA), {"dtype": "bfloat16"}
    expected = tokens(model, **half)
    with (
        running({"capacity": "512MiB"}) as daemon,
        sharing(model, daemon, in_place, "", **half) as one,
        sharing(model, daemon, in_place, "", **half) as two,
    ):
        assert one.ready().generate(*PROMPTS) == two.ready().generate(*PROMPTS) == expected
        assert published_once(one, two)


def test_adapters_lie_beside_shared_weights(
    qwen: Path, in_place: dict[str, str], tokens: Callable[..., Any], tmp_path: Path
) -> None:
    """An engine with LoRA shares with one that has none, and its adapter changes nobody's base model."""
    adapter, lora = str(write_adapter(tmp_path / "adapter")), {"enable_lora": True, "max_lora_rank": RANK}
    with Engine(BUILDS["cpu"], qwen, environment=in_place, load_format="auto", **lora) as plain:
        adapted = plain.ready().generate(*PROMPTS, lora=adapter)
    assert adapted != tokens(qwen)
    with (
        running({"capacity": "512MiB"}) as daemon,
        sharing(qwen, daemon, in_place, "") as one,
        sharing(qwen, daemon, in_place, "", **lora) as two,
    ):
        one.ready()
        assert two.ready().generate(*PROMPTS, lora=adapter) == adapted
        assert two.generate(*PROMPTS) == one.generate(*PROMPTS) == tokens(qwen)
        assert published_once(one, two)


def test_a_draft_is_shared_beside_its_target(
    qwen: Path, in_place: dict[str, str], tokens: Callable[..., Any], tmp_path: Path
) -> None:
    """Each engine has two segments: its model's, and that of the smaller one that drafts for it."""
    draft = write_model(tmp_path / "small", num_hidden_layers=1)
    speculative = {"speculative_config": {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}}
    with (
        running({"capacity": "512MiB"}) as daemon,
        sharing(qwen, daemon, in_place, "", **speculative) as one,
        sharing(qwen, daemon, in_place, "", **speculative) as two,
    ):
        assert one.ready().generate(*PROMPTS) == two.ready().generate(*PROMPTS) == tokens(qwen)
        assert published_once(one, two, drafts=1)
        assert segments(daemon) == [("sealed", 2), ("sealed", 2)]
