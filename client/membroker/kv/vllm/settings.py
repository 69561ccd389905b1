"""What a user asks of the elastic cache and of shared weights, and which engines they can serve.

Owns the names in `kv_connector_extra_config` and in `--model-loader-extra-config`, and the refusals at the start of an
engine. It imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from ...errors import InvalidRequest
from ...ext import arguments, names
from ..bounds import Bounds, refuse, settings_from

AUTO: Final = "auto"
OWN, BORROWED = "own", "borrowed"
"""Whose memory the weights are in: vLLM's own, or the broker's."""
UNI: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""What "uni" stands for. vLLM's CPU build takes it by this name only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings(Bounds):
    """The values of `kv_connector_extra_config`: those of `Bounds`, and more.

    `endpoint` is the directory of the broker's endpoint, or a list with one for each rank; without it
    MEMBROKER_ENDPOINT is.

    With `weights` "borrowed" these are in a pool of the broker's memory: in the books, and released while the engine
    sleeps. `keep_pinned` is that of `membroker.kv.Sleeper`. `declare` is what the engine uses besides, and is charged
    for (`Model.declare`): a size, or "auto" for what PyTorch has reserved when the engine has warmed up, and a context.

    `swap_space` is how much host memory each rank pins for the KV cache of preempted requests. Without it vLLM computes
    that again.
    """

    endpoint: str | Sequence[str] | None = None
    weights: str = OWN
    keep_pinned: bool = False
    declare: int | str | None = None
    swap_space: int | str | None = None
    SIZES: ClassVar[tuple[str, ...]] = (*Bounds.SIZES, "swap_space")

    def __post_init__(self) -> None:
        _check_endpoint(self.endpoint)
        Bounds.__post_init__(self)
        if self.declare not in (None, AUTO):
            arguments.bytes_of("declare", self.declare)
        if self.weights not in (OWN, BORROWED):
            raise InvalidRequest(f"weights is {OWN} or {BORROWED}, not {self.weights!r}")
        if not isinstance(self.keep_pinned, bool):
            raise InvalidRequest(f"keep_pinned is true or false, not {self.keep_pinned!r}")
        if self.keep_pinned and self.weights != BORROWED:
            raise InvalidRequest('keep_pinned is for borrowed weights: give "weights": "borrowed", or leave it out')


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """The values of `--model-loader-extra-config` for `--load-format membroker`.

    The first engine loads with vLLM's own `load_format`, which gets `extra_config` as its extra configuration. `model`
    is the name in the broker's books to which the weights are charged; without it, that is the name of what vLLM
    loads. `wait` is how many seconds an engine waits until another one has loaded, and until the broker can lend the
    memory. With `keep` the weights stay when the last engine leaves. `endpoint` is that of `VllmSettings`.
    """

    load_format: str = "auto"
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    wait: float = 600.0
    keep: bool = False
    endpoint: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        _check_endpoint(self.endpoint)
        if self.model is not None and not names.valid_model(arguments.name_of("model", self.model)):
            raise InvalidRequest(f"{self.model!r} is no name of a model: {names.grammar('MODEL')}")
        if not isinstance(self.load_format, str) or self.load_format == "membroker":
            raise InvalidRequest(f'load_format is one of vLLM\'s own, such as "auto", not {self.load_format!r}')
        if not isinstance(self.extra_config, Mapping):
            raise InvalidRequest(f"extra_config is an object, not {self.extra_config!r}")
        if arguments.seconds_of("wait", self.wait) > names.MAX_WAIT_SECONDS:
            raise InvalidRequest(f"wait is at most {names.MAX_WAIT_SECONDS} seconds, not {self.wait!r}")
        if not isinstance(self.keep, bool):
            raise InvalidRequest(f"keep is true or false, not {self.keep!r}")


def settings_of(extra: Mapping[str, Any]) -> VllmSettings:
    """Return the settings in `kv_connector_extra_config`. Raises `InvalidRequest` about the first that is wrong."""
    return settings_from("kv_connector_extra_config", extra, VllmSettings)


def settings_in(transfer: Any) -> VllmSettings:
    """Return the settings in `--kv-transfer-config`, where the connector may be one of a MultiConnector's."""
    if transfer is None:
        return VllmSettings()
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == "MultiConnector":
        several = [
            connector for connector in extra.get("connectors", ()) if connector.get("kv_connector") == "Membroker"
        ]
        extra = several[0].get("kv_connector_extra_config", {}) if several else {}
    return settings_of(extra)


