"""vLLM's own parser takes what `membroker run` adds to its command, and finds the classes that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from membroker.kv import command

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname

import membroker.kv.vllm


def parsed(*words: str) -> object:
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(
        [*words, *command.vllm(words, 60 << 30)[0]]
    )


def test_the_options_are_vllms() -> None:
    given = parsed("--served-model-name", "chat", "--gpu-memory-util", "0.5", "--kv_transfer_config.kv_role", "kv_both",
                   "--kv-transfer-config.kv_connector=Membroker")  # fmt: skip
    assert (given.kv_cache_memory_bytes, given.gpu_memory_utilization) == (60 << 30, 0.5)
    assert given.kv_transfer_config.kv_role == "kv_both"
    assert resolve_obj_by_qualname(given.worker_cls) is membroker.kv.vllm.Worker
    given = parsed("--served-model-name", "chat")
    assert given.gpu_memory_utilization == 0.05
    assert KVConnectorFactory.get_connector_class(given.kv_transfer_config) is membroker.kv.vllm.Membroker


def test_the_compose_file_has_options_of_vllms() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip install pyyaml)")
    compose = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "compose.yaml").read_text())
    for name in ("chat", "code"):
        _, *options = compose["services"][name]["command"]
        given = parsed(*options)
        assert (given.served_model_name, given.max_model_len) == ([name], 32768)
