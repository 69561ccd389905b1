"""The warden of a guest: a small process that ends the guest's processes when the command that runs them is killed.

A process that is suspended and has no parent would sleep forever, and one that runs would use memory that nobody is
charged for. The warden holds a pidfd of each, so it never hits a process that got the pid of another one. It stops them
all before it kills one, and finds the children that they had begun by then, and what has lost its parents since the
last look: a variable marks all processes of a guest. So none of those escapes.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from contextlib import suppress

from .tree import children, marked, open_process, start_of

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


def _watch(reading: int, mark: str) -> None:
    watched: dict[int, int] = {}
    most = _MANY
    with os.fdopen(reading) as lines:
        for line in lines:
            pid, _, start = line.strip().partition(" ")
            _add(watched, int(pid), start)
            if len(watched) > most:
                _forget(watched)
                most = len(watched) + _MANY
    _end(watched, mark)


def _add(watched: dict[int, int], pid: int, start: str) -> bool:
    """Watch a process. Say whether it is there and was not watched."""
    try:
        file = open_process(pid, start)
    except OSError:  # no descriptor is left
        return False
    if file is None:
        return False
    old = watched.get(pid)
    if old is not None:
        if not _has_ended(old):
            os.close(file)
            return False
        os.close(old)
    watched[pid] = file
    return True


def _has_ended(file: int) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


def _forget(watched: dict[int, int]) -> None:
    """Let go of the processes that have ended."""
    for pid in [pid for pid, file in watched.items() if _has_ended(file)]:
        os.close(watched.pop(pid))


def _end(watched: dict[int, int], mark: str) -> None:
    """Stop all, and the children that they have, until there are no more; then kill all. Then look for the mark."""
    new, is_looking = set(watched), True
    while is_looking:
        ended = set(new)
        while new:
            _send(signal.SIGSTOP, [watched[pid] for pid in new])
            parents, new = new, set()
            for parent in parents:
                if not _has_ended(watched[parent]):
                    found = children(parent)
                    new |= {pid for pid in found if _add(watched, pid, start_of(pid))}
            ended |= new
        _send(signal.SIGKILL, [watched[pid] for pid in ended])
        new = {pid for pid in marked(mark) if _add(watched, pid, start_of(pid))}
        is_looking = bool(new)


def _send(number: signal.Signals, files: Iterable[int]) -> None:
    for file in files:
        with suppress(OSError):
            signal.pidfd_send_signal(file, number)