def endpoint_of(endpoint: str | Sequence[str] | None, parallel: Any) -> str | None:
    """Return the endpoint that this rank of an engine takes, None for the usual one. `parallel` is vLLM's config."""
    if endpoint is None or isinstance(endpoint, str):
        return endpoint
    if len(endpoint) != parallel.world_size:
        raise InvalidRequest(
            f"endpoint lists {len(endpoint)} directories, and this engine has {parallel.world_size} ranks"
        )
    return endpoint[int(parallel.rank)]


def _check_endpoint(endpoint: Any) -> None:
    listed = [endpoint] if endpoint is None or isinstance(endpoint, str) else endpoint
    if not isinstance(listed, list | tuple) or not all(
        endpoint is None or (isinstance(endpoint, str) and endpoint) for endpoint in listed
    ):
        raise InvalidRequest(f"endpoint is a directory, or a list with one for each rank, not {endpoint!r}")


def check_supported(config: Any) -> None:
    """Raise `InvalidRequest` for a `VllmConfig` whose cache membroker cannot keep right, or was never tested with."""
    parallel = config.parallel_config
    transfer = config.kv_transfer_config
    settings = settings_in(transfer)
    swaps, borrows = settings.swap_space is not None, settings.weights == BORROWED
    refusals = {
        "supports tensor parallelism only: set the sizes of pipeline, data and context parallelism to 1": (
            parallel.world_size != parallel.tensor_parallel_size
            or parallel.data_parallel_size != 1
            or parallel.decode_context_parallel_size != 1
        ),
        "needs all ranks on one machine: leave --nnodes out": parallel.nnodes != 1,
        "needs vLLM's own processes: give --distributed-executor-backend mp, or uni for one GPU": (
            parallel.distributed_executor_backend not in ("uni", UNI, "mp")
        ),
        'needs "kv_role": "kv_producer" in --kv-transfer-config. With "kv_both", vLLM preempts many requests at once '
        "when it is short of memory": (
            transfer is None
            or not transfer.is_kv_producer
            or (transfer.is_kv_consumer and transfer.kv_connector != "MultiConnector")
        ),
        "has no swap_space beside another connector, whose loads can fail: leave one of the two out": (
            swaps and transfer.kv_connector == "MultiConnector"
        ),
        "has no swap_space for models with recurrent states (Mamba, GDN): leave swap_space out": (
            swaps and (config.model_config.is_hybrid or config.model_config.is_attention_free)
        ),
        "has no swap_space with speculative decoding: leave swap_space or --speculative-config out": (
            swaps and config.speculative_config is not None
        ),
        "borrows no weights of --load-format membroker, which are in the books already: leave weights out": (
            borrows and is_shared(config)
        ),
        "borrows no quantized weights, whose kernels may know their addresses: leave weights out": (
            borrows and config.model_config.quantization is not None
        ),
        "borrows no weights with LoRA, which was not tried: leave weights out": (
            borrows and config.lora_config is not None
        ),
        "does not serve an engine that only encodes: it has no KV cache to share": (
            config.ec_transfer_config is not None and not config.ec_transfer_config.is_ec_consumer
        ),
        "does not serve encoder-decoder models": config.model_config.is_encoder_decoder,
        "does not serve a KV cache in host memory (HiSparse): leave hisparse_config out": (
            config.attention_config.hisparse_config is not None
        ),
        "does not support vLLM's sleep mode: leave --enable-sleep-mode out": (
            config.model_config.enable_sleep_mode or config.model_config.enable_cumem_allocator
        ),
        "does not support cascade attention: leave --no-disable-cascade-attn out": (
            # It takes each reference to a block for a request's. vLLM 0.31 alone has it.
            not getattr(config.model_config, "disable_cascade_attn", True)
        ),
    }
    refuse("membroker.kv.vllm", refusals)


def is_shared(config: Any) -> bool:
    """Return whether the weights of a `VllmConfig` are in a segment that other engines may use."""
    return str(config.load_config.load_format) == "membroker"


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
    }
    refuse("--load-format membroker shares weights read-only, and this engine", refusals)


def check_cache(config: Any) -> None:
    """Raise `InvalidRequest` for a `KVCacheConfig` whose blocks do not all lie in one buffer."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    refusals = {
        "does not serve a model without a KV cache": not specs,
        "does not serve a cache that its layers lay out by themselves": not all(spec.has_layer_views for spec in specs),
        f"does not serve the layout {config.kv_cache_layout}: leave VLLM_KV_CACHE_LAYOUT out": (
            config.kv_cache_layout == "LHBNC"  # the heads of a block are apart
        ),
    }
    refuse("membroker.kv.vllm", refusals)
