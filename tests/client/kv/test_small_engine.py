"""A small engine with an elastic KV cache: two of them, and too little memory for both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, running, until

pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")

pytestmark = pytest.mark.deep

PATTERN = r"(\w+): the same tokens: True; it borrowed (\d+) MiB for them"
ENGINE = Path(__file__).parents[2] / "support" / "small_engine.py"


def test_two_engines_in_turn() -> None:
    """32 MiB for two engines that need 18 MiB each: the tokens are those of a cache that has all of its memory."""
    with running({"capacity": "32MiB"}) as daemon:
        command = [sys.executable, "-W", "error::ResourceWarning", str(ENGINE)]
        environment = {**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint()), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False, env=environment
        )
        assert (done.returncode, done.stderr) == (0, "")
        found = [re.fullmatch(PATTERN, line) for line in done.stdout.splitlines()]
        assert [one and one[1] for one in found] == ["first", "second", "first", "second"], done.stdout
        assert all(int(one[2]) > 12 for one in found), "they kept their memory, or needed none"
        until(lambda: not daemon.sessions() and daemon.books().lent_bytes == 0)
