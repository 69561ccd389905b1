"""A vLLM of a small model with random weights, in a process of its own: plain, or over a broker's memory."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from membroker.closing import Closing
from membroker.vmm import DriverUnavailable
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running
from tests.support.engine_batches import ROUNDING
from tests.support.sizes import MIB
from tests.support.template import PythonProcess

START_SECONDS = 480.0
ANSWER_SECONDS = 480.0
IMPORTS = ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.2,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "head_dim": 96,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 512,
}
"""12 KiB of KV cache a token. A block of 32 tokens has 192 KiB in each of two layers, so some straddle two pages."""
GPU_CONFIG = {
    **CONFIG,
    "hidden_size": 1024,
    "initializer_range": 0.05,
    "intermediate_size": 2048,
    "head_dim": 128,
    "num_attention_heads": 16,
    "max_position_embeddings": 8192,
    "num_hidden_layers": 7,
    "torch_dtype": "bfloat16",
}
"""28 KiB of KV cache a token. A block of 16 tokens has 448 KiB: block-major, some straddle two pages of 16 MiB."""


@pytest.fixture(scope="session", autouse=True)
def sockets_of_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM leaves files and sockets in the directory for temporary files: give it one of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("VLLM_RPC_BASE_PATH", "TMPDIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp("vllm")))
        yield


@dataclass(frozen=True, slots=True)
class Build:
    """A build of vLLM, a device that it computes on, and sizes at which the tests' story is the same on each."""

    config: Mapping[str, Any]
    options: Mapping[str, Any]
    environment: Mapping[str, str]
    layout: str
    unit: int
    """What the sizes in bytes are multiples of."""
    times: int
    """How many times as many requests as on a CPU fill such sizes."""
    token_bytes: int
    group: int
    """The bytes that are mapped together: of layer-major, a page of 2 MiB for each layer."""
    on_gpu: bool

    def running(self, config: Mapping[str, Any] | None = None, device: int = 0) -> AbstractContextManager[Daemon]:
        """Run a daemon of the device, or of the GPU with that number."""
        return _on_gpu(config or {}, device) if self.on_gpu else running(config)


@contextmanager
def _on_gpu(config: Mapping[str, Any], device: int) -> Iterator[Daemon]:
    from membroker.vmm.cuda.driver import CudaDriver
    from tests.support.gpu import on_gpu

    try:
        gpu = CudaDriver(device)
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA GPU {device} to test on: {error}")
    with on_gpu(gpu, config, back=False) as daemon:  # a test's own context stays
        yield daemon
    gpu.close()


_GPU: Mapping[str, Any] = {
    "config": GPU_CONFIG,
    "options": {
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "max_num_seqs": 112,
        "max_num_batched_tokens": 4096,
        "kv_cache_memory_bytes": 8 << 30,
        "gpu_memory_utilization": 0.05,
    },
    "unit": 16 * MIB,
    "times": 7,
    "token_bytes": 28 << 10,
    "on_gpu": True,
}
BUILDS: Mapping[str, Build] = {
    "cpu": Build(
        config=CONFIG,
        options={
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 516 << 20,  # each layer's half is a whole number of pages
            # On a GPU this is the default, "uni". The CPU build makes "mp" of that.
            "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        },
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",  # else each start runs g++ for 10 s, to sample at random
        },
        layout="is LBHNC",
        unit=MIB,
        times=1,
        token_bytes=12 << 10,
        group=4 * MIB,
        on_gpu=False,
    ),
    "gpu": Build(environment={}, layout="is BLNHC", group=16 * MIB, **_GPU),
}


