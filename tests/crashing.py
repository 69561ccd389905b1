"""A daemon that ends a process at a named point: `python -m tests.crashing` in the place of `membrokerd`.

At each point it looks for a file beside its log; when that names the point, the process that it names is killed, once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from membrokerd import points
from membrokerd.cli import main

FILE = "MEMBROKER_TEST_CRASH"


def arm(path: Path, point: str, pid: int, after: int = 0) -> None:
    """Let the daemon kill `pid` (0: itself) at `point`, after it has passed that so many times."""
    assert point in points.POINTS, point
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"point": point, "pid": pid, "after": after}))
    fresh.rename(path)


def _crash(point: str) -> None:
    path = Path(os.environ[FILE])
    try:
        wanted = json.loads(path.read_text())
    except FileNotFoundError:
        return
    if wanted["point"] != point:
        return
    if wanted["after"]:
        arm(path, point, wanted["pid"], wanted["after"] - 1)
        return
    path.unlink()
    os.kill(wanted["pid"] or os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    points.hook = _crash
    sys.exit(main())
