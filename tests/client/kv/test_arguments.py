"""What `membroker run` adds to the command of an engine: what it lacks, and nothing that the user has given."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from membroker import InvalidRequest
from membroker.cli.engines import engine_of
from membroker.kv import command as engines
from membroker.kv.sglang.settings import VARIABLE, SglangSettings, settings_of

OURS = ["--kv-transfer-config", "--worker-cls", "--kv-cache-memory-bytes", "--gpu-memory-utilization"]
OTHER = '{"kv_connector":"LMCacheConnector","kv_role":"kv_both"}'


@pytest.mark.parametrize(
    ("command", "engine"),
    [
        ("vllm serve Qwen/Qwen3-8B --port 8001", "vllm"),
        ("/opt/vllm/bin/vllm serve Qwen/Qwen3-8B", "vllm"),
        ("python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B", "vllm"),
        ("python -m sglang.launch_server --model-path Qwen/Qwen3-8B", "sglang"),
        ("sglang serve --model-path Qwen/Qwen3-8B", "sglang"),
        ("vllm bench serve", None),
        ("python -m vllm.other", None),
        ("", None),
    ],
)
def test_the_command_says_which_engine_it_starts(command: str, engine: str | None) -> None:
    assert engine_of(command.split()) == engine


def test_vllm_gets_what_it_lacks() -> None:
    words, variables = engines.vllm(["vllm", "serve", "m"], 60 << 30)
    assert words[::2] == OURS
    values = dict(zip(words[::2], words[1::2], strict=True))
    assert json.loads(values["--kv-transfer-config"])["kv_connector"] == "Membroker"
    assert values["--kv-cache-memory-bytes"] == str(60 << 30)
    assert not variables


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ("--kv_cache_memory_bytes=8G", "--kv-cache-memory-bytes"),
        ("--kv-cache-mem 8G", "--kv-cache-memory-bytes"),
        ("--worker-cls mine.Worker", "--worker-cls"),
        ("""--kv-transfer-config '{"kv_connector":"Membroker"}'""", "--kv-transfer-config"),
        ("--kv-transfer-config.kv_connector Membroker --kv-transfer-config.kv_role=kv_both", "--kv-transfer-config"),
    ],
)
def test_what_the_user_gives_stays(given: str, flag: str) -> None:
    words, _ = engines.vllm(["vllm", "serve", "m", *shlex.split(given)], 1 << 30)
    assert words[::2] == [name for name in OURS if name != flag]


def test_another_connector_is_an_error() -> None:
    """With it the KV cache would be vLLM's own: no memory would be shared, and nothing would say so."""
    for given in (["--kv-transfer-config", OTHER], [f"--kv-transfer-config={OTHER}"]):
        with pytest.raises(InvalidRequest, match="names another connector"):
            engines.vllm(["vllm", "serve", "m", *given, "--port", "1"], 1 << 30)


def test_what_is_in_the_file_of_config_is_given(tmp_path: Path) -> None:
    """vLLM lets the command line win over the file, so what is in the file is not added again."""
    file = tmp_path / "vllm.yaml"
    command = ["vllm", "serve", "--config", str(file)]
    assert engines.vllm(command, 1)[0][::2] == OURS, "vLLM says that there is no such file"
    file.write_text(
        "model: m  # kv-transfer-config: none\n"
        "# worker-cls: mine.Worker\n"
        "kv_cache_memory_bytes: 8G\n"
        "kv-transfer-config:\n"
        "  # nested\n"
        "  kv_connector: Membroker\n"
        "  worker-cls: 7\n"
        "port: 8001\n"
    )
    assert engines.vllm(command, 1)[0][::2] == ["--worker-cls", "--gpu-memory-utilization"]
    file.write_text("kv-transfer-config:\n  kv_connector: Other\nserved-model-name: Membroker\n")
    with pytest.raises(InvalidRequest, match="names another connector"):
        engines.vllm(command, 1)


def test_sglang_gets_what_it_lacks() -> None:
    words, variables = engines.sglang(["sglang", "serve"], 1 << 30)
    assert words == ["--page-size", "64"]
    assert settings_of(variables[VARIABLE]) == SglangSettings(capacity=1 << 30)
    assert engines.sglang(["sglang", "serve", "--page-size=32"], 1)[0] == []
