"""Ends the processes of sessions on an operator's word: SIGTERM, and SIGKILL KILL_SECONDS later.

Owns the timers, and a pidfd of each process for as long as its timer runs. It must never signal a pid, which may
already belong to another process, and never touch the books: they hear of the death as of any other.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from typing import NamedTuple

from membroker.wire.names import session_name

from ..core.denied import Denied, Reason, deny
from ..core.rows import SessionRow
from ..restart.process_watch import Watch
from ..system import logs

Who = dict[str, object]
"""What the log says about a process."""
KILL_SECONDS = 10.0

_WHY = {
    errno.ESRCH: "its process is dead already, and its memory is credited once the device shows it free",
    errno.EPERM: "its process has the uid {uid}, and the daemon may not signal that user's processes: end process "
    "{pid} as root, or give the daemon CAP_KILL",
    errno.EINVAL: "its process is in a pid namespace that the daemon cannot signal into: end it where it runs (in "
    "Kubernetes, delete its pod), or run the daemon in the host's pid namespace",
}
"""Why a process cannot be signalled, and what to do, by the kernel's error."""
_LOST = (
    "the daemon has lost its handle of the process, which is in another pid namespace: end it where it runs (in "
    "Kubernetes, delete its pod), then `membroker forget` the session"
)


class _Pending(NamedTuple):
    """A process that was sent SIGTERM and is still alive."""

    pidfd: int
    timer: asyncio.TimerHandle


class Evictions:
    """The evictions of one daemon. `count` is how many processes it has sent SIGTERM."""

    def __init__(self, watch: Watch) -> None:
        self.count = 0
        self._watch = watch
        self._pending: dict[str, _Pending] = {}
        self._io = asyncio.get_running_loop()

    def evict(self, session: int, row: SessionRow | None) -> Denied | None:
        """Send SIGTERM to the process of a session, unless an eviction of it is under way; or return why not."""
        if row is None:
            return _deny(session, "it is not known, or has ended (`membroker sessions --admin` lists all)")
        pidfd = self._watch.pidfd(session)
        if pidfd is None:
            return _deny(session, _LOST if row.state == "detached" else _WHY[errno.ESRCH])
        if row.process in self._pending:
            return None
        try:
            self._begin(pidfd, row)
        except OSError as error:
            why = _WHY.get(error.errno or 0, "its process cannot be signalled: {error}")
            return _deny(session, why.format(uid=row.uid, pid=row.pid, error=error.strerror))
        self.count += 1
        return None

    def _begin(self, pidfd: int, row: SessionRow) -> None:
        own = os.dup(pidfd)  # the watch closes its pidfd when the session ends, and the process may live on
        try:
            signal.pidfd_send_signal(own, signal.SIGTERM)
        except OSError:
            os.close(own)
            raise
        who: Who = {"session": session_name(row.session), "tenant": row.tenant, "pid": row.pid, "uid": row.uid}
        logs.warn("an operator evicts a process: SIGTERM", **who)
        timer = self._io.call_later(KILL_SECONDS, self._kill, row.process, who)
        self._pending[row.process] = _Pending(own, timer)
        self._io.add_reader(own, self._end, row.process)

    def _kill(self, process: str, who: Who) -> None:
        """The process has not ended by SIGTERM."""
        try:
            signal.pidfd_send_signal(self._pending[process].pidfd, signal.SIGKILL)
            logs.warn(f"an evicted process is still alive after {KILL_SECONDS:g} s: SIGKILL", **who)
        except OSError as error:
            logs.warn("an evicted process cannot be killed", **who, error=str(error.strerror))
        self._end(process)

    def _end(self, process: str) -> None:
        """The process has ended, or nothing more is done about it."""
        pending = self._pending.pop(process)
        pending.timer.cancel()
        self._io.remove_reader(pending.pidfd)
        os.close(pending.pidfd)

    def close(self) -> None:
        """Leave the processes alone that were sent SIGTERM and still live."""
        for process in list(self._pending):
            self._end(process)


def _deny(session: int, what: str) -> Denied:
    return deny(Reason.SESSION_NOT_EVICTABLE, session=session_name(session), what=what)
