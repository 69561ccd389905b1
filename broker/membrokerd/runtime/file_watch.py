"""Watches the daemon's files while it runs, because a cleaner of the runtime directory or a person may remove them.

Files in `state/` are rewritten: the daemon still holds the lock on the device's directory. A loss that cannot be
repaired is logged once, with what to do.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from ..restart.journal import Journal
from ..system import logs
from ..system.device_directory import DeviceDirectory, DirectoryError

LOOK_SECONDS = 2.0


class FileWatch:
    """Checks every LOOK_SECONDS, on the event loop's thread. `compact` starts to rewrite the journal."""

    def __init__(self, directory: DeviceDirectory, journal: Journal, compact: Callable[[], None]) -> None:
        self._directory = directory
        self._journal = journal
        self._compact = compact
        self._reported: set[Path] = set()
        self._journal_lost = False
        self._io = asyncio.get_running_loop()
        self._timer = self._io.call_later(LOOK_SECONDS, self._look)

    def close(self) -> None:
        """Stop checking."""
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._io.call_later(LOOK_SECONDS, self._look)
        if not self._directory.is_in_place():
            self._warn_once(
                self._directory.root,
                "the daemon's directory was removed or replaced: workers cannot connect, another daemon could start "
                "on this device, and a restart would lose the books; end the workers, then restart this daemon",
            )
            return
        try:
            self._restore()
        except (OSError, DirectoryError) as error:
            self._warn_once(
                self._directory.state, f"files that were removed there cannot be rewritten: {error}; fix that"
            )
        for path in self._directory.lost_sockets():
            self._warn_once(
                path,
                "a socket was removed or replaced, so workers cannot connect to it; restart the daemon: "
                "running workers are not disturbed",
            )

    def _restore(self) -> None:
        """Rewrite the files that are missing in `state/`."""
        restored = self._directory.restore(self._journal.epoch)
        if not self._journal.is_in_place():
            self._journal_lost = True
            self._compact()
        if self._journal_lost and self._journal.is_in_place():
            self._journal_lost = False
            restored.append("journal")
        if restored:
            logs.warn(
                "files of the running daemon were removed and have been rewritten: find out what removes them",
                directory=str(self._directory.state),
                files=" ".join(restored),
            )

    def _warn_once(self, path: Path, message: str) -> None:
        if path not in self._reported:
            self._reported.add(path)
            logs.warn(message, path=str(path), pid=os.getpid())
