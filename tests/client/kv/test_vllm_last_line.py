"""Which process says why an engine did not start. The real engines are in tests/engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from membroker import InvalidRequest
from membroker.kv.vllm import last_line

ENGINE = """
import multiprocessing
from membroker import InvalidRequest
from membroker.kv.vllm import last_line

def engine():
    last_line.begin()
    last_line.tell(InvalidRequest("no"))

if __name__ == "__main__":
    last_line.begin()
    process = multiprocessing.get_context("spawn").Process(target=engine)
    process.start()
    process.join()
    print("and what vLLM says of it", flush=True)
"""


def test_a_server_that_another_program_with_vllm_starts_says_it_itself(tmp_path: Path) -> None:
    """That program has the variable in its environment. The server's engine is a process of `multiprocessing`."""
    file = tmp_path / "serve.py"
    file.write_text(ENGINE)
    others = os.memfd_create("membroker-last-line")
    try:
        done = subprocess.run(
            [sys.executable, file],
            env={**os.environ, last_line.VARIABLE: f"/proc/{os.getpid()}/fd/{others}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        assert os.fstat(others).st_size == 0
    finally:
        os.close(others)
    assert done.stdout.splitlines() == ["and what vLLM says of it", "membroker: no"]


def test_a_file_that_is_none_of_it_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's process has ended, and another one has its pid: the variable leads to a file of that one."""
    file = tmp_path / "data"
    file.write_text("data")
    with file.open() as opened:
        monkeypatch.setenv(last_line.VARIABLE, f"/proc/{os.getpid()}/fd/{opened.fileno()}")
        last_line.tell(InvalidRequest("no"))
    assert file.read_text() == "data"
