"""What a user asks of the elastic cache of an SGLang engine, and which engines it can serve.

Owns the names in the variable `MEMBROKER_SGLANG`, and the refusals at the start of an engine. It imports no SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...errors import InvalidRequest
from ...ext import arguments
from ..bounds import Bounds, check_names, refuse

VARIABLE: Final = "MEMBROKER_SGLANG"
PAGES: Final[Mapping[bool, str]] = {True: "64MiB", False: "2MiB"}
"""The page size of a cache that is block-major, and of one that is not."""
MIN_PAGE_TOKENS: Final = 16
"""The least `--page-size`. With 1 each token would be a block, and a large cache has a million of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings(Bounds):
    """The values of `MEMBROKER_SGLANG`, a JSON object: those of `Bounds`, and `capacity`.

    That is how many bytes of addresses the cache has; without it, what SGLang finds free at its start.
    """

    capacity: int | str | None = None

    def __post_init__(self) -> None:
        Bounds.__post_init__(self)
        if self.capacity is not None:
            arguments.bytes_of("capacity", self.capacity)


def settings_of(text: str) -> SglangSettings:
    """Return the settings in the variable's text. Raises `InvalidRequest` about the first that is wrong."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{VARIABLE} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f'{VARIABLE} is an object such as {{"model": "chat"}}, not {text!r}')
    check_names(VARIABLE, found, SglangSettings)
    return SglangSettings(**found)


def check_supported(config: Any) -> None:
    """Raise `InvalidRequest` for a `KVCacheConfigurator` whose cache cannot be kept right, or was never tested."""
    args = config.server_args
    refusals = {
        "runs one GPU per engine: set the sizes of tensor, pipeline, data and context parallelism to 1": any(
            getattr(args, name) != 1
            for name in ("tp_size", "pp_size", "dp_size", "dcp_size", "attn_cp_size", "ep_size")
        ),
        "does not serve models with MLA yet": bool(config.use_mla_backend),
        "does not serve hybrid and sliding-window models yet": (
            bool(config.is_hybrid_swa) or config.mambaish_config is not None or config.sliding_window_size is not None
        ),
        "does not support speculative decoding yet: leave --speculative-algorithm out": (
            args.speculative_algorithm is not None or bool(config.is_draft_worker)
        ),
        "does not support a hierarchical cache: leave --enable-hierarchical-cache, --enable-hisparse, "
        "--enable-lmcache and --enable-flexkv out": any(
            (args.enable_hierarchical_cache, args.enable_hisparse, args.enable_lmcache, args.enable_flexkv)
        ),
        "does not support disaggregation: leave --disaggregation-mode out": args.disaggregation_mode != "null",
        "does not support another prefix cache: leave --radix-cache-backend, --enable-streaming-session and "
        "--enable-session-radix-cache out": (
            args.radix_cache_backend is not None or args.enable_streaming_session or args.enable_session_radix_cache
        ),
        "does not support the memory saver: leave --enable-memory-saver out": args.enable_memory_saver,
        "was not tested with a quantized KV cache: leave --kv-cache-dtype at auto": args.kv_cache_dtype != "auto",
        "was not tested with diffusion models, PD multiplexing, unified memory, or a KV canary": (
            args.dllm_algorithm is not None
            or args.enable_pdmux
            or args.enable_unified_memory
            or args.kv_canary != "none"
        ),
        "replaces SGLang's own sizing after graph capture: leave SGLANG_ENABLE_POST_CAPTURE_KV_SIZING out": bool(
            config.post_capture_kv_active
        ),
        f"needs --page-size of at least {MIN_PAGE_TOKENS} tokens: 64 is a good choice": (
            args.page_size < MIN_PAGE_TOKENS
        ),
    }
    refuse("membroker.kv.sglang", refusals)
