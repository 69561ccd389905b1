"""The process that `membroker replay` starts: a request as JSON on stdin, and figures as JSON on stdout.

A sentence on stderr and status 1 say what is wrong with a file or with the numbers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..ext import records
from .changes import Changes, Unplayable
from .figures import Tally
from .reading import TracePart, read
from .recording import Recording
from .replayer import Replayer

PROGRESS_SECONDS = 0.5


def main() -> int:
    """Replay, and print the figures; returns the exit status."""
    asked = json.load(sys.stdin)
    quotas = {(tenant, model): numbers for tenant, model, numbers in asked["quotas"]}
    changes = Changes(asked["location"], asked["capacity"], quotas)
    try:
        print(json.dumps(replay(asked["files"], changes)))
    except Unplayable as error:
        print(f"membroker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if sys.stderr.isatty():
            print("\x1b[K", end="", file=sys.stderr)  # the line of the progress
    return 0


def replay(names: list[str], changes: Changes) -> dict[str, Any]:
    """Return what happened, and what happens with the changes, in all parts of these files."""
    parts = [(name, part) for name in names for part in _read(name)]
    happened, replayed = Tally(), Tally()
    for number, (name, part) in enumerate(parts):
        if part.is_journal and changes.capacity is None:
            raise Unplayable(f"{name} is a journal, which does not say the capacity: give one with --capacity")
        try:
            recording = Recording(part, happened)
            Replayer(part, recording, changes, replayed).run(_progress(number, len(parts), len(part.rows)))
        except (AssertionError, KeyError, IndexError, ValueError) as error:
            raise Unplayable(f"{name} contradicts itself: no daemon has recorded it like this ({error!r})") from error
    return {
        "parts": len(parts),
        "journal": any(part.is_journal for _, part in parts),
        "begin": _time(min((part.begin.at for _, part in parts), default=0)),
        "seconds": sum(_seconds(part) for _, part in parts),
        "granted_now": replayed.granted_now,
        "unfit_bytes": replayed.unfit_bytes,
        "models": [
            {
                "name": str(key[0]),
                "location": key[1],
                "happened": happened.rows[key].as_json(),
                "replayed": replayed.rows[key].as_json(),
            }
            for key in sorted({*happened.rows, *replayed.rows})
        ],
    }


def _read(name: str) -> list[TracePart]:
    try:
        return read(Path(name))
    except records.Unusable as error:
        raise Unplayable(
            f"{name} {error}: give a trace that membrokerd has written (record = true), or a journal"
        ) from error
    except OSError as error:
        raise Unplayable(f"cannot read {name}: {error.strerror}; name a trace of membrokerd (record = true)") from error


def _time(seconds: int) -> str | None:
    return datetime.fromtimestamp(min(seconds, 1 << 36), UTC).isoformat() if seconds else None


def _seconds(part: TracePart) -> int:
    return 0 if part.is_journal or not part.rows else (part.rows[-1][0] - part.begin.now) // 1_000_000_000


def _progress(number: int, parts: int, rows: int) -> Callable[[int], None]:
    """Return what tells how far it is, on a terminal."""
    printed_at = time.monotonic()

    def show(row: int) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= PROGRESS_SECONDS and sys.stderr.isatty():
            printed_at = time.monotonic()
            print(f"replayed part {number + 1} of {parts}, {100 * row // max(1, rows)} %", end="\r", file=sys.stderr)

    return show


if __name__ == "__main__":
    sys.exit(main())
