"""What a user asks of the elastic cache of an SGLang engine, and which engines it can serve.

Owns the names in the variable `MEMBROKER_SGLANG`, and the refusals at the start of an engine. It imports no SGLang.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from ...errors import InvalidRequest
from ...ext import arguments
from ..bounds import Bounds, check_names, refuse

VARIABLE: Final = "MEMBROKER_SGLANG"
PAGE: Final = "2MiB"
"""The page size. A layer has tensors of its own, so that a page of each is mapped together."""
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


def check_supported(args: Any, *, is_recurrent: bool, is_window: bool, is_sparse: bool, sizes_late: bool) -> None:
    """Raise `InvalidRequest` for a `ServerArgs` or a kind of model that cannot be kept right, or was never tested."""
    refusals = {
        "runs one GPU per engine: set the sizes of tensor, pipeline, data and context parallelism to 1": any(
            getattr(args, name) != 1
            for name in ("tp_size", "pp_size", "dp_size", "dcp_size", "attn_cp_size", "ep_size")
        ),
        "does not serve models with Mamba or linear attention": is_recurrent,
        "does not serve a KV cache with sliding windows apart: add --disable-hybrid-swa-memory": is_window,
        "does not serve models with sparse attention": is_sparse,
        "does not support unified memory: leave --enable-unified-memory out": args.enable_unified_memory,
        "does not support speculative decoding: leave --speculative-algorithm out": (
            args.speculative_algorithm is not None
        ),
        "does not support a hierarchical cache: leave --enable-hierarchical-cache, --enable-hisparse, "
        "--enable-lmcache, --enable-flexkv and --enable-unified-cache-external-linker out": any(
            (
                args.enable_hierarchical_cache,
                args.enable_hisparse,
                args.enable_lmcache,
                args.enable_flexkv,
                args.enable_unified_cache_external_linker,
            )
        ),
        "does not support disaggregation: leave --disaggregation-mode out": args.disaggregation_mode != "null",
        "does not support another prefix cache: leave --radix-cache-backend, --enable-streaming-session and "
        "--enable-session-radix-cache out": (
            args.radix_cache_backend is not None or args.enable_streaming_session or args.enable_session_radix_cache
        ),
        "does not support the memory saver: leave --enable-memory-saver out": args.enable_memory_saver,
        "does not support this KV cache: set --kv-cache-dtype to auto, bf16, fp8_e4m3 or fp8_e5m2": (
            args.kv_cache_dtype not in ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
        ),
        "was not tested with diffusion models, PD multiplexing, or a KV canary": (
            args.dllm_algorithm is not None or args.enable_pdmux or args.kv_canary != "none"
        ),
        "replaces SGLang's own sizing after graph capture: leave SGLANG_ENABLE_POST_CAPTURE_KV_SIZING out": sizes_late,
        f"needs --page-size of at least {MIN_PAGE_TOKENS} tokens: 64 is a good choice": (
            args.page_size < MIN_PAGE_TOKENS
        ),
    }
    refuse("membroker.kv.sglang", refusals)
