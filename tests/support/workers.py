"""Real worker processes for the system tests: a new interpreter each, driven by lines of JSON.

The test's side is `Worker`; the worker's side is `main`, which runs the lines of Python that it is given, so a test
shows the very calls that a user would write; `Raw` is `raw.Steps`. Never a fork of the test's own process: gRPC and
CUDA survive none.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.sizes import MIB, PAGE
from tests.support.template import PythonProcess

ROOT = Path(__file__).parents[2]
MAIN = ("-m", "tests.support.workers")
ANCHOR_BYTES = 2 * MIB
"""What the device of a daemon shows in use when nothing is lent."""
OF_A_SESSION = 4
"""Descriptors that a session costs the broker: its connection, its process, its notices."""
OF_A_CHANNEL = 3
"""Descriptors that the gRPC channel of a session costs it besides."""


class Refused(Exception):
    """What a worker's line raised, as seen from the test: the class, the sentence and the numbers."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__(f"{told['error']}: {told['message']}")
        self.error: str = told["error"]
        self.message: str = told["message"]
        self.reason: str = told["reason"]
        self.metadata: dict[str, str] = told["metadata"]
        self.numbers: tuple[str, int, int, int | None] | None = (
            (told["level"], told["requested"], told["available"], told["limit"]) if "level" in told else None
        )


class Worker:
    """A worker process. What it runs sees `membroker`, `MIB`, `PAGE` and what its earlier lines have named.

    `command` starts one that is not simply another process of this machine.
    """

    def __init__(
        self,
        user: int | None = None,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "cwd": ROOT,
            "env": {**os.environ, "PYTHONPATH": python_path(), **(environment or {})},
        }
        if command is None and user is None:
            self.process: subprocess.Popen[bytes] = PythonProcess(MAIN, **options)
        else:
            self.process = subprocess.Popen(command or [*as_user(user), sys.executable, *MAIN], **options)
        self.pid = self.process.pid
        self._heard = bytearray()

    def connect(
        self, daemon: Daemon, tenant: str = "red", transport: str = "handoff", outage: float | None = None
    ) -> Worker:
        """Open a session; the client is `client`. A call waits `outage` seconds for a daemon that is away."""
        more = "" if outage is None else f", outage={outage}"
        self.do(f"client = membroker.connect({str(daemon.endpoint(tenant))!r}, transport={transport!r}{more})")
        return self

    def do(self, code: str) -> None:
        self.begin(code)
        self.result()

    def ask(self, code: str) -> Any:
        self.begin(f"answer = ({code})")
        return self.result()

    def refused(self, code: str) -> Refused:
        """Run statements that the library must refuse, and return how it did."""
        try:
            self.do(code)
        except Refused as refused:
            return refused
        raise AssertionError(f"not refused: {code}")

    def begin(self, code: str) -> None:
        """Have statements run without waiting for their end."""
        self.process.stdin.write(json.dumps(code).encode() + b"\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        """Return `answer` as what was begun has left it; raises `Refused`."""
        told = json.loads(self._line())
        if "error" in told:
            raise Refused(told)
        return told["answer"]

    def _line(self) -> bytes:
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self.process.stdout], [], [], 2 * DEADLINE_SECONDS)
            assert ready, "the worker says nothing"
            data = os.read(self.process.stdout.fileno(), 65_536)
            assert data, f"the worker ended with status {self.process.wait(DEADLINE_SECONDS)}"
            self._heard += data
        line, _, rest = bytes(self._heard).partition(b"\n")
        self._heard = bytearray(rest)
        return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_SECONDS)

    def send(self, number: signal.Signals) -> None:
        """Send a signal. A stop is waited for, as a worker that still runs a little would make tests lie."""
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            until(lambda: state_of(self.pid) == "T")

    def finish(self) -> int:
        """Close its standard input, at whose end it exits as an interpreter does; return the status."""
        self.process.stdin.close()
        return self.process.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        """Kill what is left."""
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()


@contextmanager
def workers(count: int) -> Iterator[list[Worker]]:
    """Yield worker processes; whatever still lives at the end is killed."""
    started = [Worker() for _ in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            worker.close()


@contextmanager
def worker() -> Iterator[Worker]:
    with workers(1) as (only,):
        yield only


def python_path() -> str:
    """Return the PYTHONPATH of a worker: where this folder is, before what this process was given."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def as_user(user: int | None) -> list[str]:
    """Return what stands before a command that is to run as another user; None is this one.

    It may read what root may, because root's interpreter often lies below /root.
    """
    if user is None:
        return []
    capabilities = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *capabilities]


# What tests look at


def proc_of(pid: int, name: str) -> str:
    """Return a file below /proc/PID, or nothing if the process does not exist.

    A process that ends before the open() is ENOENT, and one that ends between open() and read() ESRCH.
    """
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def state_of(pid: int) -> str:
    """Return the state letter of a process (`T` stopped, `Z` dead and not reaped), or nothing if it does not exist."""
    return proc_of(pid, "stat").rpartition(")")[2].strip()[:1]


