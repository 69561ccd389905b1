"""`make bench-serving` in small: real vLLM, its CPU build, over a real broker. No time is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.sizes import MIB
from tests.support.vllm_engine import BUILDS

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
SECONDS = 500
SMALL = ["--time", "0.05", "--load", "0.2", "--drain", "60"]


def benchmark(tmp_path: Path, module: str, *arguments: str) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """Run a benchmark, and return what it wrote and how it ended."""
    path = os.pathsep.join([str(ROOT / "client"), str(ROOT / "broker"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", module, "--device", "host", *arguments, "--json", str(tmp_path / "figures.json")],
        env={**os.environ, **BUILDS["cpu"].environment, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((tmp_path / "figures.json").read_text()), done


def test_three_engines_over_a_broker_answer_as_one_alone(tmp_path: Path) -> None:
    """Ramps that overlap, then turns: all is answered, the sample has plain vLLM's tokens, and the memory goes."""
    played = ("--arms", "alone", "membroker", "--traces", "a2", "t3", "--engine", "max_num_batched_tokens=1500")
    found, done = benchmark(tmp_path, "benchmarks.serving", *played, *SMALL, "--logs", str(tmp_path / "logs"))
    runs = found["runs"]
    assert [(run["trace"], run["arm"], len(run["models"])) for run in runs] == [
        *(("a2", "alone", 1), ("t3", "alone", 1)),
        *(("a2", "membroker", 3), ("t3", "membroker", 3)),
    ]
    for run in runs:
        assert set(run["cache_tokens"]) == set(runs[0]["cache_tokens"]), "the caches are not equally large"
        for one, told in zip(run["models"], run["told"], strict=True):
            assert one["requests"] > 0
            assert (one["unfinished"], one["wrong"]) == (0, 0), one
            assert one["same"][0] == one["same"][1], "answers under load are not plain vLLM's"
            assert all(answer["due"] <= answer["first"] <= answer["last"] for answer in told["answers"])
    texts = [text for sample in runs[0]["tokens"][0] for text in sample]
    assert all(len(set(text)) > len(text) / 2 for text in texts), "the answers repeat themselves: what do they show?"
    for run in runs[2:]:
        borrowed = [one["borrowed"] for one in run["samples"]]
        for model, figures in enumerate(run["models"]):
            assert max(each.get(f"m{model}", 0) for each in borrowed) >= figures["peak_bytes"] > 0
    assert all(0 < one["idle_bytes"] <= 16 * MIB for one in runs[2]["models"]), "memory was not released"
    for arm in ("alone", "membroker"):
        assert f"\n{arm} " in done.stdout
    logs = [path.read_text() for path in (tmp_path / "logs").glob("*-m?.log")]
    assert ["max_num_batched_tokens=1500" in log for log in logs] == [True] * 4


def test_sleep_is_timed_over_a_broker(tmp_path: Path) -> None:
    """One round with the weights kept: what is released comes back, with the same tokens."""
    found, done = benchmark(tmp_path, "benchmarks.serving.sleep", "--ways", "vllm", "kept", "--rounds", "1")
    assert "vllm is left out" in done.stderr
    row = found["rows"]["kept"]
    assert min(row["released_bytes"]) >= 20 * MIB
    assert 0 < max(row["left_bytes"]) < 20 * MIB, "the weights were to stay, and nothing else"
    assert len(row["wake_seconds"]) == len(row["request_seconds"]) == 1
