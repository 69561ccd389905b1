"""A daemon with a fault: `python -m tests.support.faulty_daemon FAULT …` in the place of `membrokerd`.

FAULT is the name of a function below, which plants it, or several with commas between them. What a test tells the
fault is in a file or a word that a variable of the environment names.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from membroker.wire import sessions
from membrokerd import daemon
from membrokerd.cli import main
from membrokerd.config import descriptor_limits
from membrokerd.edge import dispatch, listings
from membrokerd.edge.handoff import connection, listener
from membrokerd.restart import descriptor_store, process_watch
from membrokerd.restart.journal import Journal
from membrokerd.runtime import eviction, loop, sleeping
from membrokerd.system import device_directory, failpoints, pods, process, turns

ARMED = "MEMBROKER_TEST_CRASH"
HANG = "MEMBROKER_TEST_HANG"
CALLS = "MEMBROKER_TEST_CALLS"
CGROUPS = "MEMBROKER_TEST_CGROUPS"
CONFINED = "MEMBROKER_TEST_CONFINED"
HOUR = 3600.0
_CLONE_NEWPID, _PR_SET_PDEATHSIG = 0x20000000, 1


def armed_path() -> Path:
    """Return the file that says where the daemons of this test crash."""
    return Path(os.environ[ARMED])


def arm(point: str, pid: int, after: int = 0) -> None:
    """Let the daemon kill `pid` (0: itself) at `point`, after it has passed that so many times."""
    assert point in failpoints.POINTS + failpoints.TENANT_POINTS, point
    fresh = armed_path().with_suffix(".new")
    fresh.write_text(json.dumps({"point": point, "pid": pid, "after": after}))
    fresh.rename(armed_path())


def _at_failpoints(reach: Callable[[str], None]) -> None:
    """Call `reach` with the name of each point that this process comes to. Every module has its own `reach`."""
    taken = failpoints.reach
    for module in list(sys.modules.values()):
        if vars(module).get("reach") is taken:
            vars(module)["reach"] = reach


def crash() -> None:
    """At each failpoint it looks for a file: when that names the point, the process that it names is killed, once."""

    def reach(point: str) -> None:
        try:
            wanted = json.loads(armed_path().read_text())
        except FileNotFoundError:
            return
        if wanted["point"] != point:
            return
        if wanted["after"]:
            arm(point, wanted["pid"], wanted["after"] - 1)
            return
        armed_path().unlink()
        os.kill(wanted["pid"] or os.getpid(), signal.SIGKILL)

    _at_failpoints(reach)
    # Small enough for a test to fill.
    daemon.Journal = partial(Journal, compact_bytes=1_024)  # type: ignore[assignment, misc]


def hang() -> None:
    """At each failpoint its event loop waits for as long as a file is there."""

    def reach(point: str) -> None:
        while Path(os.environ[HANG]).exists():
            time.sleep(0.01)

    _at_failpoints(reach)


def count() -> None:
    """For each frame it appends a line to a file: by function, the Python calls until its answer is noted, as JSON.

    What follows the answer, as the refill of the stock, is not counted: no client waits for it.
    """
    read, noted = connection.HandoffConnection.read, loop.Loop.answer.__code__

    def counted(self: connection.HandoffConnection) -> bool:
        calls: Counter[str] = Counter()

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call":
                calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"] += 1
            elif event == "return" and frame.f_code is noted:
                sys.setprofile(None)

        gc.disable()  # what follows a collection would be counted
        sys.setprofile(note)
        try:
            return read(self)
        finally:
            sys.setprofile(None)
            gc.enable()
            if len(calls) > 2:  # else there was no frame
                with open(os.environ[CALLS], "a") as file:
                    file.write(json.dumps(calls) + "\n")

    connection.HandoffConnection.read = counted  # type: ignore[method-assign]
    quiet()


def count_turns() -> None:
    """It counts the Python calls of each turn, and publishes the most as CPU time, at a microsecond a call.

    CPU time itself goes on while a virtual machine stands still.
    """
    calls, begun, most = 0, 0, 0
    start_over, begin, end = turns.Turns.start_over, turns.Turns.begin, turns.Turns.end

    def note(_: FrameType, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def start_over_counting(self: turns.Turns) -> None:
        sys.setprofile(note)
        start_over(self)

    def begin_counting(self: turns.Turns) -> None:
        nonlocal begun
        begin(self)
        begun = calls

    def end_counting(self: turns.Turns) -> None:
        nonlocal most
        most = max(most, calls - begun)
        self.longest_cpu = 0.0  # what is above it makes `end` measure
        end(self)
        self.longest_cpu = most / 1e6

    turns.Turns.start_over = start_over_counting  # type: ignore[method-assign]
    turns.Turns.begin = begin_counting  # type: ignore[method-assign]
    turns.Turns.end = end_counting  # type: ignore[method-assign]


def take_descriptors() -> None:
    """Its kernel is older than Linux 6.16: peers can pass it descriptors. No socket option has this number."""
    device_directory.SO_PASSRIGHTS = 9_999


def quiet() -> None:
    """It is without the `--log-level debug` that tests start every daemon with: the file alone decides."""
    del sys.argv[-2:]


def wait_only() -> None:
    """Its sessions only wait, so it counts 15 descriptors for each and not 135: one to which nothing is sent has 4."""
    quiet()
    sessions.OPEN_PER_SESSION = descriptor_limits.OPEN_PER_SESSION = 15  # type: ignore[misc, attr-defined]


def raise_at_tokens() -> None:
    """It fails where it has a token in its hands: as it looks one up, and as it answers one, on both transports."""
    find, request = dispatch.Dispatcher.find, dispatch.Dispatcher.request

    def planted(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("planted")

    def find_or_fault(self: Any, token: Any, endpoint: Any) -> Any:
        ticket = find(self, token, endpoint)
        return planted(token) if ticket.tenant == "blue" else ticket

    def request_or_fault(self: Any, session: Any, tenant: Any, *rest: Any) -> Any:
        faults = type(rest[1]).__name__ == "DeclareMemoryRequest"
        return planted(self, rest) if faults else request(self, session, tenant, *rest)

    dispatch.Dispatcher.find = find_or_fault  # type: ignore[method-assign]
    dispatch.Dispatcher.request = request_or_fault  # type: ignore[method-assign]
    listings.BookMessages.list_models = planted  # type: ignore[method-assign, assignment]
    connection.HandoffConnection._goodbye = planted  # type: ignore[method-assign, assignment]


HANDSHAKE: dict[str, tuple[Any, str]] = {
    "token": (dispatch.Dispatcher, "admit"),
    "greeted": (listener.Listener, "_on_greeted"),
    "image": (process_watch, "image_of"),
    "pidfd kept": (descriptor_store.Store, "keep_process"),
    "welcome made": (connection.Handshake, "_welcome"),
    "notices": (connection.HandoffConnection, "welcome"),
}
"""The steps of a handshake, by what each calls."""


def raise_in_handshake() -> None:
    """It fails once at the step that a file names, before or after it has done what that step does."""

    def plant(step: str, owner: Any, name: str) -> None:
        taken = getattr(owner, name)

        def fail_at(when: str) -> None:
            with suppress(FileNotFoundError):
                if armed_path().read_text() == f"{when} {step}":
                    armed_path().unlink()
                    raise RuntimeError("planted")

        def call(*arguments: Any, **named: Any) -> Any:
            fail_at("before")
            found = taken(*arguments, **named)
            fail_at("after")
            return found

        setattr(owner, name, call)

    for step, (owner, name) in HANDSHAKE.items():
        plant(step, owner, name)


def kill_soon() -> None:
    """It sends SIGKILL soon after SIGTERM, and may not signal every process if a test wants so."""
    confined = os.environ.pop(CONFINED, "")
    if confined == "without CAP_KILL":
        again = [sys.executable, "-m", "tests.support.faulty_daemon", "kill_soon", *sys.argv[1:]]
        os.execvp("setpriv", ["setpriv", "--bounding-set=-kill", *again])
    if confined == "in a pid namespace":
        _enter_pid_namespace()
    eviction.KILL_SECONDS = 0.3


def kill_late() -> None:
    """It waits an hour after SIGTERM before it sends SIGKILL."""
    eviction.KILL_SECONDS = HOUR


def _enter_pid_namespace() -> None:
    """Go on as the first process of a new pid namespace; this process passes SIGTERM on, and waits for that one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "unshare")
    child = os.fork()
    if not child:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def wait_for_answers() -> None:
    """It waits so long for an answer whether an engine sleeps that no busy machine misses it."""
    sleeping.ANSWER_SECONDS = 20.0


def wait_for_hellos() -> None:
    """It closes no connection because its Hello does not come in time."""
    listener.HELLO_SECONDS = HOUR


def in_kubernetes() -> None:
    """It finds the cgroups of processes below a directory of the test's, as /proc has them on a node of Kubernetes.

    The logs of the node's pods are in `pods` there.
    """
    process.PROC = Path(os.environ[CGROUPS])
    pods.POD_LOGS = process.PROC / "pods"


def in_user_namespace() -> None:
    """It is in a user namespace that maps this user alone."""
    os.execvp("unshare", ["unshare", "-Ur", sys.executable, "-m", "membrokerd.cli", *sys.argv[1:]])


if __name__ == "__main__":
    for fault in sys.argv.pop(1).split(","):
        globals()[fault]()
    sys.exit(main(sys.argv[1:]))
