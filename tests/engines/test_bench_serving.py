"""`make bench-serving` in small: real vLLM, its CPU build, over a real broker. No time is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.sizes import MIB

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
SECONDS = 500
SMALL = ["--device", "host", "--time", "0.05", "--load", "0.3", "--drain", "60"]


def test_three_engines_over_a_broker_answer_as_one_alone(tmp_path: Path) -> None:
    """Ramps that overlap. Every request is answered, the sample's tokens are plain vLLM's, and the memory goes."""
    file = tmp_path / "figures.json"
    command = ["--arms", "alone", "membroker", "--json", str(file), "--logs", str(tmp_path / "logs"), *SMALL]
    path = os.pathsep.join([str(ROOT / "client"), str(ROOT / "broker"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving", *command],
        env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    alone, ours = json.loads(file.read_text())["runs"]
    assert [(run["arm"], len(run["models"])) for run in (alone, ours)] == [("alone", 1), ("membroker", 3)]
    assert min(ours["cache_tokens"]) == alone["cache_tokens"][0], "the caches are not equally large"
    for run in (alone, ours):
        for one in run["models"]:
            assert one["requests"] > 0
            assert (one["unfinished"], one["wrong"]) == (0, 0), one
    borrowed = [one["borrowed"] for one in ours["samples"]]
    for model, figures in enumerate(ours["models"]):
        assert max(each.get(f"m{model}", 0) for each in borrowed) >= figures["peak_bytes"] > 0
        assert 0 < figures["idle_bytes"] <= 16 * MIB, "the engine has not released what it borrowed"
    for arm in ("alone", "membroker"):
        assert f"\n{arm} " in done.stdout
