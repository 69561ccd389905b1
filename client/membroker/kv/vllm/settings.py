"""What a user asks of the elastic cache and of shared weights, and which engines they can serve.

Owns the names in `kv_connector_extra_config` and in `--model-loader-extra-config`, and the refusals at the start of an
engine. It imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from ...arguments import bytes_of, name_of, seconds_of
from ...errors import InvalidRequest
from ...wire.names import MAX_WAIT_SECONDS, NAMES, valid_model

BLOCK_MAJOR, LAYER_MAJOR = "block-major", "layer-major"
PAGES: Final[Mapping[str, str]] = {BLOCK_MAJOR: "64MiB", LAYER_MAJOR: "2MiB"}
"""The page size of each layout."""
UNI: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""What "uni" stands for. vLLM's CPU build takes it by this name only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of `kv_connector_extra_config`. Sizes are in bytes, or text such as "8GiB".

    `model` is the name under which the broker knows this engine; without it, that is the name under which vLLM serves
    the model. `limit` is the most that it may borrow, as for `Client.register_model`. `floor`, `ahead`, `keep` and
    `ceiling` are as for `membroker.kv.ElasticCache`; without `ahead` one group of pages is kept mapped ahead. `layout`
    is what the engine is asked for, and `page_size` replaces that layout's own.
    """

    model: str | None = None
    limit: int | str | None = None
    floor: int | str = 0
    ahead: int | str | None = None
    keep: int | str = "2GiB"
    ceiling: int | str | None = None
    layout: str = BLOCK_MAJOR
    page_size: int | str | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            name_of("model", self.model)
        for name in ("limit", "floor", "ahead", "keep", "ceiling", "page_size"):
            value = getattr(self, name)
            if value is not None:
                bytes_of(name, value)
        if self.layout not in PAGES:
            raise InvalidRequest(f"layout is {' or '.join(PAGES)}, not {self.layout!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """The values of `--model-loader-extra-config` for `--load-format membroker`.

    The first engine loads with vLLM's own `load_format`, which gets `extra_config` as its extra configuration. `model`
    is the name in the broker's books to which the weights are charged; without it, that is the name of what vLLM
    loads. `wait` is how many seconds an engine waits until another one has loaded, and until the broker can lend the
    memory. With `keep` the weights stay when the last engine leaves.
    """

    load_format: str = "auto"
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    wait: float = 600.0
    keep: bool = False

    def __post_init__(self) -> None:
        if self.model is not None and not valid_model(name_of("model", self.model)):
            raise InvalidRequest(f"{self.model!r} is no name of a model: {NAMES}")
        if not isinstance(self.load_format, str) or self.load_format == "membroker":
            raise InvalidRequest(f'load_format is one of vLLM\'s own, such as "auto", not {self.load_format!r}')
        if not isinstance(self.extra_config, Mapping):
            raise InvalidRequest(f"extra_config is an object, not {self.extra_config!r}")
        if seconds_of("wait", self.wait) > MAX_WAIT_SECONDS:
            raise InvalidRequest(f"wait is at most {MAX_WAIT_SECONDS} seconds, not {self.wait!r}")
        if not isinstance(self.keep, bool):
            raise InvalidRequest(f"keep is true or false, not {self.keep!r}")


def settings_of(extra: Mapping[str, Any]) -> Settings:
    """Return the settings in `kv_connector_extra_config`. Raises `InvalidRequest` about the first that is wrong."""
    _check_names("kv_connector_extra_config", extra, Settings)
    return Settings(**extra)


def weight_settings_of(extra: Any) -> WeightSettings:
    """Return the settings in `--model-loader-extra-config`. Raises `InvalidRequest` about the first that is wrong."""
    if not isinstance(extra, Mapping):
        raise InvalidRequest(f"--model-loader-extra-config is an object, not {extra!r}")
    _check_names("--model-loader-extra-config", extra, WeightSettings)
    return WeightSettings(**extra)


def _check_names(source: str, extra: Mapping[str, Any], kind: Any) -> None:
    known = [one.name for one in fields(kind)]
    unknown = sorted(str(name) for name in extra if name not in known)
    if unknown:
        raise InvalidRequest(f"{source} has {unknown[0]!r}, and membroker knows: {', '.join(known)}")


def check_supported(config: Any) -> None:
    """Raise `InvalidRequest` for a `VllmConfig` whose cache membroker cannot keep right, or was never tested with."""
    parallel = config.parallel_config
    transfer = config.kv_transfer_config
    refusals = {
        "runs one GPU per engine: set the sizes of tensor, pipeline, data and context parallelism to 1": (
            parallel.world_size != 1 or parallel.data_parallel_size != 1
        ),
        "needs worker and scheduler in one process: give --distributed-executor-backend uni": (
            parallel.distributed_executor_backend not in ("uni", UNI)
        ),
        'needs "kv_role": "kv_both" in --kv-transfer-config, so that blocks stay until the steps that use them end': (
            transfer is None or not (transfer.is_kv_consumer and transfer.is_kv_producer)
        ),
        "does not serve models with MLA yet": config.model_config.use_mla,
        "does not serve encoder-decoder models": config.model_config.is_encoder_decoder,
        "does not support speculative decoding yet: leave --speculative-config out": (
            config.speculative_config is not None
        ),
        "does not support vLLM's sleep mode: leave --enable-sleep-mode out": (
            config.model_config.enable_sleep_mode or config.model_config.enable_cumem_allocator
        ),
        "was not tested with a quantized KV cache: leave --kv-cache-dtype at auto": (
            config.cache_config.cache_dtype != "auto"
        ),
        "needs --watermark 0, because a watermark counts blocks that have no memory": (
            config.scheduler_config.watermark > 0
        ),
    }
    _refuse("membroker.kv.vllm", refusals)


def check_shareable(config: Any) -> None:
    """Raise `InvalidRequest` for a `VllmConfig` whose engine writes to its weights after it has loaded them."""
    parallel, offload = config.parallel_config, config.offload_config
    refusals = {
        "moves the weights of experts: leave --enable-eplb out": parallel.enable_eplb,
        "writes new weights while it serves: leave --weight-transfer-config out": (
            config.weight_transfer_config is not None
        ),
        "discards weights and reads them again: leave --enable-sleep-mode out": (
            config.model_config.enable_sleep_mode or config.model_config.enable_cumem_allocator
        ),
        "moves weights to host memory: leave --cpu-offload-gb and the other offloading out": (
            offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0
        ),
        "was not tested with LoRA: leave --enable-lora out": config.lora_config is not None,
    }
    _refuse("--load-format membroker shares weights read-only, and this engine", refusals)


def _refuse(begin: str, refusals: Mapping[str, bool]) -> None:
    for sentence, applies in refusals.items():
        if applies:
            raise InvalidRequest(f"{begin} {sentence}")


def check_cache(config: Any) -> None:
    """Raise `InvalidRequest` for a `KVCacheConfig` that is not one group of layers with plain full attention."""
    groups = config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    if (
        len(specs) != 1
        or type(specs[0]).__name__ != "FullAttentionSpec"
        or specs[0].sliding_window is not None
        or specs[0].attention_chunk_size is not None
        or any(tensor.block_stride for tensor in config.kv_cache_tensors)
    ):
        names = sorted({type(spec).__name__ for spec in specs})
        raise InvalidRequest(
            "membroker.kv.vllm serves models whose layers all have full attention; hybrid, sliding-window and MLA "
            f"models are not supported yet (this cache has {len(specs)} groups of {', '.join(names)})"
        )