def write_model(directory: Path, config: Mapping[str, Any] = CONFIG, **changed: Any) -> Path:
    """Write a model with random weights in a safetensors file, its configuration `changed`; return the directory.

    vLLM's own random weights ("dummy") are so small that an answer hardly depends on what the cache holds.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(exist_ok=True)
    shape = {**config, **changed}
    (directory / "config.json").write_text(json.dumps(shape))
    torch.manual_seed(0)
    built = AutoConfig.from_pretrained(directory)
    AutoModelForCausalLM.from_config(built, dtype=getattr(torch, shape["torch_dtype"])).save_pretrained(directory)
    return directory


def write_plugins(directory: Path, group: str = "vllm.general_plugins", **more: str) -> Path:
    """Write what an installation of membroker tells an engine, its entry points, and `more` of the same group.

    The engine finds them when the directory is on its path.
    """
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    info = directory / "membroker-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: membroker\nVersion: 0\n")
    lines = [f"{name} = {place}" for name, place in {**project["entry-points"][group], **more}.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return directory


class Engine(Closing):
    """vLLM in a process. With an endpoint its cache is elastic, with `settings` as `kv_connector_extra_config`.

    `beside` puts an empty connector beside membroker's. `environment` is set besides the usual variables. On a CPU the
    processes of a `fresh` engine are interpreters of their own, as under `vllm serve`. Others are forks of a template,
    because each interpreter imports for 6 s.
    """

    def __init__(
        self,
        build: Build,
        model: Path,
        endpoint: Path | None = None,
        settings: dict[str, Any] | None = None,
        *,
        beside: bool = False,
        fresh: bool = False,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        keywords: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "disable_log_stats": True,
            "seed": 0,
            **build.options,
        }
        variables = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            **build.environment,
            **(environment or {}),
        }
        if endpoint is not None:
            variables["MEMBROKER_ENDPOINT"] = str(endpoint)
            if (settings or {}).get("weights") == "borrowed":
                keywords["worker_cls"] = "membroker.kv.vllm.Worker"
            keywords["kv_transfer_config"] = {
                "kv_connector": "Membroker",
                "kv_connector_module_path": "membroker.kv.vllm",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": settings or {},
            }
            if beside:
                empty = {"kv_connector": "Empty", "kv_connector_module_path": "tests.support.vllm_empty"}
                keywords["kv_transfer_config"] = {
                    "kv_connector": "MultiConnector",
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {
                        "connectors": [keywords["kv_transfer_config"], {**empty, "kv_role": "kv_producer"}]
                    },
                }
        fork_of = () if fresh else IMPORTS
        self._start("tests.support.vllm_serve", build, model, {**keywords, **options}, variables, fork_of)
        if not build.on_gpu:
            # Ranks look for work without a pause, and on two cores they would starve the broker and the commands.
            os.setpriority(os.PRIO_PGRP, self.process.pid, 10)

    def _start(
        self,
        module: str,
        build: Build,
        model: Path,
        keywords: Mapping[str, Any],
        variables: Mapping[str, str],
        fork_of: tuple[str, ...],
    ) -> None:
        """Start what serves the model: on a CPU as a fork of a process that has imported `fork_of`, if that is any."""
        self.rounding = ROUNDING[build.options["dtype"]]
        self._log = (model / f"log-{time.monotonic_ns()}").open("w+")
        arguments = ["-m", module, json.dumps(keywords)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        how: dict[str, Any] = {**pipes, "text": True, "env": variables, "process_group": 0}
        if build.on_gpu or not fork_of:
            self.process = subprocess.Popen([sys.executable, *arguments], **how)
        else:
            self.process = PythonProcess([*arguments, "fork"], imports=fork_of, **how)

    def ready(self) -> Engine:
        """Wait until it serves. Several engines can start at a time."""
        self.answer(START_SECONDS)
        return self

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int, lora: str | None = None) -> None:
        """Send prompts, to be answered by the adapter in a directory."""
        assert self.process.stdin is not None
        print(json.dumps({"prompts": prompts, "tokens": tokens, "lora": lora}), file=self.process.stdin, flush=True)

    def answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        out = self.process.stdout
        assert out is not None
        assert select.select([out], [], [], seconds)[0], (
            f"the engine did not answer in {seconds} seconds:\n{self.log()}"
        )
        line = out.readline()
        assert line, f"the engine ended:\n{self.log()}"
        return json.loads(line)

    @property
    def is_busy(self) -> bool:
        return not select.select([self.process.stdout], [], [], 0)[0]

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, lora: str | None = None) -> Any:
        self.ask(prompts, tokens, lora)
        return self.answer()

    def gaps(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Any:
        """Return for each answer by how much a token of it is less likely than the likeliest, as logarithms."""
        assert self.process.stdin is not None
        print(json.dumps({"prompts": prompts, "answers": answers}), file=self.process.stdin, flush=True)
        return self.answer()

    def call(self, name: str, **keywords: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"call": name, "keywords": keywords}), file=self.process.stdin, flush=True)
        self.answer()

    def log(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(DEADLINE_SECONDS)
        finally:
            if self.process.poll() is None:
                self.kill()
            self.process.stdout.close()
            self._log.close()
