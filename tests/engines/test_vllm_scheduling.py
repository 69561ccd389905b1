"""vLLM's own scheduler over an elastic cache, short of memory: it preempts no more than over memory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.daemons import running

import membroker

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")
from tests.support.vllm_scheduling import BLOCK, Scheduling

LIMIT = 80 << 20
REQUESTS = 128, 1024, 256
"""About eight times as many as have room, of so many tokens each, with so long answers."""


def test_a_full_cache_preempts_as_plain_vllm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps overlap on a GPU. A connector that consumes makes vLLM preempt until a whole step is over."""
    plain = Scheduling(tmp_path, monkeypatch, blocks=LIMIT // BLOCK)
    plain.serve(*REQUESTS)
    assert plain.preemptions > 10, "the requests fit: nothing is shown"
    with running({"capacity": 2 * LIMIT}) as daemon, membroker.connect(daemon.endpoint()) as client:
        elastic = Scheduling(tmp_path, monkeypatch, model=client.register_model("chat", limit=LIMIT))
        elastic.serve(*REQUESTS)
        elastic.cache.close()
    print(f"preemptions: {plain.preemptions} plain, {elastic.preemptions} elastic")
    assert elastic.preemptions < 2 * plain.preemptions
    assert elastic.tokens < 1.2 * plain.tokens


def test_one_step_preempts_all_that_a_recall_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with long prompts takes half a second, so a request in each step would be too slow."""
    with running({"capacity": 2 * LIMIT}) as daemon, membroker.connect(daemon.endpoint()) as client:
        elastic = Scheduling(tmp_path, monkeypatch, model=client.register_model("chat", limit=LIMIT))
        elastic.add(*REQUESTS)
        while elastic.cache.stats().charged_bytes < LIMIT:
            assert elastic.step()
        before = elastic.preemptions
        while elastic.preemptions == before:  # then all blocks are in use
            assert elastic.step()
        before = elastic.preemptions
        elastic.cache.shrink(LIMIT // 2)
        while elastic.preemptions == before:  # until a request fills a block
            assert elastic.step()
        print(f"{elastic.preemptions - before} requests were preempted")
        assert elastic.preemptions - before >= 4
        elastic.cache.close()
