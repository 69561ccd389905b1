"""What `--kv-transfer-config` may say, and the engines that are refused at the start. It needs no vLLM."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from membroker import InvalidRequest
from membroker.kv.vllm import last_line
from membroker.kv.vllm.settings import (
    UNI,
    VllmSettings,
    check_cache,
    check_supported,
    endpoint_of,
    settings_in,
    settings_of,
)
from membroker.types import Available


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"limits": "8GiB"}, "has 'limits', and membroker knows: model, limit, floor"),
        ({"floor": "8 gigs"}, "floor: "),
        ({"weights": "lent"}, "weights is own or borrowed, not 'lent'"),
        ({"keep_pinned": True}, "keep_pinned is for borrowed weights"),
        ({"endpoint": ["/run/a", ""]}, "endpoint is a directory, or a list"),
    ],
)
def test_wrong_settings_are_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        settings_of(extra)


def test_the_settings_of_one_connector_of_several_are_found() -> None:
    """The worker reads them before there is a connector."""
    own = {"kv_connector": "Membroker", "kv_connector_extra_config": {"weights": "borrowed", "declare": "auto"}}
    expected = VllmSettings(weights="borrowed", declare="auto")
    several = {"connectors": [{"kv_connector": "Empty", "kv_connector_extra_config": {"other": 1}}, own]}
    assert settings_in(SimpleNamespace(**own)) == expected
    assert settings_in(SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=several)) == expected
    assert settings_in(None) == VllmSettings()


@pytest.mark.parametrize(
    ("limit", "bounds", "besides", "said"),
    [
        (12, {}, 4, None),
        (13, {}, 5, "needs 8 bytes of KV cache, and 'chat' may borrow 7 beside 5 for other memory: lower --max-model"),
        (None, {"floor": 12}, 0, None),
        (None, {"floor": 13}, 0, "a floor of 13 bytes can never be reached: 'chat' may borrow 12"),
        (11, {"floor": 11}, 2, "a floor of 11 bytes can never be reached: 'chat' may borrow 9 beside 2"),
    ],
)
def test_bounds_that_the_limits_rule_out(
    limit: int | None, bounds: dict[str, Any], besides: int, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker has 16 bytes, and lends 12 of them to the tenant and `limit` to this model.

    The longest request needs 8. These are guaranteed, if the model's weights do not use some of them.
    """
    available = Available(now_bytes=0, limit_bytes=limit, guarantee_bytes=8, tenant_limit_bytes=12)
    model: Any = SimpleNamespace(name="chat", available=lambda: available)
    client: Any = SimpleNamespace(capacities={"device": 16})
    with nullcontext() if said is None else pytest.raises(InvalidRequest, match=said):
        settings_of(bounds).check_fits(8, 32, client, model, "--max-model-len", logging.getLogger(), besides=besides)
    assert ("long requests wait" in caplog.text) == (said is None and besides > 0)


def test_each_rank_has_an_endpoint() -> None:
    """Of a list each takes its own, and otherwise all take the same one."""
    listed = settings_of({"endpoint": ["/run/a", "/run/b"]}).endpoint
    ranks = [SimpleNamespace(rank=rank, world_size=2) for rank in range(2)]
    assert [endpoint_of(listed, rank) for rank in ranks] == ["/run/a", "/run/b"]
    assert {endpoint_of("/run/a", rank) for rank in ranks} == {"/run/a"}
    assert endpoint_of(None, ranks[0]) is None
    with pytest.raises(InvalidRequest, match="endpoint lists 2 directories, and this engine has 1 ranks"):
        endpoint_of(listed, SimpleNamespace(rank=0, world_size=1))


SWAP_BESIDE_ANOTHER = {
    "kv_connector": "MultiConnector",
    "is_kv_consumer": False,
    "is_kv_producer": True,
    "kv_connector_extra_config": {
        "connectors": [{"kv_connector": "Membroker", "kv_connector_extra_config": {"swap_space": "1GiB"}}]
    },
}


SWAP = {"kv_transfer_config__kv_connector_extra_config": {"swap_space": "1GiB"}}
BORROWED = {"kv_transfer_config__kv_connector_extra_config": {"weights": "borrowed"}}


def a_config(**other: Any) -> Any:
    """A `VllmConfig` that is served, with some values replaced: `parallel_config__world_size=2`."""
    config: Any = {
        "parallel_config": {
            "world_size": 1,
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "nnodes": 1,
            "distributed_executor_backend": "uni",
        },
        "kv_transfer_config": {
            "kv_connector": "Membroker",
            "is_kv_consumer": False,
            "is_kv_producer": True,
            "kv_connector_extra_config": {},
        },
        "model_config": {
            "is_hybrid": False,
            "is_attention_free": False,
            "is_encoder_decoder": False,
            "quantization": None,
            "enable_sleep_mode": False,
            "enable_cumem_allocator": False,
        },
        "load_config": {"load_format": "auto"},
        "lora_config": None,
        "speculative_config": None,
        "ec_transfer_config": None,
        "attention_config": {"hisparse_config": None},
    }
    for name, value in other.items():
        part, _, key = name.partition("__")
        if key:
            config[part][key] = value
        else:
            config[part] = value
    return SimpleNamespace(**{k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in config.items()})


