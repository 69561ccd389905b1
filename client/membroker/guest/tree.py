"""The processes of a guest: all descendants of this process, found in /proc.

This process adopts what its children leave behind (PR_SET_CHILD_SUBREAPER), so a program that forks and lets the parent
end does not escape. Owns which of them may be suspended: those of this user that have no session of a broker, and never
had one, as far as the broker has shown.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from pathlib import Path

_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class ProcessTree:
    """The descendants of this process but those in `besides`. `sessions` returns the pids that have a session now."""

    def __init__(self, sessions: Callable[[], Iterable[int]], besides: Iterable[int] = ()) -> None:
        self._sessions = sessions
        self._besides = frozenset(besides)
        self._with_sessions: set[tuple[int, str]] = set()
        """Processes that have or had a session: pid and start time."""

    def pids(self) -> list[int]:
        """Return the pids of all that live."""
        found, left = [], [os.getpid()]
        while left:
            for pid in _children(left.pop()):
                if pid not in self._besides:
                    left.append(pid)
                    if _stat(pid)[:1] not in (["Z"], ["X"], []):
                        found.append(pid)
        return sorted(found)

    def start_of(self, pid: int) -> str:
        """Return when a process started, in the kernel's own unit; "" if it is gone or a zombie."""
        fields = _stat(pid)
        return fields[19] if fields and fields[0] not in ("Z", "X") else ""

    def look_at_sessions(self) -> None:
        """Note which processes of the tree have a session now."""
        with_sessions = set(self._sessions())
        self._with_sessions |= {(pid, self.start_of(pid)) for pid in self.pids() if pid in with_sessions}

    def why_not(self, pid: int) -> str:
        """Return why a process of the tree must not be suspended, as half a sentence, or ""."""
        if (pid, self.start_of(pid)) in self._with_sessions:
            return f"process {pid} has used memory of a broker, and would die of it"
        try:
            uid = os.stat(f"/proc/{pid}").st_uid
        except OSError:
            return ""  # it is gone
        return "" if uid == os.geteuid() else f"process {pid} belongs to another user"


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process: nothing if it is gone."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:
        pass
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, or nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
