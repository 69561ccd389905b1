"""Real vLLM engines on a GPU with one copy of the weights: a model of Qwen3-1.7B's shape from a safetensors file.

Compiled, with CUDA graphs. Nothing else may use the GPU meanwhile. PYTHONPATH must have vLLM.
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
from tests.support.vllm_engine import BUILDS, Engine, write_model, write_plugins
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


def seconds(engine: Engine, what: str) -> str:
    """The time in a line of the log."""
    found = re.search(rf"{what}.*?([\d.]+) s", engine.log())
    assert found is not None, engine.log()
    return found[1]


def test_engines_compute_with_one_copy_of_the_weights(
    gpu: CudaDriver, tmp_path: Path, state: Callable[[str, str], None]
) -> None:
    """The second engine reads no file and takes no memory for weights, and serves on when the first is killed."""
    model = write_model(tmp_path / "qwen", **SHAPE)
    path = os.pathsep.join([str(write_plugins(tmp_path / "plugins")), os.environ.get("PYTHONPATH", "")])
    build, environment = BUILDS["gpu"], {"PYTHONPATH": path}

    def sharing(daemon: Daemon, name: str) -> Any:
        options = {**OPTIONS, "load_format": "membroker"}
        return Engine(build, model, daemon.endpoint(), {"model": name}, environment=environment, **options)

    answers = []
    with Engine(build, model, environment=environment, **OPTIONS) as plain:
        expected = plain.ready().generate(*PROMPTS)
        state("weights: plain vLLM reads them", seconds(plain, "Loading weights took") + " s")
        with on_gpu(gpu, {"capacity": 16 * GIB}) as daemon:
            figures = [at_rest(lambda: used(gpu))]
            with sharing(daemon, "one") as one:
                answers.append(one.ready().generate(*PROMPTS))
                figures.append(at_rest(lambda: used(gpu)))
                with sharing(daemon, "two") as two:
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
