"""The example engine, put to sleep by an operator: the same tokens, and the books as promised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.daemons import running, until
from tests.support.sleeping import books, command, done, refused_with

pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "tests.support.sleeping_engine"]
WEIGHTS = 14 << 20


class Engine:
    """The process, and the tokens that it is to say each time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._expected = process.stdout.readline()

    def hears(self, line: str, answer: str) -> None:
        print(line, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == answer

    def serves(self) -> None:
        self.hears("serve", self._expected)


def test_the_same_tokens_and_no_byte_in_between() -> None:
    """By a request, by command, over a killed daemon, with weights kept, and while it has requests."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with running({"capacity": "128MiB", "host_capacity": "64MiB"}) as daemon:
        environment = {**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint()), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(COMMAND, text=True, cwd=ROOT, env=environment, **pipes) as process:
            engine = Engine(process)
            engine.serves()
            assert books(daemon, "chat").device > WEIGHTS
            assert "weights 14.0 MiB)" in done(command(daemon, "sleep", "chat"))
            assert books(daemon, "chat") == (0, WEIGHTS)
            engine.serves()
            assert books(daemon, "chat").host == 0
            done(command(daemon, "sleep", "chat"))
            done(command(daemon, "wake", "chat"))
            engine.serves()
            assert "weights kept: as asked" in done(command(daemon, "sleep", "chat", "--keep-weights"))
            assert books(daemon, "chat") == (WEIGHTS, 0)
            done(command(daemon, "sleep", "chat"))
            daemon.kill()
            daemon.start_again()
            assert books(daemon, "chat") == (0, WEIGHTS)
            engine.serves()
            engine.hears("hold", "begun\n")
            refused_with("is busy", daemon, "sleep", "chat", "--timeout", "0.5")
            engine.serves()
        until(lambda: not daemon.sessions() and daemon.books().lent_bytes == 0)
