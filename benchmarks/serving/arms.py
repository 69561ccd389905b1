"""The arms of the comparison: how the engines of each get their memory, as vLLM's own options and environment."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import membroker
from membroker.arguments import bytes_of
from membroker.vmm.sizes import round_up

from ..harness.daemon import TENANT, configuration
from . import kvcached, shapes
from .traces import MODELS

UNIPROC: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""On a GPU this is the default. vLLM's CPU build takes another one unless told."""
PAGE: Final = {"cuda": 64 << 20, "host": 4 << 20}
"""What the elastic cache borrows at once: a page, block-major, and on the CPU one of 2 MiB for each of two layers."""
OURS: Final = (str(Path(__file__).parents[2]), str(Path(membroker.__file__).parents[1]))
"""Where an engine finds the benchmark and membroker."""
BLOCK_TOKENS: Final = {"cuda": 16, "host": 32}


@dataclass(frozen=True, slots=True)
class Setup:
    """What all arms of a run have in common. `budget` is the KV cache memory of all models together, in bytes."""

    device: str
    shape: str
    budget: int
    max_model_len: int
    max_num_seqs: int
    recall_seconds: float = 1.0
    exact: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's own arguments, for all arms."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """For membroker's connector: `kv_connector_extra_config`."""
    sites: Mapping[str, Path] = field(default_factory=dict)
    """By arm: a directory with packages, or an interpreter. The engines of others have the benchmark's own."""

    @property
    def weight_bytes(self) -> int:
        """What one copy of the weights takes, in whole pages."""
        return round_up(shapes.weight_bytes(self.shape), PAGE[self.device])


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to give the models their memory. `models` have an engine, and get their work."""

    name: str
    title: str
    models: tuple[int, ...] = tuple(range(MODELS))
    has_broker: bool = False
    is_divided: bool = False
    sleeps: bool = False
    shares_weights: bool = False
    needs: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def budget(self, setup: Setup) -> int:
        """Return the KV cache memory of all models together: with one copy of the weights, that of the others too."""
        return setup.budget + (MODELS - 1) * setup.weight_bytes * self.shares_weights

    def third(self, setup: Setup) -> int:
        """Return the part of one model when the budget is divided: whole pages, so that a guarantee of it is usable."""
        return self.budget(setup) // MODELS // PAGE[setup.device] * PAGE[setup.device]

    def cache_bytes(self, setup: Setup) -> int:
        """Return how large the KV cache of each model can get."""
        return self.third(setup) if self.is_divided else self.budget(setup)

    @property
    def is_plain(self) -> bool:
        """Whether it is vLLM as it comes, so that its tokens are what the others are compared with."""
        return not (self.has_broker or self.needs)


ARMS: Final = {
    arm.name: arm
    for arm in (
        Arm("static", "a third of the memory for each model", is_divided=True),
        Arm("membroker", "one broker, a third guaranteed to each model", has_broker=True),
        Arm(
            "membroker-shared",
            "the same with one copy of the weights: what two more would take is KV cache",
            has_broker=True,
            shares_weights=True,
        ),
        Arm("roomy", "all the memory for each model (three times the budget)"),
        Arm("alone", "the first model alone, with all the memory", models=(0,)),
        Arm("alone-membroker", "the first model alone, over the broker", models=(0,), has_broker=True),
        Arm("sleep", "vLLM's sleep mode (level 1): one model is awake, with all the memory", sleeps=True),
        Arm("kvcached", "kvcached, block-major", needs="kvcached", environment=kvcached.ENVIRONMENT),
        Arm(
            "kvcached-layers",
            "kvcached, layer-major",
            needs="kvcached",
            environment={**kvcached.ENVIRONMENT, "KVCACHED_CONTIGUOUS_LAYOUT": "false"},
        ),
    )
}


def why_not(arm: Arm, trace: str, setup: Setup) -> str | None:
    """Return why an arm cannot run a trace here, as a sentence; None if it can."""
    if arm.needs and not _has(setup.sites.get(arm.name), arm.needs):
        return f"{arm.name} is left out: the package {arm.needs} cannot be imported here, nor from a --site of its own"
    if arm.needs and setup.device == "host":
        return f"{arm.name} is left out: {arm.needs} needs a GPU"
    if arm.sleeps and trace != "t3":
        return f"{arm.name} is left out of {trace}: only T3 has one busy model at a time"
    if arm.sleeps and setup.device == "host":
        return f"{arm.name} is left out: vLLM's CPU build has no sleep mode"
    if arm.shares_weights and setup.device == "host":
        return f"{arm.name} is left out: vLLM's CPU build repacks weights, so each engine has a copy of its own"
    return None


def _has(site: Path | None, package: str) -> bool:
    if site is None:
        return importlib.util.find_spec(package) is not None
    if site.is_dir():
        return (site / package).is_dir()
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([site, "-c", code], env=os.environ | {"PYTHONPATH": ""}, check=False).returncode == 0


def interpreter(arm: Arm, setup: Setup) -> str:
    """Return the Python that the engines of an arm run in."""
    site = setup.sites.get(arm.name)
    return sys.executable if site is None or site.is_dir() else str(site)


def keywords(arm: Arm, setup: Setup, model: int, directory: Path) -> dict[str, Any]:
    """Return vLLM's engine arguments of one model."""
    found: dict[str, Any] = {
        "model": str(directory),
        "served_model_name": f"m{model}",
        "skip_tokenizer_init": True,
        "load_format": "bench-random",
        "worker_extension_cls": "benchmarks.serving.weights.Extension",
        "dtype": shapes.SHAPES[setup.shape]["torch_dtype"],
        "seed": 0,
        "max_model_len": setup.max_model_len,
        "max_num_seqs": setup.max_num_seqs,
        "gpu_memory_utilization": 0.05,  # vLLM wants this part of the GPU free; the next line is the size
        "kv_cache_memory_bytes": setup.budget,
        "block_size": BLOCK_TOKENS[setup.device],
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        **setup.engine,
    }
    if arm.cache_bytes(setup) != setup.budget:
        # Not by the size: that is part of the key of vLLM's compile cache, and each arm would compile again.
        block_bytes = BLOCK_TOKENS[setup.device] * shapes.token_bytes(setup.shape)
        found["num_gpu_blocks_override"] = arm.cache_bytes(setup) // block_bytes
    if setup.device == "host":
        found |= {"enforce_eager": True, "distributed_executor_backend": UNIPROC}
    if arm.has_broker:
        if "weights" in setup.settings:  # the cache alone needs no worker class
            found["worker_cls"] = "membroker.kv.vllm.Worker"
        found["kv_transfer_config"] = {
            "kv_connector": "Membroker",
            "kv_connector_module_path": "membroker.kv.vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": dict(setup.settings),
        }
    if arm.shares_weights:
        found["model_loader_extra_config"] = {"load_format": found["load_format"], "model": "weights"}
        found["load_format"] = "membroker"
    if arm.sleeps:
        found["enable_sleep_mode"] = True
    return found


