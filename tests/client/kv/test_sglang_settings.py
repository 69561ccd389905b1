"""What `MEMBROKER_SGLANG` may say, and the engines that are refused at the start. It needs no SGLang."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from membroker import InvalidRequest
from membroker.kv.sglang import plugin
from membroker.kv.sglang.settings import VARIABLE, check_supported, settings_of


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "MEMBROKER_SGLANG is not JSON"),
        ('"chat"', 'is an object such as {"model": "chat"}'),
        ('{"limits": "8GiB"}', "has 'limits', and membroker knows: model, limit, floor, ahead"),
        ('{"capacity": -1}', "capacity"),
    ],
)
def test_wrong_settings_are_named(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        settings_of(text)


def check(**changed: Any) -> None:
    """Check a model and a `ServerArgs` that are served, with some values replaced."""
    kinds = {"is_recurrent": False, "is_window": False, "is_sparse": False, "sizes_late": False}
    args: dict[str, Any] = {
        **dict.fromkeys(("tp_size", "pp_size", "dp_size", "dcp_size", "attn_cp_size", "ep_size"), 1),
        **dict.fromkeys(("speculative_algorithm", "radix_cache_backend", "dllm_algorithm")),
        **dict.fromkeys(("enable_hierarchical_cache", "enable_hisparse", "enable_lmcache", "enable_flexkv"), False),
        **dict.fromkeys(("enable_streaming_session", "enable_session_radix_cache", "enable_memory_saver"), False),
        **dict.fromkeys(("enable_pdmux", "enable_unified_memory", "enable_unified_cache_external_linker"), False),
        "disaggregation_mode": "null",
        "kv_cache_dtype": "auto",
        "kv_canary": "none",
        "page_size": 64,
    }
    for name, value in changed.items():
        assert name in kinds or name in args
        (kinds if name in kinds else args)[name] = value
    check_supported(SimpleNamespace(**args), **kinds)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tp_size": 2}, "an engine with --tp-size: leave it out"),
        ({"is_recurrent": True}, "Mamba or linear attention"),
        ({"is_window": True}, "sliding windows apart: add --disable-hybrid-swa-memory"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "set --kv-cache-dtype to auto"),
        ({"sizes_late": True}, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        ({"page_size": 1}, "needs --page-size of at least 16"),
    ],
)
def test_other_engines_are_refused_by_a_sentence(change: dict[str, Any], said: str) -> None:
    check(page_size=16, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(InvalidRequest, match=f"^membroker.kv.sglang .*{said}"):
        check(**change)


def test_the_plugin_does_nothing_without_its_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is installed wherever the library is, and SGLang would start without it if it raised."""
    monkeypatch.setitem(__import__("sys").modules, "membroker.kv.sglang.hooks", None)  # cannot be imported
    monkeypatch.delenv(VARIABLE, raising=False)
    plugin.register()
    assert not caplog.records
    monkeypatch.setenv(VARIABLE, "{}")
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert "membroker cannot extend this SGLang" in caplog.text
