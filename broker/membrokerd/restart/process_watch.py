"""Watches the processes of sessions: one pidfd for each session, from its Hello until the session is forgotten.

A session outlives its connection and this daemon, so the pidfd does not belong to the connection, and the descriptor
store has a copy. A process that starts another program by exec() counts as dead: the kernel has unmapped its memory and
closed its descriptors. It reports deaths and must never decide what follows from one.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from functools import partial

from ..system import logs
from ..system.pods import NO_POD, Pod, PodNames
from ..system.process import identity_of, image_of, pod_of
from ..system.turns import Turns
from .descriptor_store import Store

EXEC_SECONDS = 0.2
"""The delay between the end of a connection and the check for an exec(), which closes descriptors before it maps the
new program."""

_DEATHS = "the dead"
"""The name under which deaths wait for their turn. It is not a valid tenant's name."""


class Watch:
    """Calls `died` once for each session whose process is dead."""

    def __init__(self, store: Store, died: Callable[[int], None], turns: Turns, names: PodNames) -> None:
        self._store = store
        self._died = died
        self._turns = turns
        self._names = names
        self._pidfds: dict[int, int] = {}
        self._images: dict[int, tuple[int, tuple[str, ...]]] = {}
        """The pid and the image of each session's process, if the broker can see them."""
        self._pods: dict[int, Pod] = {}
        """The pod of each session's process, where there is one."""
        self._io = asyncio.get_running_loop()

    def add(self, session: int, pidfd: int, pid: int) -> None:
        """Watch a session's process, and take ownership of the pidfd. A session that is watched keeps its first pidfd.

        Sessions that the same process had before an exec() end.
        """
        is_known = session in self._pidfds
        if is_known:
            os.close(pidfd)
        else:
            self._pidfds[session] = pidfd  # first: whatever follows may fail, and `forget` closes it
        image = image_of(pid)
        if image is not None:
            for other, seen in list(self._images.items()):
                if other != session and seen[0] == pid and seen[1] != image:
                    self._replaced(other)
            self._images[session] = pid, image
        if is_known:
            return
        if uid := pod_of(pid, pidfd):
            self._know_pod(session, Pod(uid))
            self._names.find(uid, partial(self._named, session, uid))
        self._store.keep_process(session, pidfd)
        self._io.add_reader(pidfd, self._turns.put, _DEATHS, partial(self._ended, session))

    def inherit(self, session: int, pid: int, process: str, kept: int | None) -> None:
        """Watch the process of an earlier daemon's session, by the kept pidfd or else by its pid."""
        pidfd = os.dup(kept) if kept is not None else self._find(session, pid, process)
        if pidfd is not None:
            self.add(session, pidfd, pid)

    def pidfd(self, session: int) -> int | None:
        """Return the pidfd of a session's process, which the watch still owns; None if the process is dead, or the
        pidfd was lost."""
        return self._pidfds.get(session)

    def pod(self, session: int) -> Pod:
        """Return the pod of a session's process, as far as it is known."""
        return self._pods.get(session, NO_POD)

    def _named(self, session: int, uid: str, name: str) -> None:
        if session in self._pods:
            self._know_pod(session, Pod(uid, name))
            logs.log_pod(session)

    def _know_pod(self, session: int, pod: Pod) -> None:
        self._pods[session] = pod
        logs.know_pod(session, pod)

    def look(self, session: int) -> None:
        """Check, after EXEC_SECONDS, whether an exec() of the process ended the session's connection."""
        if session in self._images:
            self._io.call_later(EXEC_SECONDS, self._look, session)

    def _look(self, session: int) -> None:
        pid, image = self._images.get(session, (0, None))
        now = image_of(pid)
        if now is not None and now != image:
            self._replaced(session)

    def _replaced(self, session: int) -> None:
        logs.log(
            "a process started another program by exec(): its session ends as if the process had died",
            session=f"sessions/{session:x}",
            pid=self._images[session][0],
        )
        self._drop(session)
        self._io.call_soon(self._died, session)  # later: the caller may be in the middle of beginning another session

    def _find(self, session: int, pid: int, process: str) -> int | None:
        """Return a pidfd of a process that was seen before, or None if it is dead or cannot be found."""
        if pid <= 0:
            logs.warn(
                "the broker cannot tell whether the process of this session is alive: it is in another pid namespace, "
                "and its pidfd was lost with the descriptor store; when it has ended, use `membroker forget`",
                session=f"sessions/{session:x}",
            )
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno != errno.ESRCH:  # it may be alive: a sandbox refuses the call, or no descriptor is left
                raise
        else:
            if identity_of(pidfd, pid) == process:
                return pidfd
            os.close(pidfd)  # another process has this pid now
        self._io.call_soon(self._died, session)
        return None

    def _ended(self, session: int) -> bool:
        """Report a death."""
        if session in self._pidfds:
            self._drop(session)
            self._died(session)
        return False

    def forget(self, session: int) -> None:
        """Stop watching a session's process."""
        self._drop(session)
        self._pods.pop(session, None)
        self._store.forget_process(session)

    def _drop(self, session: int) -> None:
        self._images.pop(session, None)
        pidfd = self._pidfds.pop(session, None)
        if pidfd is not None:
            self._io.remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Stop watching. The store keeps the pidfds for the next daemon."""
        for session in list(self._pidfds):
            self._drop(session)
