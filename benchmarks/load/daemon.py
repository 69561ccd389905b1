"""A daemon of the benchmark's own, and what it costs: its memory, its share of a processor, its answers.

Owns one membrokerd on the host driver. Its memory and CPU are what the kernel says of the process.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from membroker.v1 import admin_pb2_grpc, broker_pb2

from ..scraping import fresh_scrape

START_SECONDS = 30.0
STOP_SECONDS = 60.0
ANSWER_SECONDS = 60.0
TENANT = "bench"
_CPU_CLOCK = 2
"""What makes a pid the number of a process's CPU clock, as clock_getcpuclockid(3) does."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# The capacity is a figure only: what is borrowed is never written to, so it needs no memory.
_CONFIG = """\
driver = "host"
capacity = "256GiB"
runtime_directory = "{directory}/run"
state_directory = "{directory}/kept"
[metrics]
port = 0
[tenants]
"""


class DaemonFailed(Exception):
    """The daemon did not start, or did not stop cleanly; the message has its log."""


class Daemon:
    """A running membrokerd, watched from outside: this tree's, or that of another checkout at `tree`."""

    def __init__(self, directory: Path, tenants: Sequence[str], tree: Path | None = None, config: str = "") -> None:
        self._root = directory / "run" / "host"
        self._log = directory / "log"
        path = directory / "membrokerd.toml"
        names = "".join(f"{name} = {{}}\n" for name in tenants)
        path.write_text(config + _CONFIG.format(directory=directory) + names)
        sources = {"PYTHONPATH": f"{tree}/client:{tree}/broker"} if tree is not None else {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, self._log.open("w") as log:
            ready.bind(str(directory / "notify"))
            self.process = subprocess.Popen(
                [sys.executable, "-m", "membrokerd.cli", "--config", str(path)],
                env={**os.environ, **sources, "NOTIFY_SOCKET": str(directory / "notify")},
                stderr=log,
            )
            try:
                self._wait(ready)
            except BaseException:
                self.kill()
                raise
        self._channel = grpc.insecure_channel(f"unix:{self._root}/admin/grpc.sock")
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._metrics_url: str = self.device().metrics_url

    def _wait(self, ready: socket.socket) -> None:
        end = time.monotonic() + START_SECONDS
        while not select.select([ready], [], [], 0.05)[0]:
            if self.process.poll() is not None or time.monotonic() > end:
                raise DaemonFailed(f"membrokerd did not start:\n{self._log.read_text()}")

    def endpoint(self, tenant: str = TENANT) -> Path:
        """Return the directory through which a tenant enters."""
        return self._root / "tenants" / tenant

    def device(self) -> Any:
        """Return the device and its books (GetDevice, by gRPC)."""
        return self._admin.GetDevice(broker_pb2.GetDeviceRequest(), timeout=ANSWER_SECONDS)

    def scrape(self) -> bytes:
        """Return the body of /metrics, over a connection of its own."""
        with urllib.request.urlopen(self._metrics_url, timeout=ANSWER_SECONDS) as answer:
            body: bytes = answer.read()
        return body

    def fresh_scrape(self) -> bytes:
        """Return a body of /metrics that is not older than this call."""
        return fresh_scrape(self._metrics_url, ANSWER_SECONDS).encode()

    def memory(self) -> tuple[int, int]:
        """Return the bytes that the daemon has resident (RSS), and its share of them (PSS)."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
        return sizes["Rss:"], sizes["Pss:"]

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used, in nanoseconds' resolution."""
        return time.clock_gettime((~self.process.pid << 3) | _CPU_CLOCK)

    def stop(self) -> None:
        """Ask it to stop."""
        self._channel.close()
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(STOP_SECONDS):
            raise DaemonFailed(f"membrokerd did not stop cleanly:\n{self._log.read_text()}")

    def kill(self) -> None:
        """End it whatever happened."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class CpuMeter:
    """The share of one processor that some processes have, in the times that it is entered for."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._cpu = self._wall = 0.0

    def __enter__(self) -> None:
        self._cpu -= self._cpu_seconds()
        self._wall -= time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._wall += time.monotonic()
        self._cpu += self._cpu_seconds()

    @property
    def percent(self) -> float:
        """Processor time over the time that passed; 100 is one processor, all of the time."""
        return 100 * self._cpu / self._wall

    def _cpu_seconds(self) -> float:
        """Return the time in user and in kernel, which the kernel tells in steps of 10 ms a process."""
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self._pids]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS_PER_SECOND


@contextmanager
def running(tenants: Sequence[str] = (TENANT,), tree: Path | None = None, config: str = "") -> Iterator[Daemon]:
    """Run a daemon; it must stop cleanly at the end."""
    directory = Path(tempfile.mkdtemp(prefix="membroker-bench-"))
    daemon = None
    try:
        daemon = Daemon(directory, tenants, tree, config)
        yield daemon
        daemon.stop()
    finally:
        if daemon is not None:
            daemon.kill()
        shutil.rmtree(directory, ignore_errors=True)
