"""The terminal of a guest: its program has it, as if a shell had started the program itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.daemons import Daemon, until
from tests.support.terminal import Terminal

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


class Shell(Terminal):
    """An interactive shell in a terminal of its own."""

    def __init__(self) -> None:
        super().__init__(["-c", "import os; os.execvp('sh', ['sh', '-i'])"], {**os.environ, "PS1": "> "})
        self._seen = 0

    def shows(self, text: str) -> None:
        """Wait for a text after the last one."""
        until(lambda: text.encode() in self.output[self._seen :])
        self._seen = self.output.index(text.encode(), self._seen) + len(text)


@pytest.fixture
def terminal() -> Iterator[Shell]:
    with closing(Shell()) as shell:
        yield shell


@pytest.mark.shared_daemon
def test_its_program_has_the_terminal_of_the_command(daemon: Daemon, terminal: Shell, tmp_path: Path) -> None:
    """Lines, the size, Ctrl-Z and `fg`, and Ctrl-C, once."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = f"{sys.executable} -m membroker.cli.main run --guest --endpoint {daemon.endpoint()} --model one"
    terminal.press(f"{command} --memory 2MiB -- {sys.executable} {file}\n")
    terminal.shows("begun")
    terminal.press("one\n")
    terminal.shows("heard=one")
    terminal.resize(91, 24)
    terminal.shows("columns=91")
    terminal.press("\x1a")
    terminal.shows("Stopped")
    terminal.shows("> ")
    terminal.press("fg\n")
    terminal.press("two\n")
    terminal.shows("heard=two")
    terminal.press("\x03")
    terminal.shows("> ")
    terminal.press("echo status=$?=\n")
    terminal.shows("status=130=")
