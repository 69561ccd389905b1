"""The terminal of a guest: its program has it, as if a shell had started the program itself."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon

PROGRAM = """
import os, select, signal
signal.signal(signal.SIGWINCH, lambda *_: os.write(1, b"columns=%d\\n" % os.get_terminal_size(0).columns))
# A signal that comes just before a read would not end it: its handler would run after the next line.
woken, wakes = os.pipe()
os.set_blocking(wakes, False)
signal.set_wakeup_fd(wakes)
os.write(1, b"begun\\n")
while True:
    ready, _, _ = select.select([0, woken], [], [])
    if woken in ready:
        os.read(woken, 1)
    elif line := os.read(0, 4096):
        os.write(1, b"heard=" + line)
    else:
        break
"""


class Terminal:
    """An interactive shell in a terminal of its own."""

    def __init__(self, master: int) -> None:
        self._master, self._seen = master, ""

    def types(self, text: str) -> None:
        os.write(self._master, text.encode())

    def shows(self, text: str) -> str:
        """Wait for a text, and return what was shown before it and after the last one."""
        while text not in self._seen:
            assert select.select([self._master], [], [], DEADLINE_SECONDS)[0], self._seen
            self._seen += os.read(self._master, 1 << 16).decode()
        before, _, self._seen = self._seen.partition(text)
        return before

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    master, slave = os.openpty()
    shell = ["setsid", "--ctty", "--wait", "/bin/sh", "-i"]
    with subprocess.Popen(shell, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "PS1": "> "}) as process:
        os.close(slave)
        yield Terminal(master)
        os.close(master)  # a shell ends with its terminal
        process.wait(DEADLINE_SECONDS)


@pytest.mark.shared_daemon
def test_its_program_has_the_terminal_of_the_command(daemon: Daemon, terminal: Terminal, tmp_path: Path) -> None:
    """Lines, the size, Ctrl-Z and `fg`, and Ctrl-C, once."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = f"{sys.executable} -m membroker.cli.main run --guest --endpoint {daemon.endpoint()} --model one"
    terminal.types(f"{command} --memory 2MiB -- {sys.executable} {file}\n")
    terminal.shows("begun")
    terminal.types("one\n")
    terminal.shows("heard=one")
    terminal.resize(91)
    terminal.shows("columns=91")
    terminal.types("\x1a")
    terminal.shows("Stopped")
    terminal.shows("> ")
    terminal.types("fg\n")
    terminal.types("two\n")
    terminal.shows("heard=two")
    terminal.types("\x03")
    terminal.shows("> ")
    terminal.types("echo status=$?=\n")
    terminal.shows("status=130=")
