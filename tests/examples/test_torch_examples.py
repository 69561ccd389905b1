"""The examples for PyTorch, run as their reader would run them, against a real daemon on the host driver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.examples.conftest import Run

pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")

pytestmark = [pytest.mark.deep, pytest.mark.shared_daemon]

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def test_the_blocks_of_the_page_run(run: Run, tmp_path: Path) -> None:
    """The ones for PyTorch that need no GPU, one after the other, in one process."""
    section = PAGE.read_text().split("\n## PyTorch\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    runnable = [block for block in blocks if "TorchMemory" not in block]
    assert (len(blocks), len(runnable)) == (3, 2)
    page = tmp_path / "torch_page.py"
    page.write_text("\n".join(runnable))
    assert run(str(page)) == ["(1, 3, 64)"]


def test_training_inside_a_limit(run: Run) -> None:
    """It learns, its gradients are borrowed, and the refusal is a sentence that it survives."""
    trained, gradients, refused, on = run("torch_training.py")
    first, last = trained.removeprefix("loss ").split(";")[0].split(" to ")
    assert float(last) < float(first) / 2
    assert gradients == "every gradient is in borrowed memory: True"
    assert "may hold 256.0 MiB" in refused
    assert on.startswith("training goes on")


def test_two_serve_in_turns(run: Run) -> None:
    """The second is refused until the first releases; at the end the memory has changed hands."""
    *served, refused, then, at_last = run("torch_turns.py")
    assert served == ["worker 1 serves with 16 MiB", "worker 1 serves with 32 MiB"]
    assert refused.startswith("worker 2 is refused: the model tenants/red/models/turns may hold 32.0 MiB")
    assert (then, at_last) == ("worker 2 serves with 16 MiB", "worker 2 serves with 32 MiB")


def test_many_workers_with_weights_that_stand_once(run: Run) -> None:
    """Three processes over the same bytes answer as the one that has its own."""
    alike, charged = run("torch_shared_weights.py")
    assert alike.startswith("3 of 3 workers answer ")
    assert charged == "the model is charged 2 MiB, once for all"


def test_a_transformers_model_generates_in_borrowed_memory(run: Run) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed here: pip install transformers")
    (line,) = run("transformers_torch_memory.py")
    assert line == "2 MiB are borrowed; the same tokens: True"
