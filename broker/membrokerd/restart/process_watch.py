"""The watch on sessions' processes: one pidfd for each session, from its Hello until it is forgotten.

A session outlives its connection, and this daemon: so the pidfd belongs to neither, and a copy is in the descriptor
store. Decides nothing: it tells of deaths. A process that began another program by exec() is dead to its sessions: the
kernel has unmapped their memory and closed their descriptors.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Protocol

from ..observe import logs
from ..process import NO_DESCRIPTOR, identity_of, image_of
from ..turns import Turns

EXEC_SECONDS = 0.2
"""How long after a connection's end its process is looked at: an exec() closes it before the new program is mapped."""

_DEATHS = "the dead"
"""Whose share of a turn deaths use: no tenant has such a name."""


class Pidfds(Protocol):
    """Where copies of pidfds outlive this daemon (`Store`)."""

    def keep_process(self, session: int, pidfd: int) -> None:
        """Copy a session's pidfd."""
        ...

    def forget_process(self, session: int) -> None:
        """Let go of a session's pidfd."""
        ...


class Watch:
    """Tells `died` of each session whose process is dead, once."""

    def __init__(self, store: Pidfds, died: Callable[[int], None], turns: Turns) -> None:
        self._store = store
        self._died = died
        self._turns = turns
        self._pidfds: dict[int, int] = {}
        self._images: dict[int, tuple[int, tuple[str, ...]]] = {}
        """The pid and the image of each session's process, where the broker can see them."""
        self._io = asyncio.get_running_loop()

    def add(self, session: int, pidfd: int, pid: int) -> None:
        """Watch a session's process; the pidfd is the watch's from now on. One that is watched already stays so.

        The sessions that the process had before an exec() end.
        """
        image = image_of(pid)
        if image is not None:
            for other, seen in list(self._images.items()):
                if other != session and seen[0] == pid and seen[1] != image:
                    self._replaced(other)
            self._images[session] = pid, image
        if session in self._pidfds:
            os.close(pidfd)
            return
        self._pidfds[session] = pidfd
        self._store.keep_process(session, pidfd)
        self._io.add_reader(pidfd, self._ended, session)

    def inherit(self, session: int, pid: int, process: str, kept: int | None) -> None:
        """Watch the process of a session of an earlier daemon, by the pidfd that was kept or by its number."""
        pidfd = os.dup(kept) if kept is not None else self._find(session, pid, process)
        if pidfd is not None:
            self.add(session, pidfd, pid)

    def look(self, session: int) -> None:
        """Find out, in a moment, whether the session's connection ended by an exec() of its process."""
        if session in self._images:
            self._io.call_later(EXEC_SECONDS, self._look, session)

    def _look(self, session: int) -> None:
        pid, image = self._images.get(session, (0, None))
        now = image_of(pid)
        if now is not None and now != image:
            self._replaced(session)

    def _replaced(self, session: int) -> None:
        logs.log(
            "a process began another program by exec(): its session ends as if it had died",
            session=f"sessions/{session:x}",
            pid=self._images[session][0],
        )
        self._drop(session)
        self._io.call_soon(self._died, session)  # another session may be beginning just now

    def _find(self, session: int, pid: int, process: str) -> int | None:
        """Return a pidfd of a process that was seen before, or None: it is dead, or nobody can say."""
        if pid <= 0:
            logs.warn(
                "nobody can say whether the process of this session lives: it is in another pid namespace, and its "
                "pidfd was lost with the descriptor store; once it is gone, `membroker forget` ends the session",
                session=f"sessions/{session:x}",
            )
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                raise
            self._io.call_soon(self._died, session)
            return None
        if identity_of(pidfd, pid) == process:
            return pidfd
        os.close(pidfd)  # the number is another process's by now
        self._io.call_soon(self._died, session)
        return None

    def _ended(self, session: int) -> None:
        """Tell of a death, unless this turn has had its share of them: a pidfd stays readable."""
        if not self._turns.may(_DEATHS, self._pidfds[session]):
            return
        began = time.perf_counter()
        self._drop(session)
        self._died(session)
        self._turns.charge(_DEATHS, time.perf_counter() - began)

    def forget(self, session: int) -> None:
        """Watch a session's process no more."""
        self._drop(session)
        self._store.forget_process(session)

    def _drop(self, session: int) -> None:
        self._images.pop(session, None)
        pidfd = self._pidfds.pop(session, None)
        if pidfd is not None:
            self._io.remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Watch nobody any more; the store keeps what a later daemon watches."""
        for session in list(self._pidfds):
            self._drop(session)