def is_asleep(pid: int) -> bool:
    """Say whether all threads of a process wait for something: none runs, or would if it had a processor."""
    threads = os.listdir(f"/proc/{pid}/task")
    return all(proc_of(pid, f"task/{thread}/stat").rpartition(")")[2].split()[:1] in ([], ["S"]) for thread in threads)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, whichever of its threads started them."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return []
    return [int(child) for thread in threads for child in proc_of(pid, f"task/{thread}/children").split()]


def links(pid: int) -> list[str]:
    """Return what the descriptors of a process lead to."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(path))
    return found


def is_gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z", "X")


def descriptors_at_start(daemon: Daemon) -> int:
    """Return how many descriptors a daemon has open that has just started and served nobody."""
    # Said after the socket is closed on which the daemon told that it is ready.
    until(lambda: f" ready pid={daemon.process.pid} " in daemon.log())
    return descriptors_at_rest(daemon)


def descriptors_at_rest(daemon: Daemon) -> int:
    """Return how many descriptors a daemon has open, once 20 looks in a row have found as many while it slept.

    What a start or a connection needs for a moment is closed again, and may be open at each of a few looks. A daemon
    that is kept from running for longer than these take does not sleep.
    """
    seen: list[int] = []

    def is_at_rest() -> bool:
        if is_asleep(daemon.process.pid):
            seen.append(daemon.descriptors())
        return len(seen) > 20 and len(set(seen[-20:])) == 1

    until(is_at_rest)
    return min(seen)


def device_used(daemon: Daemon) -> int:
    """Return the bytes that the device shows in use beyond the anchor."""
    return int(daemon.books().device_used_bytes) - ANCHOR_BYTES


def is_clean(daemon: Daemon) -> bool:
    """Say whether nothing is lent, nobody is there, and the device shows the anchor and nothing else."""
    device = daemon.device()
    for books in device.locations:
        anchor = ANCHOR_BYTES if books == device.locations[0] else 0
        if books.lent_bytes or books.releasing_bytes or books.free_bytes != books.capacity_bytes:
            return False
        if books.unaccounted_bytes or books.device_used_bytes != anchor:
            return False
    used = [books.used_bytes or books.extents for model in daemon.models() for books in model.books]
    return not any(used) and not daemon.sessions()


def until_clean(daemon: Daemon, descriptors: int) -> None:
    """Wait until the books are zero and the daemon has as many descriptors open as it began with."""
    until(lambda: is_clean(daemon))
    try:
        until(lambda: daemon.descriptors() == descriptors)
    except AssertionError as error:
        root = f"/proc/{daemon.process.pid}/fd"
        places = sorted(os.readlink(f"{root}/{one}") for one in os.listdir(root))
        raise AssertionError(f"{len(places)} descriptors instead of {descriptors}: {places}") from error


# The worker's side


def fork_unseen() -> int:
    """Fork as a C extension does, so that no at-fork hook of Python runs; the child only holds what it inherited."""
    libc = ctypes.PyDLL(None)  # keeps the interpreter's lock, which the child would wait for in vain
    pid: int = libc.fork()
    while not pid:
        libc.pause()
    return pid


def fork_seen() -> int:
    """Fork as Python does; the library's hook runs in the child, which then holds on until it is killed."""
    ready, done = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(done, b"r")
        while True:
            signal.pause()
    os.read(ready, 1)
    return pid


class Attaching:
    """An attach in a thread of its own. Made, it is known to the broker: it waits there, or is answered."""

    def __init__(self, model: Any, client: Any, name: str) -> None:
        self.segment: Any = None
        self.error: Exception | None = None
        in_flight = client._session.connection.calls.at_broker
        self._thread = threading.Thread(target=self._attach, args=(client, name), daemon=True)
        self._thread.start()
        while self._thread.is_alive() and not any(call.sent for call in list(in_flight.values())):
            os.sched_yield()
        # On the same way as the attach, behind it. By gRPC, a call that waits for its endpoint's share of a turn can be
        # overtaken by the next call, but not by one that is sent in a later turn.
        for _ in range(3):
            model.declare(0)

    def _attach(self, client: Any, name: str) -> None:
        try:
            self.segment = client.attach(name, timeout=3600)
        except Exception as error:  # noqa: BLE001 - the thread hands on what it raised
            self.error = error

    def is_waiting(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        """Return the segment, or raise what the attach has raised."""
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive(), "the attach still waits"
        if self.error is not None:
            raise self.error
        return self.segment


def main() -> None:
    """Run each line of JSON on standard input as Python, and answer with a line of JSON."""
    import membroker
    from tests.support.raw import Steps

    names: dict[str, Any] = {"membroker": membroker, "MIB": MIB, "PAGE": PAGE, "Raw": Steps, "os": os}
    names.update(fork_seen=fork_seen, fork_unseen=fork_unseen, Attaching=Attaching)
    for line in sys.stdin:
        names["answer"] = None
        try:
            exec(json.loads(line), names)
            told = {"answer": names["answer"]}
        except Exception as error:  # noqa: BLE001 - the test is told of each
            told = {
                "error": type(error).__name__,
                "message": str(error),
                "reason": getattr(error, "reason", ""),
                "metadata": getattr(error, "metadata", {}),
            }
            if isinstance(error, membroker.OutOfMemory):
                told.update(
                    level=error.level,
                    requested=error.requested_bytes,
                    available=error.available_bytes,
                    limit=error.limit_bytes,
                )
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
