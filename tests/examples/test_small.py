"""The programs that show one thing each, run as their reader would run them, and read by type checkers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.examples.conftest import EXAMPLES, Run
from tests.support.daemons import Daemon, running

from membroker.safetensors import write_index

ROOT = Path(__file__).parents[2]
LEAST_SCORE = 0.95
"""Of the public names, how many a type checker is to know the types of."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running({"capacity": "256MiB", "host_capacity": "64MiB"}) as one:
        yield one


def test_a_version_takes_over(run: Run, tmp_path: Path) -> None:
    header, index = write_index({"a": ("F32", (3,)), "b": ("U8", (5,))})
    (tmp_path / "model.safetensors").write_bytes(header + bytes(index.size - len(header)))
    said = run("reload.py", str(tmp_path))
    assert said == ["loaded 17 bytes", "current.version-1 has 2 tensors", "then current.version-2"]


def test_tensors_within_a_limit(run: Run) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    said = "\n".join(run("tensors.py"))
    for line in (
        "one tensor: 4 MiB",
        "four in a pool: 8 MiB",
        "refused: ",
        "for now at most 16,777,216 bytes",
        "asleep: 0 MiB on the device",
        "awake: the last tensor has 3",
        "|PPPP|",
    ):
        assert line in said


def test_every_block_of_the_page_on_virtual_memory_runs(run: Run, tmp_path: Path) -> None:
    """One after the other, in one process, which forgets nothing."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "vmm.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    page = tmp_path / "vmm_page.py"
    page.write_text("\n".join(blocks))
    said = ["b'bytes'", "b'first' b'ov' 3", "b'first' 1", "b'one'", "EACCES", "b'over both' b'over'", "EACCES"]
    assert run(str(page)) == [*said, "2 True Read"]


@pytest.mark.deep
def test_mypy_accepts_the_examples(tmp_path: Path) -> None:
    mypy = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--cache-dir", tmp_path]
    done = subprocess.run([*mypy, *EXAMPLES.glob("*.py")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.deep
def test_pyright_accepts_the_examples_and_knows_the_types_of_the_library(tmp_path: Path) -> None:
    """As a program's author has it: the library is installed, as a copy, and another checker than ours reads it."""
    pytest.importorskip("pyright", reason="pyright is not installed here: pip install 'pyright[nodejs]'")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = tmp_path.glob("venv/lib/python3*/site-packages")
    shutil.copytree(ROOT / "client" / "membroker", site / "membroker", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "more.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    settings = {"venvPath": ".", "venv": "venv", "reportMissingImports": False, "include": ["examples"]}  # transformers
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    environment = {**os.environ, "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}"}

    def pyright(*arguments: str) -> str:
        command = [sys.executable, "-m", "pyright", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        ).stdout

    said = pyright()
    assert "0 errors" in said, said
    types = json.loads(pyright("--ignoreexternal", "--outputjson", "--verifytypes", "membroker"))
    assert types["typeCompleteness"]["completenessScore"] > LEAST_SCORE
