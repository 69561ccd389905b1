"""vLLM's HTTP server with the flags of docs/vllm.md: two models that trade memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.ports import reserved_port
from tests.support.sizes import MIB
from tests.support.vllm_engine import BUILDS, write_model, write_plugins

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")
from vllm.platforms import current_platform

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not current_platform.is_cpu(), reason="for vLLM's CPU build"),
]

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
CPU = BUILDS["cpu"]
HERE = (
    *("--kv-cache-memory-bytes", "512M"),  # the CPU build wants as much real memory as it is told
    *("--max-model-len", "1024", "--max-num-seqs", "16", "--dtype", "float32", "--block-size", "32"),
    *("--skip-tokenizer-init", "--enforce-eager", "--disable-uvicorn-access-log"),
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
)
"""Flags besides the page's, for a small model without a tokenizer, on a CPU."""
PROMPTS = [[3 + (7 * i + j) % 500 for j in range(500)] for i in range(16)]
BURST = 16 * 548 * CPU.token_bytes


def flags_of_the_page() -> list[str]:
    text = PAGE.read_text()
    array = text[text.index("elastic=(") : text.index("\n\n", text.index("elastic=("))]
    done = subprocess.run(
        ["bash", "-c", array + '\nprintf "%s\\n" "${elastic[@]}"'], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


class Server:
    """`vllm serve`, whose command line wants a package of the name vllm, which the CPU build has not."""

    def __init__(self, model: Path, name: str, daemon: Daemon, *more: str) -> None:
        self.name = name
        self._port = reserved_port()
        environment = {
            **os.environ,
            **CPU.environment,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "MEMBROKER_ENDPOINT": str(daemon.endpoint("serving")),
            "PYTHONPATH": os.pathsep.join([str(write_plugins(model / f"plugins-{name}")), os.environ["PYTHONPATH"]]),
        }
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        mine = ["--model", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(self._port)]
        self._log = daemon.directory / f"log-{name}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*server, *mine, *flags_of_the_page(), *HERE, *more],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def log(self) -> str:
        return self._log.read_text()

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log()[-5000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                return True
        except OSError:  # also a server that listens, and is too busy to answer
            return False

    def complete(self, prompt: list[int]) -> Any:
        body = {"model": self.name, "prompt": prompt, "max_tokens": 48, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps({**body, "return_token_ids": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def burst(self) -> list[Any]:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(self.complete, PROMPTS))


@contextmanager
def served(model: Path, name: str, daemon: Daemon, *more: str) -> Iterator[Server]:
    server = Server(model, name, daemon, *more)
    try:
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGTERM)
        try:
            server.process.wait(DEADLINE_SECONDS)
        finally:
            if server.process.poll() is None:
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()


def test_two_models_of_the_page_trade_memory(tmp_path: Path) -> None:
    """One serves a burst that needs most of the memory, and keeps its prefixes. The other one's burst gets its share.

    Both answer alike, because they are the same model.
    """
    models = {"chat": {"guarantee": "24MiB"}, "code": {"guarantee": "24MiB"}}
    config = {"capacity": "128MiB", "tenants": {"serving": {"models": models}}}
    model = write_model(tmp_path)
    with running(config) as daemon, served(model, "chat", daemon) as chat, served(model, "code", daemon) as code:
        for server in (chat, code):
            until(server.is_up, 300)

        def books(name: str) -> Any:
            (found,) = (one.books[0] for one in daemon.models() if one.name.endswith(f"/{name}"))
            return found

        expected = chat.burst()
        while books("chat").used_bytes < BURST:  # cached prefixes stay while nobody needs the memory
            assert chat.burst() == expected
        assert code.burst() == expected
        while books("code").peak_bytes <= 48 * MIB:  # more than what was free, and its guarantee
            assert code.burst() == expected
        assert books("chat").used_bytes < BURST
        assert code.complete(PROMPTS[3]) == chat.complete(PROMPTS[3])


BOTH = '{"kv_connector":"Membroker","kv_role":"kv_both"}'
NO_SETTING = '{"kv_connector":"Membroker","kv_role":"kv_producer","kv_connector_extra_config":{"limits":"1GiB"}}'
NOT_SERVED = 'membroker: membroker.kv.vllm needs "kv_role": "kv_producer" in --kv-transfer-config. '


@pytest.mark.parametrize(
    ("more", "is_loaded", "said"),
    [
        (("--kv-transfer-config", BOTH, "--worker-cls", "membroker.kv.vllm.Worker"), False, NOT_SERVED),
        (
            ("--kv-transfer-config", NO_SETTING),
            True,
            "membroker: kv_connector_extra_config has 'limits', and membroker",
        ),
    ],
    ids=["as membroker run starts it", "by hand"],
)
def test_the_last_line_says_why_an_engine_is_not_served(
    more: tuple[str, ...], is_loaded: bool, said: str, tmp_path: Path
) -> None:
    """vLLM's processes write dozens of lines after the reason. With the worker class it comes before the weights."""
    model = write_model(tmp_path)
    with running({"tenants": {"serving": {}}}) as daemon, served(model, "chat", daemon, *more) as server:
        assert server.process.wait(300) != 0
        *_, last = server.log().splitlines()
        assert last.startswith(said), server.log()[-3000:]
        assert ("Loading weights took" in server.log()) == is_loaded
