"""What keeps a run of the tests apart from the machine and from other runs, and what notices anything that it left.

Owns the surroundings of a test process (signals, variables, its directory below /tmp) and those of each test. Programs
that tests start inherit them. It must never look for anything that another run may have made.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from . import template
from .daemons import until

RUN_VARIABLE: Final = "MEMBROKER_TEST_RUN"
"""In the environment of each process of this run: its directory. The directory of a nested run is inside it."""
_OF_TESTS = ("MEMBROKER_TEST_", "MEMBROKER_REQUIRE_")
_OF_A_RUN = ("MEMBROKER_REWRITE", "MEMBROKER_SEED", "MEMBROKER_SEEDS", "MEMBROKER_POINTS")
"""What the tests themselves are told. Every other MEMBROKER_… is for programs, and one of the shell would be heard."""
_OF_THE_SHELL = (
    *("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),  # without them these are below HOME
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "FDSTORE"),
    *("STATE_DIRECTORY", "RUNTIME_DIRECTORY", "INVOCATION_ID", "JOURNAL_STREAM"),  # a CI is a unit of systemd
    *("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES"),
)
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
"""An interpreter ignores these itself, and `subprocess` does not hand that on."""


class Run:
    """This process of the run: `directory` is its own, removed at the end, and its TMPDIR."""

    def __init__(self) -> None:
        _reset_signals()
        os.umask(0o022)
        for name in list(os.environ):
            if name in _OF_THE_SHELL or (name.startswith("MEMBROKER_") and not _is_for_tests(name)):
                del os.environ[name]
        # A process of pytest-xdist has a directory in that of the process that started it.
        self.directory = _directory(os.environ.get("PYTEST_XDIST_WORKER"))
        self._owner = os.getpid()
        atexit.register(self._remove)
        self.directory.chmod(0o1777)  # as /tmp: some tests start programs of other users
        os.environ |= {"TMPDIR": str(self.directory), RUN_VARIABLE: str(self.directory)}
        tempfile.tempdir = None
        kept = self.directory / "run"
        for name in ("home", "xdg"):
            (kept / name).mkdir(parents=True)
        # For fixtures that are older than a test; each test has its own. What is derived, such as compiled code, may be
        # shared by the tests of this process.
        cache = kept / "cache"
        os.environ |= {"XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch"), **_places(kept)}
        self._known = set(os.listdir(self.directory))
        self._left: dict[str, str] = {}
        """What is in the directory, with the test in which it was first seen."""

    def remember(self, test: str) -> None:
        """Note what this test has left in the directory; a fixture of its file may still remove it."""
        for name in os.listdir(self.directory):
            if name not in self._known:
                self._left.setdefault(name, test)

    def leftovers(self) -> list[str]:
        """Return what the tests of this process have left: processes that do not end by themselves, and files."""
        template.end_all()
        with suppress(AssertionError):
            until(lambda: not self._processes())
        self.remember("the end")
        files = [f"{self.directory / name} ({test})" for name, test in self._left.items() if self._is_there(name)]
        return [*self._processes(), *files]

    def _is_there(self, name: str) -> bool:
        return os.path.lexists(self.directory / name)

    def _processes(self) -> list[str]:
        """Return each process of this run but this one: its pid, its command line and the test that started it."""
        found, mark = [], f"{RUN_VARIABLE}={self.directory}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):
                environment = (entry / "environ").read_bytes().split(b"\0")
                if not any(line.startswith(mark) for line in environment):
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                tests = [line[20:].decode() for line in environment if line.startswith(b"PYTEST_CURRENT_TEST=")]
                test = template.started.get(int(entry.name)) or "".join(tests) or "no test"
                found.append(f"process {entry.name}, {command[:200]} ({test})")
        return found

    def _remove(self) -> None:
        if os.getpid() == self._owner:  # a test's fork has inherited this
            shutil.rmtree(self.directory, ignore_errors=True)


def _reset_signals() -> None:
    """Undo what nohup, a shell's background job or a CI has told every program that it starts."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN and number not in _PYTHON_IGNORES:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _is_for_tests(name: str) -> bool:
    return name.startswith(_OF_TESTS) or name in _OF_A_RUN


def _directory(worker: str | None) -> Path:
    if worker is not None:
        directory = Path(tempfile.gettempdir(), worker)
        directory.mkdir()
        return directory
    # A longer TMPDIR leaves too little: the path of a socket has 107 bytes, and the tests' own take nearly all of them.
    return Path(tempfile.mkdtemp(prefix="mb-", dir="/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else None))


def _places(directory: Path) -> dict[str, str]:
    """Return the variables that say where a program of this user keeps what."""
    return {
        "HOME": str(directory / "home"),
        "XDG_RUNTIME_DIR": str(directory / "xdg"),
        "MEMBROKER_SYSTEM_DIRECTORY": str(directory / "system"),
    }


@contextmanager
def surroundings(*, own_home: bool = True) -> Iterator[None]:
    """Give a test its own runtime and state directories, and none of root's broker on this machine."""
    with tempfile.TemporaryDirectory(prefix="t-") as name, pytest.MonkeyPatch.context() as patch:
        directory = Path(name)
        directory.chmod(0o755)
        for place in ("home", "xdg"):
            (directory / place).mkdir()
        for variable, value in _places(directory).items():
            if own_home or variable != "HOME":
                patch.setenv(variable, value)
        yield
