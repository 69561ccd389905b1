"""A daemon whose event loop a test can hang: `python -m tests.support.hanging_daemon` in the place of `membrokerd`.

At each point of its work it waits for as long as the file that MEMBROKER_TEST_HANG names is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from membrokerd.cli import main
from tests.support.failpoints import put

FILE = "MEMBROKER_TEST_HANG"


def _hang(point: str) -> None:
    while Path(os.environ[FILE]).exists():
        time.sleep(0.01)


if __name__ == "__main__":
    put(_hang)
    sys.exit(main())
