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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pyte

# The shell's part: the program is in the terminal's foreground, so that it hears of Ctrl-C and of a new size.
_IN_FOREGROUND = (
    "import fcntl,os,sys,termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
)


class _Screen(pyte.Screen):
    """A screen that knows all that curses sends to a terminal of the type `screen`, or notes that it does not.

    pyte skips what it does not know, such as the command by which curses scrolls several lines.
    """

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__(columns, lines)
        self.is_whole = True
        """Whether every command so far was known. Where one was not, the screen is no longer what a person sees."""

    def scroll_up(self, count: int = 1) -> None:
        """Move the lines between the margins up, and leave the cursor where it is."""
        self._at_top(self.delete_lines, count)

    def scroll_down(self, count: int = 1) -> None:
        """Move the lines between the margins down, and leave the cursor where it is."""
        self._at_top(self.insert_lines, count)

    def _at_top(self, move: Callable[[int], None], count: int) -> None:
        x, y = self.cursor.x, self.cursor.y
        self.cursor.y = self.margins.top if self.margins else 0
        move(count)
        self.cursor.x, self.cursor.y = x, y

    def delete_lines(self, count: int | None = None) -> None:
        """As pyte, which leaves a line as it is where a line that was never written moves onto it."""
        for number in range(self.lines):
            self.buffer[number]  # which makes the line
        super().delete_lines(count)

    def set_keypad(self) -> None:
        """Do nothing: what the keypad sends."""

    def debug(self, *_: Any, **__: Any) -> None:
        """Note a command that is unknown."""
        self.is_whole = False


class _Stream(pyte.ByteStream):
    escape: ClassVar = {**pyte.ByteStream.escape, "=": "set_keypad", ">": "set_keypad"}
    csi: ClassVar = {**pyte.ByteStream.csi, "S": "scroll_up", "T": "scroll_down"}


class Terminal:
    """A program on a terminal of `columns` by `lines`. `screen` is what a person sees."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], columns: int = 120, lines: int = 24) -> None:
        self._master, self._slave = pty.openpty()
        self._lock = threading.Lock()
        self._screen = _Screen(columns, lines)
        self._stream = _Stream(self._screen)
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
            is_over = self.process.poll() is not None  # first: what it writes before its end is read
            if select.select([self._master], [], [], 0 if is_over else 0.2)[0]:
                data = os.read(self._master, 1 << 16)
                with self._lock:
                    self.output += data
                    self._stream.feed(data)
            elif is_over:
                return

    def lines(self) -> list[str]:
        """Return the lines of the screen, without spaces at their ends. It may be half drawn."""
        with self._lock:
            assert self._screen.is_whole, f"a command that this screen does not know: {self.output!r}"
            return [line.rstrip() for line in self._screen.display]

    def colour(self, number: int) -> str:
        """Return the colour of a line's first character."""
        with self._lock:
            return str(self._screen.buffer[number][0].fg)

    def text(self) -> str:
        return "\n".join(self.lines())

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Change the size, as a person who pulls at the window."""
        with self._lock:
            self._screen.resize(lines, columns)
            self._set_size(columns, lines)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait(self, seconds: float) -> int:
        status = self.process.wait(seconds)
        self._reader.join()
        return status

    def attributes(self) -> list[Any]:
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for one in (self._master, self._slave):
            with contextlib.suppress(OSError):
                os.close(one)
