"""The look after the daemon's files while it runs: a cleaner of the runtime directory, or a person, may remove them.

What is in `state/` is written again, since no other daemon can own the device's directory meanwhile. What cannot be
made again is told once, with what to do.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from .home import Home, HomeError
from .observe import logs
from .restart.journal import Journal

LOOK_SECONDS = 2.0


class Lookout:
    """Looks every LOOK_SECONDS, on the event loop's thread. `compact` begins to write the journal again."""

    def __init__(self, home: Home, journal: Journal, compact: Callable[[], None]) -> None:
        self._home = home
        self._journal = journal
        self._compact = compact
        self._told: set[Path] = set()
        self._journal_lost = False
        self._io = asyncio.get_running_loop()
        self._timer = self._io.call_later(LOOK_SECONDS, self._look)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._io.call_later(LOOK_SECONDS, self._look)
        if not self._home.is_in_place():
            self._tell(
                self._home.root,
                "the daemon's directory was removed or replaced: nobody can connect, another daemon could start on "
                "this device, and these books end with this process; end the workers, stop it, and start it again",
            )
            return
        try:
            self._restore()
        except (OSError, HomeError) as error:
            self._tell(self._home.state, f"what was removed there cannot be written again: {error}; mend that")
        for path in self._home.lost_sockets():
            self._tell(
                path, "a socket was removed or replaced: nobody can connect to it; restart the daemon, workers go on"
            )

    def _restore(self) -> None:
        """Write again what is gone of `state/`."""
        restored = self._home.restore(self._journal.epoch)
        if not self._journal.is_in_place():
            self._journal_lost = True
            self._compact()
        if self._journal_lost and self._journal.is_in_place():
            self._journal_lost = False
            restored.append("journal")
        if restored:
            logs.warn(
                "the daemon's files were removed while it runs, and are written again: find out who removes them",
                directory=str(self._home.state),
                files=" ".join(restored),
            )

    def _tell(self, path: Path, what: str) -> None:
        if path not in self._told:
            self._told.add(path)
            logs.warn(what, path=str(path), pid=os.getpid())
