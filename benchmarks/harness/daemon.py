"""A daemon of a benchmark's own: its start, its stop, what it says of itself, and what the kernel says of it."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

import membroker
from membroker.v1 import admin_pb2, admin_pb2_grpc, broker_pb2
from membroker.wire.paths import grpc_target

from .samples import Series

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 60.0
ANSWER_SECONDS = 60.0
TENANT = "bench"
TAIL_LINES = 30
TWIN_BYTES = 256 << 30
"""The capacity of the host driver: a figure only, since what is borrowed is never written to."""
_CPU_CLOCK = 2
"""What makes a pid the number of a process's CPU clock, as clock_getcpuclockid(3) does."""
_SERIES = re.compile(r"^(membroker_(?:\w+_seconds_(?:sum|count)|stock_extents_total))\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_IGNORED = ("gpu_uuid", "location", "le")


def configuration(driver: str, tables: Mapping[str, Mapping[str, object]] | None = None, **keys: object) -> str:
    """Return a daemon's configuration: its keys, and tables, of which one of a tenant is the least."""
    if driver == "host":
        keys.setdefault("capacity", TWIN_BYTES)
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"driver": driver, **keys}.items()]
    for name, table in ({"metrics": {"port": 0}} | (tables or {f"tenants.{TENANT}": {}})).items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join([*lines, ""])


def sources(tree: Path | None) -> dict[str, str]:
    """Return the environment of a process that imports a tree's membroker, this one's if it is None."""
    paths = [*(f"{tree or ROOT}/{part}" for part in ("client", "broker")), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def connect(endpoint: Path, transport: str = "handoff") -> membroker.Client:
    """Open a session that has time to begin on a busy machine."""
    return membroker.connect(endpoint, transport=transport, client="benchmarks", timeout=60)


class DaemonFailed(Exception):
    """The daemon did not start, or did not stop cleanly; the message has the end of its log."""


class Daemon:
    """A running membrokerd of this tree or of another checkout, watched from outside, with directories of its own.

    `fresh` gives it a new text of /metrics for each scrape.
    """

    def __init__(self, directory: Path, config: str, tree: Path | None = None, *, fresh: bool = False) -> None:
        self._log = directory / "log"
        file, runtime, notify = directory / "membrokerd.toml", directory / "run", directory / "notify"
        file.write_text(f'runtime_directory = "{runtime}"\nstate_directory = "{directory}/kept"\n{config}')
        notify.unlink(missing_ok=True)
        module = "benchmarks.harness.fresh_daemon" if fresh else "membrokerd.cli"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, self._log.open("w") as log:
            ready.bind(str(notify))
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(file)],
                env={**sources(tree), "NOTIFY_SOCKET": str(notify)},
                stdout=log,
                stderr=log,
            )
            try:
                self._wait(ready)
                self._connect(runtime)
            except BaseException:
                self.kill()
                raise

    def _wait(self, ready: socket.socket) -> None:
        end = time.monotonic() + START_SECONDS
        while not select.select([ready], [], [], 0.05)[0]:
            if self.process.poll() is not None or time.monotonic() > end:
                raise DaemonFailed(f"membrokerd did not start:\n{self.log_tail()}")

    def _connect(self, runtime: Path) -> None:
        # The device's number is a link to its directory.
        (self._root,) = (one for one in runtime.iterdir() if (one / "tenants").is_dir() and not one.is_symlink())
        self._channel = grpc.insecure_channel(grpc_target(self._root / "admin" / "grpc.sock"))
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._metrics_url: str = self.device().metrics_url

    def endpoint(self, tenant: str = TENANT) -> Path:
        """Return the directory through which a tenant enters."""
        return self._root / "tenants" / tenant

    def device(self) -> Any:
        """Return the device and its books (GetDevice, by gRPC)."""
        return self._admin.GetDevice(broker_pb2.GetDeviceRequest(), wait_for_ready=True, timeout=ANSWER_SECONDS)

    def models(self) -> Any:
        """Return every model and its books (ListModels, by gRPC); at most a page of them."""
        return self._admin.ListModels(broker_pb2.ListModelsRequest(), timeout=ANSWER_SECONDS).models

    def guarantee(self, tenant: str, size: int) -> None:
        """Guarantee a tenant so many bytes of the device."""
        request = admin_pb2.SetQuotaRequest(name=f"tenants/{tenant}", guarantee_bytes=size)
        request.update_mask.paths.append("guarantee_bytes")
        self._admin.SetQuota(request)

    def memory(self) -> tuple[int, int]:
        """Return the bytes that the daemon has resident (RSS), and its share of them (PSS)."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
        return sizes["Rss:"], sizes["Pss:"]

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used, in nanoseconds' resolution."""
        return time.clock_gettime((~self.process.pid << 3) | _CPU_CLOCK)

    def scrape(self) -> bytes:
        """Return the body of /metrics, over a connection of its own."""
        with urllib.request.urlopen(self._metrics_url, timeout=ANSWER_SECONDS) as answer:
            body: bytes = answer.read()
        return body

    def fresh_scrape(self) -> bytes:
        """Return a body of /metrics that is not older than this call. Usually a daemon's text is up to a second old."""
        began = time.time()
        while time.time() < began + ANSWER_SECONDS:
            body = self.scrape()
            taken = re.search(rb"^membroker_scrape_time_seconds\S* (\S+)$", body, re.MULTILINE)
            if taken is not None and float(taken[1]) >= began:
                return body
            time.sleep(0.05)
        raise TimeoutError(f"{self._metrics_url} shows nothing newer in {ANSWER_SECONDS} seconds")

    def counts(self) -> Series:
        """Return the sums and counts of its histograms now."""
        return parsed(self.fresh_scrape().decode())

    def log(self) -> str:
        """Return all that it wrote."""
        return self._log.read_text(errors="replace")

    def log_tail(self) -> str:
        """Return the last lines that it wrote."""
        return "\n".join(self.log().splitlines()[-TAIL_LINES:])

    def stop(self) -> None:
        """Ask it to stop."""
        self._channel.close()
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(STOP_SECONDS):
            raise DaemonFailed(f"membrokerd did not stop cleanly:\n{self.log_tail()}")

    def kill(self) -> None:
        """Kill it, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(config: str, tree: Path | None = None, *, fresh: bool = False) -> Iterator[Daemon]:
    """Run a daemon, which must stop cleanly at the end. If the block fails, print the end of its log."""
    directory = Path(tempfile.mkdtemp(prefix="membroker-bench-"))
    daemon = None
    try:
        daemon = Daemon(directory, config, tree, fresh=fresh)
        yield daemon
        daemon.stop()
    except Exception:
        if daemon is not None:
            print(f"the end of the log of membrokerd:\n{daemon.log_tail()}", file=sys.stderr, flush=True)
        raise
    finally:
        if daemon is not None:
            daemon.kill()
        shutil.rmtree(directory, ignore_errors=True)


def parsed(text: str) -> Series:
    """Return what /metrics says of times and of the stock, by name and the labels that matter."""
    found: Series = {}
    for name, labels, value in _SERIES.findall(text):
        kept = tuple(sorted((key, word) for key, word in _LABEL.findall(labels) if key not in _IGNORED))
        found[name, kept] = found.get((name, kept), 0.0) + float(value)
    return found


def difference(before: Series, after: Series) -> Series:
    """Return what came to `before`."""
    return {key: value - before.get(key, 0) for key, value in after.items()}
