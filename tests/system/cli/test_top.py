"""`membroker top` on a real terminal, beside real daemons: what it shows, its keys, and what it survives."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, hold_still, running, until
from tests.support.template import run as run_python
from tests.support.terminal import Terminal

import membroker
from membroker.admin import Admin

COMMAND = ("-m", "membroker.cli.main", "top", "--interval", "0.1")
SILENT = re.compile(r"^host: no answer for (?:[2-9]|\d\d+) s, these numbers are from (\d\d:\d\d:\d\d)Z$", re.MULTILINE)
CONFIG = {"capacity": "1GiB", "tenants": {"red": {"guarantee": "256MiB"}, "blue": {}}}


@contextmanager
def top(*arguments: str, columns: int = 150, lines: int = 24, **variables: str) -> Iterator[Terminal]:
    away = ("MEMBROKER_ENDPOINT", "XDG_RUNTIME_DIR", "TERM")
    clean = {key: value for key, value in os.environ.items() if key not in away}
    terminal = Terminal([*COMMAND, *arguments], {**clean, **variables}, columns, lines)
    try:
        yield terminal
    except BaseException:
        print(terminal.text())  # what a person would see
        raise
    finally:
        terminal.close()


def names(terminal: Terminal) -> list[str]:
    """Return the first column below the heads."""
    lines = terminal.lines()
    heads = next((number for number, line in enumerate(lines) if line.startswith(("model ", "tenant "))), len(lines))
    return [line.split()[0] for line in lines[heads + 1 :] if line]


def row(terminal: Terminal, name: str) -> list[str]:
    return next((line.split() for line in terminal.lines() if line.startswith(name + " ")), [])


def colour(terminal: Terminal, name: str) -> str | None:
    lines = terminal.lines()
    return next((terminal.colour(number) for number, line in enumerate(lines) if line.startswith(name + " ")), None)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running(CONFIG) as one:
        yield one


def test_an_operator_sees_all_tenants_live_and_sorts_and_filters(
    daemon: Daemon, red: membroker.Client, blue: membroker.Client
) -> None:
    """Memory is borrowed, waited for and refused while the operator looks, sorts, and looks at tenants."""
    chat, _, night = red.model("chat", limit="512MiB"), red.model("code"), blue.model("night")
    with chat.allocate("128MiB"), night.allocate("512MiB"), top("--endpoint", str(daemon.root)) as terminal:
        until(lambda: names(terminal) == ["blue/night", "red/chat", "red/code"])
        assert "lent 640.0 MiB of 1.0 GiB, free 384.0 MiB, 2 sessions" in terminal.lines()[0]
        assert row(terminal, "red/chat")[1:4] == ["128.0MiB", "-", "512.0MiB"]
        with suppress(membroker.OutOfMemory):
            chat.allocate("1GiB")
        until(lambda: row(terminal, "red/chat")[-1:] == ["1"])
        until(lambda: colour(terminal, "red/chat") == "brown")  # pyte's name of yellow
        assert colour(terminal, "blue/night") == "default"
        terminal.press("d")
        until(lambda: names(terminal)[:1] == ["red/chat"])
        terminal.press("nR")
        until(lambda: names(terminal) == ["red/code", "red/chat", "blue/night"])
        terminal.press("/CO")
        until(lambda: "names that contain: CO_" in terminal.text())
        terminal.press("\r")
        until(lambda: names(terminal) == ["red/code"])
        terminal.press("/\r")
        until(lambda: len(names(terminal)) == 3)
        terminal.press("t")
        until(lambda: names(terminal) == ["red", "blue"])
        assert row(terminal, "red")[1:3] == ["128.0MiB", "256.0MiB"], "the tenant's own guarantee"
        terminal.press("q")
        assert terminal.wait(DEADLINE_SECONDS) == 0
        assert terminal.attributes() == terminal.before, "the terminal is as it was"
        with top("--endpoint", str(daemon.endpoint("blue"))) as tenants:
            until(lambda: names(tenants) == ["blue/night"])


def test_a_narrow_terminal_cuts_neither_the_keys_nor_the_device(daemon: Daemon, red: membroker.Client) -> None:
    """80 columns are what most terminals begin with: the help must have its last keys, and DRAINED must be seen.

    A person pulls at the window, down to one cell, and back.
    """
    with red.model("chat").allocate("64MiB"), closing(Admin(daemon.admin / "grpc.sock")) as admin:
        admin.drain(None, exits=False)
        with top("--endpoint", str(daemon.root), columns=80) as terminal:
            until(lambda: names(terminal) == ["red/chat"])
            assert terminal.lines()[0].endswith(", 1 session, DRAINED")
            terminal.press("h")
            until(lambda: all(key in terminal.text() for key in ("R reverse", "t tenants", "/ filter", "q quit")))
            terminal.resize(1, 1)
            terminal.press("n")
            terminal.resize(125, 12)  # docs/operating.md: enough for all columns
            until(lambda: any(line.endswith("      rate   refused") for line in terminal.lines()))


@pytest.mark.parametrize(("end", "status"), [("\x03", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_end_leaves_the_terminal_as_it_was(daemon: Daemon, end: str | signal.Signals, status: int) -> None:
    with top("--endpoint", str(daemon.root)) as terminal:
        until(lambda: "no models" in terminal.text())
        assert terminal.attributes() != terminal.before
        if isinstance(end, str):
            terminal.press(end)
        else:
            terminal.process.send_signal(end)
        assert terminal.wait(DEADLINE_SECONDS) == status
        assert terminal.attributes() == terminal.before
        assert b"Traceback" not in terminal.output
        assert terminal.output.rindex(b"\x1b[?1049l") > terminal.output.rindex(b"\x1b[?1049h")


def test_a_terminal_that_goes_away_without_a_signal_ends_it(daemon: Daemon) -> None:
    """Below setsid, or in a container, no SIGHUP comes. It must not look for keys forever, as fast as it can."""
    master, slave = pty.openpty()
    command = [sys.executable, *COMMAND, "--endpoint", str(daemon.root)]
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "screen"}, start_new_session=True
    ) as process:
        os.close(slave)
        try:
            shown = b""
            while b"device:" not in shown:
                shown += os.read(master, 1 << 16)
            os.close(master)
            assert process.wait(DEADLINE_SECONDS) != 0
        finally:
            process.kill()


def test_numbers_of_a_silent_broker_are_marked(daemon: Daemon, red: membroker.Client) -> None:
    """What the screen shows was true once, and the operator is told when. The keys work all the while."""
    with red.model("chat").allocate("64MiB"), top("--endpoint", str(daemon.root)) as terminal:
        until(lambda: row(terminal, "red/chat")[1:2] == ["64.0MiB"])
        with hold_still(daemon):
            until(lambda: SILENT.search(terminal.text()))
            until(lambda: row(terminal, "red/chat")[1:2] == ["64.0MiB"])
            terminal.press("h")
            until(lambda: "R reverse" in terminal.text())
        until(lambda: not SILENT.search(terminal.text()))


def test_all_devices_of_a_machine() -> None:
    """Two brokers; the second one comes while the screen is up, dies, and comes back.

    Why it is away takes several lines of a screen this narrow, which curses then scrolls away.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mb-") as directory,
        running({**CONFIG, "runtime_directory": f"{directory}/membroker"}) as first,
        membroker.connect(first.endpoint("red")) as one,
    ):
        one.model("chat")
        with top(XDG_RUNTIME_DIR=directory, columns=80) as terminal:
            until(lambda: names(terminal) == ["red/chat"])
            second = Daemon(Path(directory), {**CONFIG, "runtime_directory": f"{directory}/membroker"}, device=1)
            try:
                with membroker.connect(second.endpoint("blue")) as other:
                    other.model("draw")
                    until(lambda: sorted(names(terminal)) == ["blue/draw", "red/chat"])
                    until(lambda: row(terminal, "blue/draw")[-1:] == ["host-1"])  # the screen may be half drawn
                    second.kill()
                    until(lambda: "is dead and left its socket behind" in " ".join(terminal.text().split()))
                    until(lambda: names(terminal) == ["red/chat"])
                    second.start_again()
                    until(lambda: sorted(names(terminal)) == ["blue/draw", "red/chat"])
            finally:
                second.stop()


def test_without_a_terminal_or_a_broker_it_is_a_sentence(daemon: Daemon, tmp_path: Path) -> None:
    done = run_python([*COMMAND, "--endpoint", str(daemon.root)])
    assert done.returncode == 2
    assert "there is no terminal: use `membroker models`" in done.stderr
    with top("--endpoint", str(tmp_path / "tenants" / "red")) as terminal:
        assert terminal.wait(DEADLINE_SECONDS) == 1
        assert "start one with `membrokerd`" in terminal.output.decode()
    for kind in ("no-such-terminal", "dumb"):
        with top("--endpoint", str(daemon.root), TERM=kind) as terminal:
            assert terminal.wait(DEADLINE_SECONDS) == 1
            assert "this terminal cannot show it" in terminal.output.decode()
