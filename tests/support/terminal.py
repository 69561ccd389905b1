"""A terminal for tests: a program in a pty of its own, and what its screen shows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pyte

# The shell's part: the program is in the terminal's foreground, so that it hears of Ctrl-C and of a new size.
_IN_FOREGROUND = (
    "import fcntl,os,sys,termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
)


class Terminal:
    """A program on a terminal of `columns` by `lines`. `screen` is what a person sees."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], columns: int = 120, lines: int = 24) -> None:
        self._master, self._slave = pty.openpty()
        self._lock = threading.Lock()
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.output = b""
        self.before = termios.tcgetattr(self._slave)
        self._set_size(columns, lines)
        command = [sys.executable, "-c", _IN_FOREGROUND, sys.executable, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={"TERM": "screen", **env},  # of xterm, pyte does not know every command
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            ready = select.select([self._master], [], [], 0.2)[0]
            if ready:
                data = os.read(self._master, 1 << 16)
                with self._lock:
                    self.output += data
                    self._stream.feed(data)
            elif self.process.poll() is not None:
                return

    def lines(self) -> list[str]:
        """Return the lines of the screen, without spaces at their ends."""
        with self._lock:
            return [line.rstrip() for line in self._screen.display]

    def text(self) -> str:
        """Return the screen as one text."""
        return "\n".join(self.lines())

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Change the size, as a person who pulls at the window."""
        with self._lock:
            self._screen.resize(lines, columns)
            self._set_size(columns, lines)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait(self, seconds: float) -> int:
        """Return the exit status."""
        status = self.process.wait(seconds)
        self._reader.join()
        return status

    def attributes(self) -> list[Any]:
        """Return the terminal's modes."""
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        """End the program, if it runs, and the terminal."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for one in (self._master, self._slave):
            with contextlib.suppress(OSError):
                os.close(one)
