"""A daemon that counts the Python calls of each frame: `python -m tests.support.counting_daemon`.

For each frame it appends a line to a file: the calls from the read of the frame until its answer is noted, by function,
as JSON. What follows the answer, as the refill of the stock, is not counted: no client waits for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from membrokerd.cli import main
from membrokerd.edge.handoff.connection import HandoffConnection
from membrokerd.runtime import loop

FILE = "MEMBROKER_TEST_CALLS"
_NOTED = loop.Loop.answer.__code__
_read_frame = HandoffConnection.read


def _counted(connection: HandoffConnection) -> bool:
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"] += 1
        elif event == "return" and frame.f_code is _NOTED:
            sys.setprofile(None)

    sys.setprofile(count)
    try:
        return _read_frame(connection)
    finally:
        sys.setprofile(None)
        if len(calls) > 2:  # else there was no frame
            with open(os.environ[FILE], "a") as file:
                file.write(json.dumps(calls) + "\n")


if __name__ == "__main__":
    HandoffConnection.read = _counted  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:-2]))  # without the `--log-level debug` of the tests
