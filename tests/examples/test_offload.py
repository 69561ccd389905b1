"""The example of docs/offload.md, run as its reader would run it: into a file, and on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "offload.py"
WORDS = (
    r"asleep: 0 B on the device, 34\.0 MiB on the host\n"
    r"awake: 34\.0 MiB on the device, checksum (\w{8}) before, \1 now\n"
)


def start(daemon: Daemon, stderr: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", str(EXAMPLE), "34MiB"],
        env={**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint())},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def test_it_sleeps_and_wakes() -> None:
    """The bytes are what they were, nothing is left, and a file gets two lines instead of a bar that moves."""
    with running({"host_capacity": "64MiB"}) as daemon:
        worker = start(daemon, subprocess.PIPE)
        out, err = worker.communicate(timeout=DEADLINE_SECONDS)
        assert worker.returncode == 0, err
        assert re.fullmatch(WORDS, out)
        assert re.fullmatch(r"offload \[#{30}\] 34\.0 MiB, .*/s\nrestore \[#{30}\] 34\.0 MiB, .*/s\n", err)
        until(lambda: not any(books.lent_bytes for books in daemon.device().locations))


def test_the_bar_moves_on_a_terminal() -> None:
    """One line for each of the two, drawn over itself."""
    ours, theirs = pty.openpty()
    try:
        with running({"host_capacity": "64MiB"}) as daemon:
            worker = start(daemon, theirs)
            out, _ = worker.communicate(timeout=DEADLINE_SECONDS)
            assert worker.returncode == 0
            assert re.fullmatch(WORDS, out)
        drawn = os.read(ours, 65_536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert drawn.startswith("\roffload [")
    assert drawn.count("\n") == 2
    assert drawn.count("\r\n") == 2
    assert "[" + "#" * 30 + "] 34.0 MiB" in drawn
