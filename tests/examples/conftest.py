"""How the tests run an example, as its reader would."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.daemons import Daemon, until
from tests.support.template import run as run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., list[str]]


@pytest.fixture
def run(daemon: Daemon) -> Run:
    """Run an example, and return the lines that it wrote. It ends well, without a complaint, and leaves nothing."""

    def run(name: str, *arguments: str) -> list[str]:
        environment = {**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint())}
        command = ["-W", "error::ResourceWarning", str(EXAMPLES / name), *arguments]
        imports = ["torch"] if "torch" in name or name == "tensors.py" else []
        done = run_python(command, imports=imports, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        until(lambda: not daemon.sessions() and not any(books.lent_bytes for books in daemon.device().locations))
        return done.stdout.splitlines()

    return run
