"""The example of docs/protocol.md, run as its reader would run it, against a real daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.sizes import MIB

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "bare_client.py"


def run(daemon: Daemon) -> subprocess.CompletedProcess[str]:
    """Run the example, with warnings of what was left open as errors."""
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", EXAMPLE, daemon.endpoint()]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)


def test_it_borrows_writes_and_gives_back(daemon: Daemon) -> None:
    """Its five lines say what happened; afterwards nothing is lent, nobody is there, and nothing is open."""
    daemon.device()  # the admin channel is open from here on
    descriptors = daemon.descriptors()
    done = run(daemon)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "welcome: tenants/red on host",
        "borrowed 2 pages for tenants/red/models/bare: page 0, page 1",
        f"released {4 * MIB} bytes",
        "last answer: goodbye",
    ]
    assert not daemon.sessions()
    books = daemon.books()
    assert (books.lent_bytes, books.releasing_bytes, books.unaccounted_bytes) == (0, 0, 0)
    until(lambda: daemon.descriptors() <= descriptors)
