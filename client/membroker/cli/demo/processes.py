"""The processes of the demo: workers, which are told what to do by lines, and a daemon, started again when it ends.

Owns their lives: none of them outlives the demo. Each is in a session of its own, so that Ctrl-C is the demo's alone,
which then ends them in order. Must never touch a daemon that it did not start.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...admin import Admin
from ...ext import ownership, paths
from ...types import DeviceStatus, LocationBooks, ModelStatus, SegmentStatus
from ...vmm.driver import Location

START_SECONDS = 30.0
SOON_SECONDS = 5.0
END_SECONDS = 10.0
RESTART_SECONDS = 0.2
"""Between a daemon's end and the start of the next: RestartSec in the unit of systemd in deploy/."""

_CONFIG = """\
driver = "host"
capacity = "256MiB"
runtime_directory = {run}
state_directory = {kept}
descriptor_store = "keeper"
slice_seconds = 0.0
[metrics]
port = 0
[tenants.red]
[tenants.blue]
"""


class Disproved(Exception):
    """Something that the demo claims does not hold."""


def make_directory() -> Path:
    """Make a directory for the demo: in TMPDIR, or in /tmp if a broker cannot have its sockets or its file there."""
    made = Path(tempfile.mkdtemp(prefix="membroker-demo-"))
    longest = made / "run" / "host" / "tenants" / "blue" / "handoff.sock"
    if str(made).isprintable() and not paths.socket_fault(longest) and not ownership.stranger_in(made):
        return made
    made.rmdir()
    return Path(tempfile.mkdtemp(prefix="membroker-demo-", dir="/tmp"))


def claim(holds: bool, what: str) -> None:
    """Go on only if it holds."""
    if not holds:
        raise Disproved(what)


def claim_soon(holds: Callable[[], bool], what: str, show: Callable[[], None] = lambda: None) -> None:
    """Go on as soon as it holds; the device's own figure is read now and then."""
    begun = time.monotonic()
    while not holds():
        claim(time.monotonic() - begun < SOON_SECONDS, what)
        show()


