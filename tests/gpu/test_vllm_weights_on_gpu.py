"""Real vLLM engines on a GPU with one copy of the weights: of bfloat16, FP8, GPTQ and AWQ, and beside adapters.

Nothing else may use the GPU meanwhile. PYTHONPATH must have vLLM.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import Daemon, until
from tests.support.engine_batches import compare
from tests.support.gpu import at_rest, on_gpu, used
from tests.support.sizes import GIB
from tests.support.vllm_checkpoints import RANK, write_adapter, write_awq, write_fp8, write_gptq
from tests.support.vllm_engine import BUILDS, GPU_CONFIG, Engine, write_model, write_plugins
from tests.support.vllm_engine import sockets_of_vllm as sockets_of_vllm

import membroker
from membroker.vmm.cuda.driver import CudaDriver

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200), pytest.mark.usefixtures("gpu")]

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}
OPTIONS = {"max_model_len": 1024, "max_num_batched_tokens": 2048}
_RNG = random.Random(7)
PROMPTS = [[_RNG.randrange(3, 150_000) for _ in range(length)] for length in (5, 60, 700)], 48
FEW = [[_RNG.randrange(3, GPU_CONFIG["vocab_size"]) for _ in range(length)] for length in (5, 60, 700)], 24
EAGER = {**OPTIONS, "enforce_eager": True}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of an engine that finds membroker's entry points."""
    plugins = write_plugins(tmp_path_factory.mktemp("plugins"))
    return {"PYTHONPATH": os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")])}


def sharing(model: Path, daemon: Daemon, name: str, environment: dict[str, str], **options: Any) -> Engine:
    """An engine with shared weights and an elastic cache."""
    settings = {**OPTIONS, "load_format": "membroker", **options}
    return Engine(BUILDS["gpu"], model, daemon.endpoint(), {"model": name}, environment=environment, **settings)


def published_once(*engines: Engine) -> bool:
    """Return whether one engine has published the weights, and the others have attached them."""
    how = sorted(word for each in engines for word in re.findall(r"membroker: (\w+) the weights", each.log()))
    return how == ["attached"] * (len(engines) - 1) + ["published"]


def seconds(engine: Engine, what: str) -> str:
    """The time in a line of the log."""
    found = re.search(rf"{what}.*?([\d.]+) s", engine.log())
    assert found is not None, engine.log()
    return found[1]


def test_engines_compute_with_one_copy_of_the_weights(
    gpu: CudaDriver, tmp_path: Path, environment: dict[str, str], state: Callable[[str, str], None]
) -> None:
    """Qwen3-1.7B's shape, compiled, with CUDA graphs. The second engine reads no file and takes no memory for weights,
    and serves on when the first is killed.
    """
    model = write_model(tmp_path / "qwen", **SHAPE)
    answers = []
    with Engine(BUILDS["gpu"], model, environment=environment, **OPTIONS) as plain:
        expected = plain.ready().generate(*PROMPTS)
        state("weights: plain vLLM reads them", seconds(plain, "Loading weights took") + " s")
        with on_gpu(gpu, {"capacity": 16 * GIB}) as daemon:
            figures = [at_rest(lambda: used(gpu))]
            with sharing(model, daemon, "one", environment) as one:
                answers.append(one.ready().generate(*PROMPTS))
                figures.append(at_rest(lambda: used(gpu)))
                with sharing(model, daemon, "two", environment) as two:
                    answers.append(two.ready().generate(*PROMPTS))
                    figures.append(at_rest(lambda: used(gpu)))
                    with membroker.connect(daemon.endpoint(), observer=True) as client:
                        (there,) = client.segments()
                        model_of = there.name.partition("/models/")[2].partition("/segments/")[0]
                        assert client.model_status(model_of).books["device"].used_bytes == there.size_bytes
                        assert (there.state, there.sessions) == ("sealed", 2)
                    first, second = figures[1] - figures[0], figures[2] - figures[1]
                    published, attached = seconds(one, "published the weights"), seconds(two, "attached the weights")
                    state("weights: published, attached", f"{published} s, {attached} s")
                    state("weights: first, second engine", f"{first >> 20} MiB, {second >> 20} MiB")
                    assert second < first - there.size_bytes * 3 // 4
                    one.kill()
                    answers.append(two.generate(*PROMPTS))
            until(lambda: sum(one.books[0].used_bytes for one in daemon.models()) == 0, 60.0)
        for answer in answers:
            compare("weights", answer, expected, plain, PROMPTS[0])


@pytest.mark.parametrize(
    ("write", "kernel"),
    [(write_fp8, ""), (write_gptq, "Machete"), (write_gptq, "Marlin"), (write_awq, "Marlin")],
)
def test_quantized_weights_are_shared(
    write: Callable[..., Path], kernel: str, gpu: CudaDriver, tmp_path: Path, environment: dict[str, str]
) -> None:
    """FP8, GPTQ and AWQ, as the kernels of a Hopper GPU take them. Each engine's cache is elastic.

    vLLM takes Marlin for GPTQ only where it has no Machete, which it has for Hopper GPUs alone.
    """
    model = write(tmp_path / "model", GPU_CONFIG, **({"group": 128} if kernel else {}))
    if kernel == "Marlin":
        environment = {**environment, "VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}
    with (
        on_gpu(gpu, {"capacity": 8 * GIB}) as daemon,
        Engine(BUILDS["gpu"], model, environment=environment, **EAGER) as plain,
        sharing(model, daemon, "one", environment, **EAGER) as one,
        sharing(model, daemon, "two", environment, **EAGER) as two,
    ):
        expected = plain.ready().generate(*FEW)
        assert len({tuple(answer) for answer in expected}) == len(expected), "the answers are all alike"
        for engine in (one, two):
            compare("quantized", engine.ready().generate(*FEW), expected, plain, FEW[0])
            assert f"Using {kernel}LinearKernel" in engine.log() or not kernel
        assert published_once(one, two)


def test_adapters_lie_beside_shared_weights(gpu: CudaDriver, tmp_path: Path, environment: dict[str, str]) -> None:
    """An engine with LoRA shares with one that has none, and its adapter changes nobody's base model."""
    model = write_model(tmp_path / "qwen", GPU_CONFIG)
    adapter, lora = (
        str(write_adapter(tmp_path / "adapter", GPU_CONFIG, 0.2)),
        {"enable_lora": True, "max_lora_rank": RANK},
    )
    with (
        on_gpu(gpu, {"capacity": 8 * GIB}) as daemon,
        Engine(BUILDS["gpu"], model, environment=environment, **EAGER, **lora) as plain,
        sharing(model, daemon, "one", environment, **EAGER) as one,
        sharing(model, daemon, "two", environment, **EAGER, **lora) as two,
    ):
        adapted, expected = plain.ready().generate(*FEW, lora=adapter), plain.generate(*FEW)
        assert all(mine != base for mine, base in zip(adapted, expected, strict=True))
        one.ready()
        assert two.ready().generate(*FEW, lora=adapter) == adapted
        for engine in (one, two):
            compare("the base model", engine.generate(*FEW), expected, plain, FEW[0])
        assert published_once(one, two)
