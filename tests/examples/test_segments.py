"""The example of docs/segments.md, run as its reader would run it, against a real daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.sizes import MIB

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "segments.py"


def start(daemon: Daemon, *arguments: str) -> subprocess.Popen[str]:
    """Start Python as a worker of red."""
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", *arguments]
    env = {**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint())}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def finish(worker: subprocess.Popen[str]) -> list[str]:
    """Return the lines that a worker wrote, and hold it to its end without a complaint."""
    out, err = worker.communicate(timeout=DEADLINE_SECONDS)
    assert (worker.returncode, err) == (0, "")
    return out.splitlines()


def test_many_start_together_and_one_loads(daemon: Daemon) -> None:
    """Six workers at once: one makes the weights, five attach them, all see the same, one segment is charged."""
    ended = [finish(worker) for worker in [start(daemon, str(EXAMPLE), "0.3") for _ in range(6)]]
    assert sorted(len(lines) for lines in ended) == [1] * 5 + [2]
    assert len({lines[-1].split()[-1] for lines in ended}) == 1
    assert daemon.books().lent_bytes == 2 * MIB


def test_another_loads_when_the_first_is_killed(daemon: Daemon) -> None:
    """SIGKILL in the middle of the loading: the waiting readers are told, one of them loads again, and all succeed."""
    first = start(daemon, str(EXAMPLE), "600")
    assert first.stdout.readline() == "loading\n"
    waiting = [start(daemon, str(EXAMPLE)) for _ in range(3)]
    until(lambda: len(daemon.sessions()) == 4)
    first.kill()
    first.communicate()
    assert sorted(len(finish(worker)) for worker in waiting) == [1, 1, 2], "one of them loads"
    assert daemon.books().lent_bytes == 2 * MIB
