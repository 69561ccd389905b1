"""What a user asks of the elastic cache of an SGLang engine, and which engines it can serve.

Owns the names in the variable `MEMBROKER_SGLANG`, and the refusals at the start of an engine. It imports no SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ...errors import InvalidRequest
from ..bounds import Bounds, refuse, settings_from

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
    SIZES: ClassVar[tuple[str, ...]] = (*Bounds.SIZES, "capacity")


def settings_of(text: str) -> SglangSettings:
    """Return the settings in the variable's text. Raises `InvalidRequest` about the first that is wrong."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{VARIABLE} is not JSON: {error}") from None
    return settings_from(VARIABLE, found, SglangSettings)


USUAL: Final[Mapping[str, object]] = {
    **dict.fromkeys(("tp_size", "pp_size", "dp_size", "dcp_size", "attn_cp_size", "ep_size"), 1),
    **dict.fromkeys(("speculative_algorithm", "radix_cache_backend", "dllm_algorithm")),
    **dict.fromkeys(("enable_unified_memory", "enable_hierarchical_cache", "enable_hisparse", "enable_lmcache"), False),
    **dict.fromkeys(("enable_flexkv", "enable_unified_cache_external_linker", "enable_streaming_session"), False),
    **dict.fromkeys(("enable_session_radix_cache", "enable_memory_saver", "enable_pdmux"), False),
    "disaggregation_mode": "null",
    "kv_canary": "none",
}
"""What these arguments are without their options. With another value membroker cannot serve, or was never tested."""


def check_supported(args: Any, *, is_recurrent: bool, is_window: bool, is_sparse: bool, sizes_late: bool) -> None:
    """Raise `InvalidRequest` for a `ServerArgs` or a kind of model that cannot be kept right, or was never tested."""
    refusals = {
        f"does not serve an engine with --{name.replace('_', '-')}: leave it out": getattr(args, name) != usual
        for name, usual in USUAL.items()
    } | {
        "does not serve models with Mamba or linear attention": is_recurrent,
        "does not serve a KV cache with sliding windows apart: add --disable-hybrid-swa-memory": is_window,
        "does not serve models with sparse attention": is_sparse,
        "does not support this KV cache: set --kv-cache-dtype to auto, bf16, fp8_e4m3 or fp8_e5m2": (
            args.kv_cache_dtype not in ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
        ),
        "replaces SGLang's own sizing after graph capture: leave SGLANG_ENABLE_POST_CAPTURE_KV_SIZING out": sizes_late,
        f"needs --page-size of at least {MIN_PAGE_TOKENS} tokens: 64 is a good choice": (
            args.page_size < MIN_PAGE_TOKENS
        ),
    }
    refuse("membroker.kv.sglang", refusals)
