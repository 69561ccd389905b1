"""The warden of a guest: a small process that ends the guest's processes when the command that runs them is killed.

A process that is suspended and has no parent would sleep forever, and one that runs would use memory that nobody is
charged for. The warden knows when each of them started, so it never hits a process that got the pid of another one. It
holds no descriptor of any, so it can watch as many as there are. It stops them all before it kills one, and finds the
children that they had begun by then, and what has lost its parents since the last look: a variable marks all processes
of a guest. So none of those escapes.
"""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress

from .tree import children, marked, send, start_of

VARIABLE = "MEMBROKER_GUEST"
"""Is in the environment of all processes of a guest: the pid of its command, and when that started."""

_IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_MANY = 64
"""How many more processes than lived at the last look are watched before those that have ended are looked for."""


class Warden:
    """Made before the first thread. `watch` names processes; `close`, or the end of this process, ends them."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        self._watched: set[int] = set()
        self.mark: str = f"{os.getpid()}-{start_of(os.getpid())}"
        """The value of the variable for the program."""
        self.pid: int = os.fork()
        if not self.pid:
            status = 1
            try:
                os.close(self._writing)
                _close_all_but(reading)
                os.setsid()  # a terminal's signals are not for it
                for number in _IGNORED:
                    signal.signal(number, signal.SIG_IGN)
                _watch(reading, f"{VARIABLE}={self.mark}")
                status = 0
            finally:
                os._exit(status)
        os.close(reading)
        os.set_blocking(self._writing, False)  # somebody may have stopped it
        self._file = os.pidfd_open(self.pid)

    def watch(self, pids: list[int]) -> None:
        """End these, too, when this process ends."""
        watched = self._watched.intersection(pids)
        for pid in set(pids) - watched:
            with suppress(OSError):
                os.write(self._writing, f"{pid} {start_of(pid)}\n".encode())
                watched.add(pid)
        self._watched = watched

    def go_on(self) -> None:
        """Let it run again: somebody has stopped it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, signal.SIGCONT)

    def close(self) -> None:
        """Let the warden end what is left, and wait for it."""
        os.close(self._writing)
        self.go_on()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._file)


def _close_all_but(file: int) -> None:
    """Close what this process has inherited, but its standard streams: there may be no descriptor left."""
    gc.disable()  # an inherited object would close its descriptor, which is another file's by then
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (*range(3), file):
            with suppress(OSError):  # the listing's own
                os.close(int(name))


def _watch(reading: int, mark: str) -> None:
    watched: dict[int, str] = {}
    most = _MANY
    with os.fdopen(reading) as lines:
        for line in lines:
            pid, _, start = line.strip().partition(" ")
            watched[int(pid)] = start
            if len(watched) > most:
                watched = {pid: start for pid, start in watched.items() if start_of(pid) == start}
                most = len(watched) + _MANY
    _end(watched, mark)


def _end(watched: dict[int, str], mark: str) -> None:
    """Stop all that are watched or marked, and their children, until there are no more; then kill all, and look again.

    `watched` has the start time of each pid.
    """
    new = watched | _not_in(watched, marked(mark))
    while new:
        stopped: dict[int, str] = {}
        while new:
            for pid, start in new.items():
                send(signal.SIGSTOP, pid, start)
            stopped |= new
            found = [child for pid, start in new.items() if start_of(pid) == start for child in children(pid)]
            new = _not_in(stopped, found)
        for pid, start in stopped.items():
            send(signal.SIGKILL, pid, start)
        watched |= stopped
        new = _not_in(watched, marked(mark))


def _not_in(known: dict[int, str], pids: list[int]) -> dict[int, str]:
    """Return the start times of those processes that live and are not known."""
    starts = {pid: start_of(pid) for pid in pids}
    return {pid: start for pid, start in starts.items() if start and known.get(pid) != start}
