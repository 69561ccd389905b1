"""`python -m membroker`, for an interpreter whose scripts are not on the PATH."""

from __future__ import annotations

import subprocess
import sys

import membroker


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "membroker", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"membroker {membroker.__version__}\n"
    assert (
        subprocess.run([sys.executable, "-m", "membroker", "nothing"], capture_output=True, check=False).returncode == 2
    )
