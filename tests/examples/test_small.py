"""The programs that show one thing each, run as their reader would run them, and read by type checkers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.template import run as run_python

from membroker.safetensors import write_index

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LEAST_SCORE = 0.95
"""Of the public names, how many a type checker is to know the types of."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running({"capacity": "256MiB", "host_capacity": "64MiB"}) as one:
        yield one


def run(daemon: Daemon, name: str, *arguments: str, imports: list[str] | None = None) -> str:
    """Run an example, and return what it wrote; it ends well, without a complaint, and leaves nothing."""
    environment = {**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint())}
    done = run_python([str(EXAMPLES / name), *arguments], imports=imports or [], env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    until(lambda: not daemon.sessions() and not any(books.lent_bytes for books in daemon.device().locations))
    return done.stdout


def test_a_version_takes_over(daemon: Daemon, tmp_path: Path) -> None:
    header, index = write_index({"a": ("F32", (3,)), "b": ("U8", (5,))})
    (tmp_path / "model.safetensors").write_bytes(header + bytes(index.size - len(header)))
    assert run(daemon, "reload.py", str(tmp_path)) == (
        "loaded 17 bytes\ncurrent.version-1 has 2 tensors\nthen current.version-2\n"
    )


def test_tensors_within_a_limit(daemon: Daemon) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    said = run(daemon, "tensors.py", imports=["torch"])
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


@pytest.mark.deep
def test_mypy_accepts_the_examples(tmp_path: Path) -> None:
    mypy = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--cache-dir", tmp_path]
    done = subprocess.run([*mypy, *EXAMPLES.glob("*.py")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class TestPyright:
    """As a program's author has it: the library is installed, and another checker than ours reads it."""

    pytestmark = pytest.mark.deep

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """A directory whose environment has the library, as a copy, and what it needs."""
        pytest.importorskip("pyright", reason="pyright is not installed here: pip install 'pyright[nodejs]'")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
        (site,) = tmp_path.glob("venv/lib/python3*/site-packages")
        shutil.copytree(ROOT / "client" / "membroker", site / "membroker", ignore=shutil.ignore_patterns("__pycache__"))
        (site / "more.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
        shutil.copytree(EXAMPLES, tmp_path / "examples")
        settings = {
            "venvPath": ".",
            "venv": "venv",
            "reportMissingImports": False,
            "include": ["examples"],
        }  # transformers
        (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
        return tmp_path

    def pyright(self, place: Path, *arguments: str) -> str:
        command = [sys.executable, "-m", "pyright", *arguments]
        environment = {**os.environ, "PATH": f"{place}/venv/bin:{os.environ['PATH']}"}
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        return done.stdout

    def test_it_accepts_the_examples(self, place: Path) -> None:
        said = self.pyright(place)
        assert "0 errors" in said, said

    def test_it_knows_the_types_of_the_library(self, place: Path) -> None:
        said = json.loads(self.pyright(place, "--ignoreexternal", "--outputjson", "--verifytypes", "membroker"))
        assert said["typeCompleteness"]["completenessScore"] > LEAST_SCORE
