"""The processes of a guest: all descendants of this process, found in /proc.

This process adopts what its children leave behind (PR_SET_CHILD_SUBREAPER), so a program that forks and lets the parent
end does not escape. Owns which of them may be suspended: those of this user that have never imported memory with this
library, and that have and had no session of a broker, as far as the broker has shown.

A process that cannot be looked at, for want of descriptors or memory, is not one that is gone: that raises `OSError`.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from ..vmm.imports import is_marked

_SET_CHILD_SUBREAPER = 36
_MOST_WALKS = 10
END_SECONDS = 10.0
"""How long killed processes are waited for: a driver can hold one back."""


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    if not Path("/proc/thread-self/children").exists():
        raise OSError("this kernel does not tell a process's children (CONFIG_PROC_CHILDREN)")


class ProcessTree:
    """The descendants of this process but those in `besides`. `sessions` returns the pids that have a session now."""

    def __init__(self, sessions: Callable[[], Iterable[int]], besides: Iterable[int] = ()) -> None:
        self._sessions = sessions
        self._besides = frozenset(besides)
        self._seen: set[int] = set()
        self._with_sessions: set[tuple[int, str]] = set()
        """Processes that have or had a session: pid and start time."""

    def pids(self) -> list[int]:
        """Return the pids of all that live. One whose parent ends meanwhile is found in another place.

        A program may have hundreds of threads, each of which is asked for its children: 10 us for each.
        """
        for _ in range(_MOST_WALKS):
            before, self._seen = self._seen, self._walk()
            if self._seen == before:
                break
        return sorted(self._seen)

    def _walk(self) -> set[int]:
        found, left = set[int](), [os.getpid()]
        while left:
            for pid in children(left.pop()):
                if pid not in self._besides:
                    left.append(pid)
                    if start_of(pid):
                        found.add(pid)
        return found

    def start_of(self, pid: int) -> str:
        """Return when a process started, in the kernel's own unit; "" if it is gone or a zombie."""
        return start_of(pid)

    def look_at_sessions(self) -> None:
        """Note which processes of the tree have a session now."""
        with_sessions = set(self._sessions())
        self._with_sessions |= {(pid, start_of(pid)) for pid in self.pids() if pid in with_sessions}

    def why_not(self, pid: int) -> str:
        """Return why a process of the tree must not be suspended, as half a sentence, or ""."""
        try:
            if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
                return f"process {pid} belongs to another user"
            has_imported = (pid, start_of(pid)) in self._with_sessions or is_marked(pid)
        except FileNotFoundError:
            return ""  # it is gone
        except PermissionError:
            return f"process {pid} does not let other processes look at it"
        return f"process {pid} has used memory of a broker, and would die of it" if has_imported else ""

    def end(self) -> None:
        """Kill all, and what they begin meanwhile. The caller has blocked SIGCHLD."""
        looks = int(END_SECONDS / 0.05)
        while looks and (pids := self.pids()):
            for pid in pids:
                send(signal.SIGKILL, pid, start_of(pid))
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            signal.sigtimedwait({signal.SIGCHLD}, 0.05)
            looks -= 1


def children(pid: int) -> list[int]:
    """Return the children of all threads of a process: nothing if it is gone."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    for task in tasks:
        with suppress(FileNotFoundError, ProcessLookupError):  # this thread has ended
            found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    return found


def marked(variable: str) -> list[int]:
    """Return the processes of this user that have begun with this in their environment."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it is gone, or another user's
            if variable.encode() in _read(f"/proc/{pid}/environ").split(b"\0"):
                found.append(int(pid))
    return found


def start_of(pid: int) -> str:
    """Return when a process started, in the kernel's own unit; "" if it is gone or a zombie."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return fields[19].decode() if fields[0] not in (b"Z", b"X") else ""


def _read(file: str) -> bytes:
    with FileIO(file) as opened:
        return opened.readall()


def open_process(pid: int, start: str) -> int | None:
    """Return a pidfd of the process that started then, or None if it is gone. Another one can have its pid."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        is_it = start_of(pid) == start != ""
    except BaseException:
        os.close(file)
        raise
    if not is_it:
        os.close(file)
        return None
    return file


def send(number: signal.Signals, pid: int, start: str) -> None:
    """Signal the process that started then, and no other one that has its pid."""
    file = open_process(pid, start)
    if file is not None:
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(file, number)
        os.close(file)
