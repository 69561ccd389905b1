"""The names of Kubernetes pods by uid, from the kubelet's directories for their logs.

A cgroup has only a pod's uid. The kubelet makes /var/log/pods/NAMESPACE_NAME_UID before the pod's containers start, and
removes it after the pod. Where the daemon cannot see that directory, pods have no names. It must never open what is in
these directories, and never decide anything by a name.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from .process import POD_UID

POD_LOGS = Path("/var/log/pods")
MOST_PODS = 4096
"""Entries of the directory that are looked at. A kubelet has 110 pods, unless it is told otherwise."""
_LABEL = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_ENTRY = re.compile(rf"({_LABEL})_({_LABEL}(?:\.{_LABEL})*)_({POD_UID})")


class Pod(NamedTuple):
    """A pod's uid, and its name as NAMESPACE/NAME; each is "" if it is not known."""

    uid: str = ""
    name: str = ""

    def __bool__(self) -> bool:
        return bool(self.uid)

    def fields(self) -> dict[str, str]:
        """Return what a log line says of it: nothing, if there is no pod."""
        return {key: value for key, value in (("pod", self.uid), ("pod_name", self.name)) if value}


NO_POD = Pod()


class PodNames:
    """The names as they were read last. They are read on a thread, again for each uid that was not asked for before."""

    def __init__(self) -> None:
        self._io = asyncio.get_running_loop()
        self._names: dict[str, str] = {}
        self._asked: list[tuple[str, Callable[[str], None]]] = []
        self._is_reading = False

    def find(self, uid: str, done: Callable[[str], None]) -> None:
        """Give `done` the name of a pod as NAMESPACE/NAME, or "", later on the event loop's thread."""
        if uid in self._names:
            self._io.call_soon(done, self._names[uid])
            return
        self._asked.append((uid, done))
        if not self._is_reading:
            self._is_reading = True
            self._read()

    def _read(self) -> None:
        asked, self._asked = self._asked, []

        def read() -> None:
            names = read_names()
            with suppress(RuntimeError):  # the daemon has ended meanwhile
                self._io.call_soon_threadsafe(took, names)

        def took(names: dict[str, str]) -> None:
            # A uid without a directory is kept, too: else a worker that connects again and again would have it read.
            self._names = {uid: "" for uid, _ in asked} | names
            for uid, done in asked:
                done(self._names[uid])
            self._is_reading = bool(self._asked)
            if self._asked:
                self._read()

        try:
            threading.Thread(target=read, name="pods", daemon=True).start()
        except RuntimeError:  # no thread can be started: a session is worth more than its pod's name
            self._io.call_soon(took, {})


def read_names() -> dict[str, str]:
    """Return the names of this node's pods by uid, as NAMESPACE/NAME; none for a uid that two directories have."""
    found: dict[str, str] = {}
    try:
        with os.scandir(POD_LOGS) as entries:
            for entry in islice(entries, MOST_PODS):
                match = _ENTRY.fullmatch(entry.name)
                if match is not None and entry.is_dir(follow_symlinks=False):
                    found[match[3]] = "" if match[3] in found else f"{match[1]}/{match[2]}"
    except OSError:
        return {}
    return found
