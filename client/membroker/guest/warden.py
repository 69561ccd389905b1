"""The warden of a guest: a small process that ends the guest's processes when the command that runs them is killed.

A process that is suspended and has no parent would sleep forever, and one that runs would use memory that nobody is
charged for. The warden holds a pidfd of each, so it never hits a process that got the pid of another one.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress


class Warden:
    """Made before the first thread. `watch` names processes; `close`, or the end of this process, ends them."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        self._watched: set[int] = set()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                os.close(self._writing)
                os.setsid()  # a terminal's signals are not for it
                _watch(reading)
                status = 0
            finally:
                os._exit(status)
        os.close(reading)

    def watch(self, pids: list[int]) -> None:
        """End these, too, when this process ends."""
        for pid in pids:
            if pid not in self._watched:
                with suppress(OSError):
                    os.write(self._writing, b"%d\n" % pid)
        self._watched = set(pids)

    def close(self) -> None:
        """Let the warden end what is left, and wait for it."""
        os.close(self._writing)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _watch(reading: int) -> None:
    files: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(reading) as lines:
        for line in lines:
            with suppress(OSError):
                files.append(os.pidfd_open(int(line)))
    for file in files:
        with suppress(OSError):
            signal.pidfd_send_signal(file, signal.SIGKILL)
