"""A daemon whose start takes an hour: `python -m tests.support.slow_start_daemon` in the place of `membrokerd`.

The clocks by which turns are measured leap when its admin endpoint is opened, which is in the event loop, and near the
end of the start.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

from membrokerd.cli import main
from membrokerd.edge.endpoints import Endpoints
from membrokerd.system import turns

HOUR = 3600.0
_open_admin = Endpoints.open_admin
_passed = [0.0]


async def _open_slowly(self: Endpoints, *rest: Any) -> None:
    _passed[0] += HOUR
    await _open_admin(self, *rest)


if __name__ == "__main__":
    Endpoints.open_admin = _open_slowly  # type: ignore[method-assign]
    turns.time = SimpleNamespace(  # type: ignore[attr-defined]
        perf_counter=lambda: time.perf_counter() + _passed[0],
        thread_time=lambda: time.thread_time() + _passed[0],
    )
    sys.exit(main())
