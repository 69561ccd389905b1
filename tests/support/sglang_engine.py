"""An SGLang of a small model with random weights, in a process of its own: plain, or over a broker's memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import vllm_engine
from tests.support.sizes import MIB

IMPORTS = ("sglang.srt.managers.scheduler", "sglang.srt.entrypoints.engine")


@dataclass(frozen=True, slots=True)
class Build(vllm_engine.Build):
    """A build as vLLM's. `settings` is set in all of `MEMBROKER_SGLANG`, and `plugins` are more plugins of SGLang."""

    settings: Mapping[str, Any]
    plugins: Mapping[str, str]


def _has_compiler() -> bool:
    """Return whether SGLang can compile its kernels here."""
    at = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    return bool(shutil.which("ninja") and (shutil.which("nvcc") or at.exists()))


_GPU: Mapping[str, Any] = {
    "config": vllm_engine.GPU_CONFIG,
    "options": {
        "dtype": "bfloat16",
        "page_size": 64,
        "context_length": 8192,
        "max_running_requests": 112,
        "chunked_prefill_size": 4096,
        "max_total_tokens": 1 << 18,
        "mem_fraction_static": 0.5,
        "attention_backend": "triton",
        "cuda_graph_max_bs_decode": 112,
        "cuda_graph_backend_prefill": "disabled",
    },
    "environment": {},
    "settings": {"capacity": "8GiB"},
    "layout": "layer-major",
    "plugins": {} if _has_compiler() else {"native": "tests.support.sglang_native:register"},
    "unit": 16 * MIB,
    "times": 7,
    "token_bytes": 28 << 10,
    "on_gpu": True,
}
BUILDS: Mapping[str, Build] = {
    "cpu": Build(
        config=vllm_engine.CONFIG,
        options={
            "device": "cpu",
            "dtype": "float32",
            "page_size": 32,
            "context_length": 1024,
            "max_running_requests": 16,
            "max_total_tokens": 40_960,
            "attention_backend": "torch_native",
        },
        environment={"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"},
        settings={"capacity": "512MiB"},
        plugins={},
        unit=MIB,
        times=1,
        token_bytes=12 << 10,
        layout="layer-major",
        group=8 * MIB,
        on_gpu=False,
    ),
    "gpu": Build(group=28 * MIB, **_GPU),
}


class Engine(vllm_engine.Engine):
    """SGLang in a process. With an endpoint its cache is elastic, with `settings` in `MEMBROKER_SGLANG`."""

    def __init__(
        self,
        build: Build,
        model: Path,
        endpoint: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        keywords = {
            "model_path": str(model),
            "skip_tokenizer_init": True,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "random_seed": 0,
            "log_level": "info",
            **build.options,
        }
        plugins = model / "plugins"
        if not plugins.exists():
            vllm_engine.write_plugins(plugins, "sglang.srt.plugins", **build.plugins)
        path = os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")])
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "TMPDIR": str(model), **build.environment}
        if endpoint is not None:
            variables["MEMBROKER_ENDPOINT"] = str(endpoint)
            variables["MEMBROKER_SGLANG"] = json.dumps({**build.settings, **(settings or {})})
        self._start("tests.support.sglang_serve", build, model, {**keywords, **options}, variables, IMPORTS)