class DemoWorker:
    """A worker process, told what to do by lines and answering by lines."""

    def __init__(self, endpoint: Path, model: str, virtual: str, limit: str = "") -> None:
        self.model = model
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "membroker.cli.demo.worker", model, virtual, limit],
            env={**os.environ, "MEMBROKER_ENDPOINT": str(endpoint)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def hear(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        claim(bool(line), f"the worker of {self.model} ended")
        answer: dict[str, Any] = json.loads(line)
        claim("lost" not in answer, f"{self.model}: {answer.get('lost')}")
        return answer

    def order(self, do: str, **more: Any) -> None:
        """Give an order, and wait for nothing."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()

    def tell(self, do: str, **more: Any) -> dict[str, Any]:
        """Give an order and return its answer."""
        self.order(do, **more)
        return self.hear()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Let the worker end by itself, or end it."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self.process.wait(SOON_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


class DemoGuest:
    """A program that knows nothing of membroker, run by `membroker run --guest`, and its door."""

    def __init__(self, endpoint: Path, model: str, size: int) -> None:
        self.model = model
        self._reserved = [_reserve_port() for _ in range(2)]
        self._door, port = (int(reserved.getsockname()[1]) for reserved in self._reserved)
        program = [sys.executable, "-m", "membroker.cli.demo.guest", str(size), str(port)]
        options = ["--model", model, "--memory", str(size), "--door", f"{self._door}:{port}"]
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "membroker.cli.main", "run", "--guest", *options, "--", *program],
            env={**os.environ, "MEMBROKER_ENDPOINT": str(endpoint)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def hear(self) -> None:
        """Wait until the program serves."""
        assert self.process.stdout is not None
        claim(self.process.stdout.readline() == "ready\n", f"the program of {self.model} ended")

    def checksum(self) -> int:
        """Ask the program, which wakes it if it sleeps."""
        try:
            with socket.create_connection(("127.0.0.1", self._door), START_SECONDS) as connection:
                connection.sendall(b"?")
                return int(connection.makefile().readline())
        except (OSError, ValueError) as error:
            raise Disproved(f"{self.model} does not answer: {error}") from None

    def close(self) -> None:
        """End the program."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.terminate()
        try:
            self.process.wait(SOON_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for reserved in self._reserved:
            reserved.close()


def _reserve_port() -> socket.socket:
    """Return a socket with a port that the kernel gives to no other program. A server that is told it can bind it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # servers set it, too
    held.bind(("127.0.0.1", 0))
    return held


class DemoBroker:
    """The demo's own daemon, asked at its admin endpoint. When it ends it is started again, as systemd would do it."""

    admin: Admin

    def __init__(self, directory: Path) -> None:
        self.starts: int = 0
        self._root = directory / "run" / "host"
        self._config, self._log = directory / "membrokerd.toml", directory / "log"
        self._notify = directory / "notify"
        places = {name: json.dumps(str(directory / name), ensure_ascii=False) for name in ("run", "kept")}
        self._config.write_text(_CONFIG.format(**places), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._may_restart = threading.Event()
        self._may_restart.set()
        self._successors: queue.SimpleQueue[float | Disproved] = queue.SimpleQueue()
        self._supervisor: threading.Thread | None = None

    def start(self) -> None:
        """Start the daemon, wait until it is ready, and start another whenever it ends."""
        self._start()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._supervisor.start()

    def _start(self) -> None:
        self._notify.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, self._log.open("a") as log:
            ready.bind(str(self._notify))
            with self._lock:
                claim(not self._leaving.is_set(), "the demo is over")
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "membrokerd.cli", "--config", str(self._config)],
                    env={**os.environ, "NOTIFY_SOCKET": str(self._notify)},
                    stderr=log,
                    start_new_session=True,
                )
            self._wait(self._process, ready)
        if self.starts:  # the connection to the daemon before would pause before it finds this one
            self.admin.close()
        self.admin = Admin(self._root / "admin" / "grpc.sock")
        self.starts += 1

    def _wait(self, process: subprocess.Popen[bytes], ready: socket.socket) -> None:
        end = time.monotonic() + START_SECONDS
        while not select.select([ready], [], [], 0.05)[0]:
            if process.poll() is not None or time.monotonic() > end:
                raise Disproved(f"membrokerd did not start: {self._log.read_text()}")

    def _supervise(self) -> None:
        while True:
            assert self._process is not None
            self._process.wait()
            if self._leaving.wait(RESTART_SECONDS):
                return
            self._may_restart.wait()
            try:
                self._start()
            except Disproved as error:
                self._successors.put(error)
                return
            self._successors.put(time.monotonic())

    def crash(self, meanwhile: Callable[[float], object] = lambda dead: None) -> tuple[float, float]:
        """Kill the daemon; return when it was dead and when the next was ready, in seconds of CLOCK_MONOTONIC.

        The next is started once `meanwhile`, which is told when the daemon was dead, has returned.
        """
        assert self._process is not None
        self._may_restart.clear()
        try:
            self._process.kill()
            self._process.wait()
            dead = time.monotonic()
            meanwhile(dead)
        finally:
            self._may_restart.set()
        try:
            ready = self._successors.get(timeout=START_SECONDS)
        except queue.Empty:
            raise Disproved("the broker was killed, and no other was started in its place") from None
        if isinstance(ready, Disproved):
            raise ready
        return dead, ready

    def endpoint(self, tenant: str) -> Path:
        """Return the directory through which a tenant enters."""
        return self._root / "tenants" / tenant

    def device(self) -> DeviceStatus:
        """Return the device and its books."""
        return self.admin.device()

    def memory(self) -> LocationBooks:
        """Return the books of the device's memory, and what the device shows of it."""
        return self.device().locations["device"]

    def models(self) -> dict[str, ModelStatus]:
        """Return every model by its own name."""
        return {row.name.rpartition("/")[2]: row for row in self.admin.models()}

    def used(self, model: str) -> int:
        """Return the bytes that a model is charged."""
        return self.models()[model].books["device"].used_bytes

    def sleep_of(self, model: str) -> tuple[str, str]:
        """Return how the guest of a model is, and why it sleeps."""
        guests = self.models()[model].guests
        return (guests[0].state, guests[0].cause) if guests else ("", "")

    def recalled(self, model: str) -> int:
        """Return the bytes that a model is asked for and has not answered yet."""
        return self.models()[model].books["device"].recalled_bytes

    def guarantee(self, tenant: str, size: int) -> None:
        """Guarantee a tenant so many bytes, as `membroker quota set` does. 0: nothing."""
        self.admin.set_quota(f"tenants/{tenant}", Location.DEVICE, {"guarantee_bytes": size})

    def segments(self) -> list[SegmentStatus]:
        """Return every segment."""
        return self.admin.segments()

    def stop(self) -> int:
        """Ask the daemon to stop, and start no other; return its exit status."""
        assert self._process is not None
        with self._lock:
            self._leaving.set()
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise Disproved(f"the daemon does not stop: {self._log.read_text()}") from None

    def close(self) -> None:
        """End the daemon, and the keeper that it has started, whatever happened."""
        with self._lock:
            self._leaving.set()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._supervisor is not None:
            self._supervisor.join()
        if self.starts:
            self.admin.close()
        _end_keeper(self._root / "state" / "fdstore.sock")


def _end_keeper(path: Path) -> None:
    """End the process that listens there, and wait until it has: it outlives daemons, and would look for a while."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(os.fspath(path))
        except OSError:
            return
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            select.select([pidfd], [], [], END_SECONDS)
        finally:
            os.close(pidfd)
