"""`membroker sleep` and `wake` as an operator runs them, and the books beside them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr
from typing import NamedTuple

from membroker.cli import main as cli
from membroker.v1.resources_pb2 import LOCATION_DEVICE, LOCATION_HOST
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until


def command(daemon: Daemon, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "membroker.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MEMBROKER_ENDPOINT": str(daemon.admin)},
    )


def done(process: subprocess.Popen[str]) -> str:
    """Wait for a command that succeeds, and return what it says."""
    out, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, errors
    return out


def refused(process: subprocess.Popen[str]) -> str:
    """Wait for a command that fails, and return what it says."""
    out, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 1, out
    return errors


def refused_with(text: str, daemon: Daemon, *arguments: str) -> str:
    """Run the command until it fails with this text, and return what it says.

    It says less if an answer took so long that there was no time for more questions.
    """

    def said() -> str:
        found = refused(command(daemon, *arguments))
        return found if text in found else ""

    return until(said)


def refused_at_once(daemon: Daemon, *arguments: str) -> str:
    """Run the command in this process, where it is imported already, and return what it says. It fails."""
    with redirect_stderr(io.StringIO()) as errors:
        assert cli.main([*arguments, "--endpoint", str(daemon.admin)]) == 1
    return errors.getvalue()


class Books(NamedTuple):
    """What a model is charged, in bytes."""

    device: int
    host: int


def books(daemon: Daemon, model: str) -> Books:
    """Return what a model of this name is charged."""
    found = {
        one.location: one.used_bytes
        for row in daemon.models()
        if row.name.endswith(f"/models/{model}")
        for one in row.books
    }
    return Books(found.get(LOCATION_DEVICE, 0), found.get(LOCATION_HOST, 0))
