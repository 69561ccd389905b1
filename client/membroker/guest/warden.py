"""The warden of a guest: a small process that ends the guest's processes when the command that runs them is killed.

A process that is suspended and has no parent would sleep forever, and one that runs would use memory that nobody is
charged for. The warden holds a pidfd of each, so it never hits a process that got the pid of another one. It stops them
all before it kills one, and finds the children that they had begun by then: so none of those escapes.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from contextlib import suppress

from .tree import children, open_process, start_of

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
        self.pid: int = os.fork()
        if not self.pid:
            status = 1
            try:
                os.close(self._writing)
                os.setsid()  # a terminal's signals are not for it
                for number in _IGNORED:
                    signal.signal(number, signal.SIG_IGN)
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
                    os.write(self._writing, f"{pid} {start_of(pid)}\n".encode())
        self._watched = set(pids)

    def close(self) -> None:
        """Let the warden end what is left, and wait for it."""
        os.close(self._writing)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _watch(reading: int) -> None:
    watched: dict[int, int] = {}
    most = _MANY
    with os.fdopen(reading) as lines:
        for line in lines:
            pid, _, start = line.strip().partition(" ")
            _add(watched, int(pid), start)
            if len(watched) > most:
                _forget(watched)
                most = len(watched) + _MANY
    _end(watched)


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


def _end(watched: dict[int, int]) -> None:
    """Stop all, and the children that they have, until there are no more; then kill all."""
    new = set(watched)
    while new:
        _send(signal.SIGSTOP, [watched[pid] for pid in new])
        parents, new = new, set()
        for parent in parents:
            if not _has_ended(watched[parent]):
                found = children(parent)
                new |= {pid for pid in found if _add(watched, pid, start_of(pid))}
    _send(signal.SIGKILL, watched.values())


def _send(number: signal.Signals, files: Iterable[int]) -> None:
    for file in files:
        with suppress(OSError):
            signal.pidfd_send_signal(file, number)