REFUSED: Mapping[str, Any] = {
    "pipeline, data or context parallelism": {"parallel_config__world_size": 2},
    "several nodes": {"parallel_config__nnodes": 2},
    "executors other than `uni` and `mp`": {"parallel_config__distributed_executor_backend": "ray"},
    "cascade attention (`--no-disable-cascade-attn`, in vLLM 0.31)": {"model_config__disable_cascade_attn": False},
    "encoder-decoder models": {"model_config__is_encoder_decoder": True},
    "engines that only encode": {"ec_transfer_config": SimpleNamespace(is_ec_consumer=False)},
    "a KV cache in host memory (HiSparse)": {"attention_config__hisparse_config": object()},
    "vLLM's sleep mode": {"model_config__enable_sleep_mode": True},
}
SERVED: Mapping[str, Any] = {
    "full attention": {},
    "sliding window, beside full attention": {},
    "MLA": {"model_config__use_mla": True},
    "recurrent states (Mamba, GDN), beside attention": {"model_config__is_hybrid": True},
    "FP8 KV cache": {"cache_config": {"cache_dtype": "fp8"}},
    "speculative decoding, MTP": {"speculative_config": object()},
    "LoRA": {"lora_config": object()},
    "quantized weights": {"model_config__quantization": "fp8"},
}


def test_the_table_of_models_is_what_the_code_refuses() -> None:
    """docs/vllm.md says of each kind of model and engine whether it is served, and whether with `swap_space`."""
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    table = page[page.index("| what | served | tested |") :].split("\n\n")[0].splitlines()[2:]
    rows = {what.strip(): served.strip() for _, what, served, _, _ in (line.split("|") for line in table)}

    def is_refused(other: Any, more: Any = MappingProxyType({})) -> bool:
        try:
            check_supported(a_config(**{**other, **more}))
        except InvalidRequest:
            return True
        return False

    assert rows == {
        what: "no" if is_refused(other) else "without `swap_space`" if is_refused(other, SWAP) else "yes"
        for what, other in {**SERVED, **REFUSED}.items()
    }
    assert {what for what, served in rows.items() if served == "no"} == set(REFUSED)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"parallel_config__data_parallel_size": 2}, "tensor parallelism only"),
        ({"kv_transfer_config__is_kv_producer": False}, '"kv_role": "kv_producer"'),
        ({"kv_transfer_config__is_kv_consumer": True}, "preempts many requests at once"),
        ({"kv_transfer_config": SWAP_BESIDE_ANOTHER}, "swap_space beside another connector"),
        ({**SWAP, "speculative_config": object()}, "swap_space with speculative decoding"),
        ({**SWAP, "model_config__is_attention_free": True}, "swap_space for models with recurrent states"),
        ({**BORROWED, "load_config__load_format": "membroker"}, "which are in the books already"),
        ({**BORROWED, "model_config__quantization": "fp8"}, "borrows no quantized weights"),
        ({**BORROWED, "lora_config": object()}, "borrows no weights with LoRA"),
        ({"model_config__enable_cumem_allocator": True}, "sleep mode"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused_in_a_sentence(other: dict[str, Any], said: str) -> None:
    """Of what the page's table does not have."""
    check_supported(a_config(parallel_config__distributed_executor_backend=UNI))
    check_supported(a_config(ec_transfer_config=SimpleNamespace(is_ec_consumer=True)))
    check_supported(a_config(**BORROWED))
    check_supported(a_config(parallel_config__world_size=2, parallel_config__tensor_parallel_size=2))
    with pytest.raises(InvalidRequest, match=f"membroker.kv.vllm .*{said}"):
        check_supported(a_config(**other))


@pytest.mark.parametrize(
    ("spec", "layout", "said"),
    [
        (None, "BLNHC", "a model without a KV cache"),
        ({"has_layer_views": False}, "BLNHC", "its layers lay out by themselves"),
        ({}, "LHBNC", "the layout LHBNC: leave VLLM_KV_CACHE_LAYOUT out"),
    ],
)
def test_a_cache_whose_blocks_are_elsewhere_is_refused(spec: Any, layout: str, said: str) -> None:
    def check(layout: str, *specs: Any) -> None:
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(**one)) for one in specs]
        check_cache(SimpleNamespace(kv_cache_groups=groups, kv_cache_layout=layout))

    one = {"has_layer_views": True}
    check("LBHNC", one, one)
    with pytest.raises(InvalidRequest, match=said):
        check(layout, *([] if spec is None else [one, {**one, **spec}]))


def test_a_file_that_is_none_of_it_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's process has ended, and another one has its pid: the variable leads to a file of that one."""
    file = tmp_path / "data"
    file.write_text("data")
    with file.open() as opened:
        monkeypatch.setenv(last_line.VARIABLE, f"/proc/{os.getpid()}/fd/{opened.fileno()}")
        last_line.tell(InvalidRequest("no"))
    assert file.read_text() == "data"
