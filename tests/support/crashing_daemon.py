"""A daemon that kills a process at a named point: `python -m tests.support.crashing_daemon` instead of `membrokerd`.

At each point it looks for a file beside its log; when that names the point, the process that it names is killed, once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

from membrokerd import daemon
from membrokerd.cli import main
from membrokerd.restart.journal import Journal
from membrokerd.system import failpoints as points
from tests.support.failpoints import put

FILE = "MEMBROKER_TEST_CRASH"


def path() -> Path:
    """Return the file that the daemons of this test look for."""
    return Path(os.environ[FILE])


def arm(armed: Path, point: str, pid: int, after: int = 0) -> None:
    """Let the daemon kill `pid` (0: itself) at `point`, after it has passed that so many times."""
    assert point in points.POINTS + points.TENANT_POINTS, point
    fresh = armed.with_suffix(".new")
    fresh.write_text(json.dumps({"point": point, "pid": pid, "after": after}))
    fresh.rename(armed)


def _crash(point: str) -> None:
    armed = path()
    try:
        wanted = json.loads(armed.read_text())
    except FileNotFoundError:
        return
    if wanted["point"] != point:
        return
    if wanted["after"]:
        arm(armed, point, wanted["pid"], wanted["after"] - 1)
        return
    armed.unlink()
    os.kill(wanted["pid"] or os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    put(_crash)
    # Small enough for a test to fill.
    daemon.Journal = partial(Journal, compact_bytes=1_024)  # type: ignore[assignment, misc]
    sys.exit(main())
