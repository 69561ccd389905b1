"""The code in README and in the pages of docs/ runs as a reader would run it.

A block that opens with ```` ```python run ```` is run. The blocks of one page run in order, in one process, against a
daemon of its own on the host driver: MEMBROKER_ENDPOINT is set, and 1 GiB can be lent at either location. Words after
`run` are packages: a block is left out where one of them is missing. What a page says of results, it asserts.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.ports import reserved_port
from tests.support.template import run as run_python

DOCS = Path(__file__).parents[2] / "docs"
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python run\b([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """The pages with a block that runs."""
    return [page for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))) if BLOCK.search(page.read_text())]


def program(text: str) -> str:
    """The blocks of a page that can run here, each at the lines that it has in the page: tracebacks point into it."""
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        if all(importlib.util.find_spec(package) for package in block[1].split()):
            start = text.count("\n", 0, block.start(2))
            code = block[2].splitlines()
            lines[start : start + len(code)] = code
    return "\n".join(lines)


def run_page(script: Path, daemon: Daemon) -> subprocess.CompletedProcess[str]:
    """Run the blocks of a page, in a process that has imported PyTorch before if they do."""
    environment = {**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint())}
    command = ["-W", "error::ResourceWarning", str(script)]
    imports = ["torch"] if "import torch" in script.read_text() else []
    return run_python(command, 2 * DEADLINE_SECONDS, imports=imports, env=environment)


ELSEWHERE = {
    "frameworks.md": 6,  # tests/examples/test_torch_examples.py runs two; the others need a GPU
    "managed.md": 2,  # tests/client/managed/test_buffers.py
    "vmm.md": 5,  # tests/examples/test_small.py
    "engines.md": 2,  # of an engine that is not there, as in the next
    "kv.md": 5,
}
"""How many blocks of a page no test of this file runs."""


def test_no_block_is_left_out_by_mistake() -> None:
    """What is not run here is Python at least."""
    left = {
        page: re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for page in DOCS.glob("*.md")
    }
    assert {page.name: len(blocks) for page, blocks in left.items() if blocks} == ELSEWHERE
    assert (DOCS.parent / "README.md").read_text().count("```python\n") == 0
    for page, blocks in left.items():
        for block in blocks:
            compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.deep
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """From top to bottom, with nothing on stderr; at the end nothing is lent and no session is left."""
    script = tmp_path / f"{page.stem}.py"
    script.write_text(program(page.read_text()))
    with running({"capacity": "1GiB", "host_capacity": "1GiB"}) as daemon:
        done = run_page(script, daemon)
        assert (done.returncode, done.stderr) == (0, "")
        until(lambda: not any(books.lent_bytes + books.releasing_bytes for books in daemon.device().locations))
        assert not daemon.sessions()


def test_the_configuration_in_a_page_is_accepted(tmp_path: Path) -> None:
    """An operator copies it from docs/sharing.md. The daemon checks it without a GPU, and starts nothing."""
    blocks = [block for page in sorted(DOCS.glob("*.md")) for block in TOML.findall(page.read_text())]
    assert blocks
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.toml"
        path.write_text(block)
        done = run_python(["-m", "membrokerd.cli", "--config", str(path), "--check-config"])
        assert done.returncode == 0, done.stderr + block


class Machine:
    """Where a newcomer's shell runs: its environment, and a daemon that has nothing of this machine's own.

    Root's directories are the machine's own, and port 9710 may be another daemon's.
    """

    def __init__(self, runtime: str, directory: Path) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": runtime}
        config = directory / "membrokerd.toml"
        config.write_text(f'runtime_directory = "{runtime}/membroker"\nstate_directory = "{directory}"\n')
        self.daemon = f"membrokerd --config {config} --metrics-port 0"

    def shell(self, commands: str, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(["bash", "-euc", commands], env=self.environment, text=True, **more)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="mb-") as runtime:
        yield Machine(runtime, tmp_path)


@pytest.mark.deep
def test_the_commands_of_readme_run_in_order(machine: Machine) -> None:
    """A newcomer has cloned the repository and has two shells. No command fails, and nothing is left at the end."""
    first, second = SHELL.findall((DOCS.parent / "README.md").read_text())
    *before, daemon = first.splitlines()
    assert daemon.split()[0] == "membrokerd"
    assert machine.shell("\n".join(before)).wait(DEADLINE_SECONDS) == 0
    with machine.shell(f"exec {machine.daemon}", stderr=subprocess.PIPE) as broker:
        try:
            assert any(" ready " in line for line in broker.stderr)
            until_it_borrows = "until membroker models | grep -q 256.0; do sleep 0.1; done"
            commands = second.replace("membroker status ", f"{until_it_borrows}\nmembroker status ", 1)
            with machine.shell(commands, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as reader:
                said, _ = reader.communicate(timeout=2 * DEADLINE_SECONDS)
            assert reader.returncode == 0, said
            assert "limit 384.0 MiB, guarantee 256.0 MiB, weight 2, used 256.0 MiB" in said
            assert broker.wait(DEADLINE_SECONDS) == 0
        finally:
            broker.kill()


@pytest.mark.deep
def test_guests_can_be_tried_without_a_gpu(machine: Machine) -> None:
    """The block of docs/guests.md, with other ports: a sleeping program wakes for `curl`, as the other one sleeps."""
    (commands,) = SHELL.findall((DOCS / "guests.md").read_text())
    for port in ("8188", "8189"):
        commands = commands.replace(f"1{port}", str(reserved_port())).replace(port, str(reserved_port()))
    commands = commands.replace("membrokerd ", f"{machine.daemon} ").replace("sleep 1;", "sleep 0.1;")
    shell = ["timeout", str(DEADLINE_SECONDS), "bash", "-c", f"{commands}wait"]
    done = subprocess.run(shell, env=machine.environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+\n(?:.*\n)*?.*/comfy  .*\n.*/train \(asleep\)", done.stdout, re.MULTILINE), done.stdout


def test_the_requirements_are_those_of_pyproject() -> None:
    """The page's tables have the versions that pip requires, and README the Python."""
    text = (DOCS / "requirements.md").read_text()
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for page in (text, (DOCS.parent / "README.md").read_text()):
        assert f"Python {project['requires-python'].removeprefix('>=')}" in page
    for requirement in (*project["dependencies"], *extras["broker"], *extras["cuda"]):
        name, _, version = requirement.partition(">=")
        row = next(line for line in text.splitlines() if line.startswith("|") and name in line)
        assert version.partition(",")[0] in row, requirement