def environment(arm: Arm, setup: Setup, model: int, endpoint: Path | None, directory: Path) -> dict[str, str]:
    """Return the environment of an engine's process. `directory` is for what it needs in a file."""
    found = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # as `vllm serve`
        **arm.environment,
    }
    if setup.device == "host":
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if setup.exact:
        found["VLLM_BATCH_INVARIANT"] = "1"
    if arm.needs is not None:
        found["KVCACHED_IPC_NAME"] = kvcached.segment(model)
    if interpreter(arm, setup) != sys.executable:  # what is before our packages is not before its own
        found["PYTHONPATH"] = os.pathsep.join(OURS)
    if (place := _site(arm, setup)) is not None:
        # Python reads .pth files, by which kvcached patches vLLM, in its site directories only.
        (directory / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(place)!r})\n")
        first = [directory, *([place] if arm.name in setup.sites else [])]
        found["PYTHONPATH"] = os.pathsep.join([*map(str, first), found.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if endpoint is not None:
        found["MEMBROKER_ENDPOINT"] = str(endpoint)
    return found


def _site(arm: Arm, setup: Setup) -> Path | None:
    """Return the directory of an arm's own packages: what --site says, or where the package that it needs is."""
    site = setup.sites.get(arm.name)
    if site is not None:
        return site if site.is_dir() else None
    spec = importlib.util.find_spec(arm.needs) if arm.needs else None
    return Path(spec.origin).parents[1] if spec is not None and spec.origin is not None else None


def broker_config(arm: Arm, setup: Setup) -> str:
    """Return the configuration of the broker: one tenant, with a guarantee of a third for each model."""
    # Besides the weights: the page of the segment by which an engine claims to load them.
    weights = (setup.weight_bytes + PAGE[setup.device]) * arm.shares_weights
    host = MODELS * bytes_of("swap_space", setup.settings.get("swap_space", 0))
    return configuration(
        setup.device,
        {f"tenants.{TENANT}.models.m{model}": {"guarantee": arm.third(setup)} for model in range(MODELS)},
        capacity=arm.budget(setup) + weights,
        host_capacity=host,
        recall_seconds=setup.recall_seconds,
    )


def describe(setup: Setup) -> dict[str, str]:
    """Return what a reader must know of the engines, by its name."""
    return {
        "models": f"{MODELS} x {setup.shape}, random weights, {shapes.token_bytes(setup.shape) >> 10} KiB a token",
        "KV cache in all": f"{setup.budget / (1 << 30):g} GiB",
        "longest request": f"{setup.max_model_len} tokens",
        "requests in a batch": f"{setup.max_num_seqs} at most",
        "recall_seconds": f"{setup.recall_seconds:g}",
        **{f"site of {arm}": str(site) for arm, site in setup.sites.items()},
        **({"membroker's settings": str(dict(setup.settings))} if setup.settings else {}),
        **({"batch-invariant kernels": "yes"} if setup.exact else {}),
        **({"vLLM's arguments": str(dict(setup.engine))} if setup.engine else {}),
    }
