"""What `--kv-transfer-config` may say, and the engines that are refused at the start. It needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import membroker.kv.vllm
from membroker import InvalidRequest
from membroker.kv.vllm.settings import UNI, Settings, check_cache, check_supported, settings_of


def test_settings_have_the_names_of_the_library() -> None:
    assert settings_of({}) == Settings()
    found = settings_of({"model": "chat", "limit": "8GiB", "floor": 1 << 30, "ceiling": "16GiB", "keep": 0})
    assert found == Settings(model="chat", limit="8GiB", floor=1 << 30, ceiling="16GiB", keep=0)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"limits": "8GiB"}, "has 'limits', and membroker knows: model, limit, floor"),
        ({"model": 7}, "the name of a model is text"),
        ({"floor": "8 gigs"}, "floor: "),
        ({"limit": -1}, "limit"),
        ({"layout": "blocks"}, "layout is block-major or layer-major, not 'blocks'"),
    ],
)
def test_wrong_settings_are_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        settings_of(extra)


def a_config(**other: Any) -> Any:
    """A `VllmConfig` that is served, with some values replaced: `parallel_config__world_size=2`."""
    config: Any = {
        "parallel_config": {"world_size": 1, "data_parallel_size": 1, "distributed_executor_backend": "uni"},
        "kv_transfer_config": {"is_kv_consumer": True, "is_kv_producer": True},
        "model_config": {
            "use_mla": False,
            "is_encoder_decoder": False,
            "enable_sleep_mode": False,
            "enable_cumem_allocator": False,
        },
        "speculative_config": None,
        "cache_config": {"cache_dtype": "auto"},
        "scheduler_config": {"watermark": 0.0},
    }
    for name, value in other.items():
        part, _, key = name.partition("__")
        if key:
            config[part][key] = value
        else:
            config[part] = value
    return SimpleNamespace(**{k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in config.items()})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"parallel_config__world_size": 2}, "one GPU per engine"),
        ({"parallel_config__data_parallel_size": 2}, "one GPU per engine"),
        ({"parallel_config__distributed_executor_backend": "mp"}, "--distributed-executor-backend uni"),
        ({"kv_transfer_config": None}, '"kv_role": "kv_both"'),
        ({"kv_transfer_config__is_kv_consumer": False}, '"kv_role": "kv_both"'),
        ({"model_config__use_mla": True}, "MLA"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ({"speculative_config": object()}, "speculative"),
        ({"model_config__enable_sleep_mode": True}, "sleep mode"),
        ({"model_config__enable_cumem_allocator": True}, "sleep mode"),
        ({"cache_config__cache_dtype": "fp8"}, "quantized"),
        ({"scheduler_config__watermark": 0.01}, "--watermark 0"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused_in_a_sentence(other: dict[str, Any], said: str) -> None:
    check_supported(a_config())
    check_supported(a_config(parallel_config__distributed_executor_backend=UNI))
    with pytest.raises(InvalidRequest, match=f"membroker.kv.vllm .*{said}"):
        check_supported(a_config(**other))


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


def test_a_model_with_other_attention_is_refused() -> None:
    """vLLM frees or shares blocks differently there, and that was not tested."""
    full = FullAttentionSpec(sliding_window=None, attention_chunk_size=None)

    def check(*specs: Any, stride: int = 0) -> None:
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        check_cache(SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=[SimpleNamespace(block_stride=stride)]))

    check(full)
    for specs in (
        [],
        [full, full],
        [SlidingWindowSpec(sliding_window=None, attention_chunk_size=None)],
        [FullAttentionSpec(sliding_window=512, attention_chunk_size=None)],
        [FullAttentionSpec(sliding_window=None, attention_chunk_size=512)],
    ):
        with pytest.raises(InvalidRequest, match="hybrid, sliding-window and MLA models are not supported yet"):
            check(*specs)
    with pytest.raises(InvalidRequest, match="not supported yet"):
        check(full, stride=4096)


def test_the_package_is_imported_without_vllm() -> None:
    """Its names are loaded when vLLM asks for them."""
    assert membroker.kv.vllm.__all__ == ["Membroker", "Worker"]
    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        membroker.kv.vllm.Connector
