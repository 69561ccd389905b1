"""`membroker run --guest`: stay the parent of a program, and hold its session.

Owns the order of the start, the program's signals and its exit status. The program has the terminal, and all signals
that this process gets. When it stops for the terminal, so does this process, as a shell expects of a job. When it ends,
all that it has left behind is ended, and this process ends in the same way.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from .. import Client, Model
from ..errors import MembrokerError, OutOfMemory
from ..ext import enter, names
from ..vmm.driver import DriverUnavailable
from ..vmm.sizes import format_size
from .cuda import CudaSuspender
from .door import Door, is_listening
from .keeper import WAIT_SECONDS, Guest
from .settings import Ports, Settings
from .stand_in import StandInSuspender
from .suspender import Suspender
from .tree import ProcessTree, adopt_orphans
from .warden import VARIABLE, Warden

FORWARDED = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH),
)
_FOR_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""What stops a job of a shell."""
_VARIABLES = (names.ENDPOINT_VARIABLE, names.MODEL_VARIABLE, names.LIMIT_VARIABLE)
_KILL_SECONDS = 10.0
OUTAGE_SECONDS = 30.0
"""How long a call waits for the next daemon, as `connect` has it."""


def run(
    found: str,
    program: list[str],
    endpoint: str | None,
    model: str,
    settings: Settings,
    *,
    ports: Ports | None,
    timeout: float | None,
) -> int:
    """Run a program as a guest, and return its exit status; one that a signal ended ends this process likewise.

    `found` is the program's file. Raises a `MembrokerError` if it cannot be started as a guest.
    """
    if VARIABLE in os.environ:
        raise MembrokerError("this is part of a guest, which sleeps as a whole: run the program without --guest")
    with ExitStack() as stack:
        door = None
        if ports is not None:
            try:
                door = Door(ports, say)
            except OSError as error:
                is_elsewhere = error.errno in (errno.EADDRNOTAVAIL, socket.EAI_NONAME)
                hint = ", and ADDRESS of --door [ADDRESS:]PORT:PORT must be one of this machine" * is_elsewhere
                said = str(error.strerror).partition(" (while ")[0]  # Python repeats the address
                raise MembrokerError(f"the door cannot listen at {ports.address}:{ports.port}: {said}{hint}") from error
            stack.callback(door.close)
        adopt_orphans()
        warden = Warden()
        stack.callback(warden.close)
        # And so in all threads from here on. A word on a terminal of others must not stop this process (SIGTTOU).
        signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD, signal.SIGTTOU})
        who = f"membroker run --guest: {Path(found).name}"
        line = _Line(lambda: enter(endpoint, client=who, outage=OUTAGE_SECONDS), model)
        stack.callback(line.close)
        client = line.client
        suspender = suspender_for(client, settings)
        stack.callback(suspender.close)
        seen = seen_file(client, model)
        if settings.is_auto:
            settings = replace(settings, memory=_read(seen))
        settings = replace(settings, charges_host=client.capacities.get("host", 0) > 0)
        tree = ProcessTree(line.pids, [warden.pid])
        child = _Program()
        listens = partial(is_listening, ports.program) if ports is not None else lambda: True
        guest = Guest(
            line.open_model, suspender, tree, settings, say=say, end=child.end, watch=warden.watch, listens=listens
        )
        _borrow(guest, settings, timeout)
        child.start(found, program, {VARIABLE: warden.mark})
        stack.callback(tree.end)
        warden.watch([child.pid])
        guest.start()
        if door is not None:
            door.open(guest)
        status = child.wait(guest, warden)
        guest.close()
        _write(seen, guest.most_used)
    if os.WIFSIGNALED(status):
        _die_of(os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def say(text: str) -> None:
    """Tell the user of the terminal, if anybody reads it: a program must not sleep on because nobody does."""
    if sys.stderr is not None:  # else another file can have its descriptor
        line = f"membroker: {text}\n".encode(errors="replace")[: select.PIPE_BUF]  # so much a pipe takes at once
        with suppress(OSError, ValueError):  # no buffer: what is left in it would change the exit status
            poll = select.poll()
            poll.register(sys.stderr.fileno(), select.POLLOUT)
            if poll.poll(0):  # else its reader has stopped, as `less` does, or Ctrl-S
                os.write(sys.stderr.fileno(), line)


def suspender_for(client: Client, settings: Settings) -> Suspender:
    """Return what suspends programs on a broker's device. Raises `MembrokerError` with the reason if nothing does."""
    if client.driver_kind != "cuda":
        return StandInSuspender()
    try:
        return CudaSuspender(client.device_uuid, needs_suspend=settings.can_sleep)
    except DriverUnavailable as error:
        instead = ": --no-sleep runs the program all the same, charged for its memory until it ends"
        raise MembrokerError(f"no program can be put to sleep here: {error.hint}{instead}") from error


def _borrow(guest: Guest, settings: Settings, timeout: float | None) -> None:
    """Wait until the broker lends what the program may use. Ctrl-C and SIGTERM end the wait."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    waiting = threading.Timer(1.0, say, [f"it waits until the broker lends {format_size(settings.memory)}"])
    waiting.daemon = True
    waiting.start()
    try:
        guest.borrow(WAIT_SECONDS if timeout is None else timeout)
    except OutOfMemory as error:
        raise MembrokerError(f"the program was not started: {error}") from error
    finally:
        waiting.cancel()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})


class _Line:
    """The session of a guest: it begins a new one when the broker does not know the old one any more."""

    def __init__(self, connects: Callable[[], Client], model: str) -> None:
        self._connects, self._model = connects, model
        self.client = connects()
        self._is_used = False

    def open_model(self) -> Model:
        """Register the model: the first time by the session that there is, then by a new one."""
        if self._is_used:
            client = self._connects()
            self.client.close()
            self.client = client
        self._is_used = True
        return self.client.model(self._model)

    def pids(self) -> list[int]:
        """Return the processes that have a session of this tenant, but this one."""
        return [session.pid for session in self.client.sessions() if session.pid != os.getpid()]

    def close(self) -> None:
        self.client.close()


class _Program:
    """The program."""

    def __init__(self) -> None:
        self.pid = 0
        self._file = -1
        """A pidfd: a signal never goes to another process that got the pid."""

    def start(self, found: str, program: list[str], more: dict[str, str]) -> None:
        """Start it, with `more` in its environment, and the signals as this process got them. Raises `OSError`."""
        environment = {key: value for key, value in os.environ.items() if key not in _VARIABLES} | more
        sys.stdout.flush()
        defaults = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them, and the program would inherit that
        self.pid = os.posix_spawn(found, program, environment, setsigmask=(), setsigdef=defaults)
        self._file = os.pidfd_open(self.pid)

    def end(self, why: str) -> None:
        """Kill it, because of this."""
        say(f"the program is ended: {why}")
        self._send(signal.SIGTERM)
        timer = threading.Timer(_KILL_SECONDS, self._send, [signal.SIGKILL])
        timer.daemon = True
        timer.start()

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, number)

    def wait(self, guest: Guest, warden: Warden) -> int:
        """Hand signals on until it ends. Return its status as `waitpid` does."""
        while True:
            status = self._reap(guest, warden)
            if status is not None:
                return status
            heard = signal.sigwaitinfo({*FORWARDED, signal.SIGCHLD})
            is_of_terminal = heard.si_code > 0  # the kernel has sent it to all processes in front of the terminal
            if heard.si_signo != signal.SIGCHLD and not is_of_terminal:
                self._send(heard.si_signo)
            if heard.si_signo in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                guest.wake()  # what it does at its end may need the device

    def _reap(self, guest: Guest, warden: Warden) -> int | None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return 1 << 8
            if not pid:
                return None
            if pid == warden.pid and os.WIFSTOPPED(status):
                warden.go_on()
            elif pid == warden.pid:
                guest.keep_awake("the process was killed that would end the program if this command were killed")
            elif pid == self.pid and not os.WIFSTOPPED(status):
                return status
            elif pid == self.pid and os.WSTOPSIG(status) in _FOR_TERMINAL:
                os.kill(os.getpid(), signal.SIGSTOP)
                self._send(signal.SIGCONT)  # a shell that goes on with this job may have told this process alone


def _die_of(number: int) -> None:
    """End as the program has: by the same signal."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


# --- what a program used when it ran last ---


def seen_file(client: Client, model: str) -> Path:
    """Return the file that has the most that a guest of this model has used: for `--memory auto`."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "membroker" / "guests" / f"{client.device_uuid}-{client.tenant}-{model}".replace("/", "_")


def _read(file: Path) -> int:
    try:
        return max(0, int(file.read_text()))
    except (OSError, ValueError):
        return 0


def _write(file: Path, size: int) -> None:
    if size:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{size}\n")
