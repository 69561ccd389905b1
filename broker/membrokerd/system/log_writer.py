"""Writes log lines to a descriptor on a thread of its own: the event loop never waits for the reader.

Owns the queue of lines and its bounds. It must never wait in `emit`.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections import deque

QUEUE_BYTES = 1 << 20
"""How much may wait to be written: about 7,000 lines."""
LINE_BYTES = 64 << 10
"""The longest line: a traceback has some KiB."""
FLUSH_SECONDS = 1.0
"""How long an exit waits for lines that are not yet written."""


def is_journal(descriptor: int) -> bool:
    """Say whether systemd has connected a descriptor to its journal (systemd.exec(5), JOURNAL_STREAM)."""
    found = os.fstat(descriptor)
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def complain(text: object) -> None:
    """Write to stderr why this process ends with an error. In systemd's journal each line has its priority."""
    before = "<3>" if is_journal(2) else ""
    print("\n".join(before + line for line in str(text).splitlines()), file=sys.stderr)


class LogWriter(logging.Handler):
    """Queues lines and writes them on a thread of its own: a pipe that nobody reads blocks only that thread.

    At most QUEUE_BYTES of lines wait, and a line has at most LINE_BYTES. Lines beyond that are dropped and counted, and
    the log says how many once half of the queue is free. It writes to the descriptor directly: the thread may be
    blocked when the process ends, and must not hold the lock of sys.stderr then.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        self._untold = 0
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        """Size of the waiting lines, and of the line that is being written."""
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line."""
        line = _encoded(self.format(record))
        with self._changed:
            if self._bytes + len(line) > QUEUE_BYTES:
                self._drop()
            else:
                self._lines.append(line)
                self._bytes += len(line)
                self._changed.notify_all()

    def _drop(self) -> None:
        self.dropped += 1
        self._untold += 1

    def flush(self) -> None:
        """Wait until every line so far is written; FLUSH_SECONDS at most. `logging` calls it at exit too."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, FLUSH_SECONDS)

    def close(self) -> None:
        """End the thread once it has written the queued lines."""
        with self._changed:
            self._lines.append(b"")
            self._changed.notify_all()
        super().close()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            if not line:
                return
            written = _write(self._descriptor, line)
            with self._changed:
                self._bytes -= len(line)
                if not written:
                    self._drop()
                elif self._untold and self._bytes < QUEUE_BYTES // 2:
                    self._lines.append(line := _encoded(self.format(_record_of_dropped(self._untold))))
                    self._bytes += len(line)
                    self._untold = 0
                self._changed.notify_all()


def _encoded(line: str) -> bytes:
    whole = line.encode(errors="backslashreplace")
    return (whole if len(whole) < LINE_BYTES else whole[: LINE_BYTES - 4] + b"...") + b"\n"


def _write(descriptor: int, line: bytes) -> bool:
    """Write a line, and wait for its reader. Return False if it cannot be written: a full disk, or no reader left."""
    while line:
        try:
            line = line[os.write(descriptor, line) :]
        except BlockingIOError:  # another process has made it non-blocking
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
        except OSError:
            return False
    return True


def _record_of_dropped(lines: int) -> logging.LogRecord:
    record = logging.LogRecord(
        "membrokerd", logging.WARNING, __file__, 0, "log lines were dropped: stderr was not read fast enough", (), None
    )
    record.fields = {"lines": lines}
    return record
