"""A daemon of the benchmark's own, and what its histograms say.

Owns one membrokerd. Its figures are those of /metrics, before and after.
"""

from __future__ import annotations

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from membroker.v1 import admin_pb2_grpc, broker_pb2

from ..load.daemon import DaemonFailed
from ..scraping import fresh_scrape
from .bare import TWIN_BYTES
from .figures import Counts, Labels

START_SECONDS = 60.0
STOP_SECONDS = 60.0
ANSWER_SECONDS = 60.0
TENANT = "bench"
TAIL_LINES = 30
TWIN_STOCK = "1GiB"
"""The host driver keeps no stock by default. This is the default of a GPU."""
HOST_CAPACITY = "32GiB"
"""For what is offloaded: a figure, and nobody takes so much."""
_IGNORED = ("gpu_uuid", "location", "le")
_SERIES = re.compile(r"^(membroker_(?:\w+_seconds_(?:sum|count)|stock_extents_total))\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Daemon:
    """A running membrokerd on a driver, with the default stock or without any."""

    def __init__(self, directory: Path, driver: str, *, stock: bool) -> None:
        self.stock = stock
        self._log = directory / "log"
        config = directory / "membrokerd.toml"
        config.write_text(_config(directory / "run", driver, stock=stock))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, self._log.open("w") as log:
            ready.bind(str(directory / "notify"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "membrokerd.cli", "--config", str(config)],
                env={**os.environ, "NOTIFY_SOCKET": str(directory / "notify")},
                stdout=log,
                stderr=log,
            )
            try:
                self._wait(ready)
            except BaseException:
                self.kill()
                raise
        (self._root,) = (path.parents[1] for path in (directory / "run").glob(f"*/tenants/{TENANT}"))
        with grpc.insecure_channel(f"unix:{self._root}/admin/grpc.sock") as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            device = admin.GetDevice(broker_pb2.GetDeviceRequest(), wait_for_ready=True, timeout=ANSWER_SECONDS)
        self._metrics_url: str = device.metrics_url

    def _wait(self, ready: socket.socket) -> None:
        end = time.monotonic() + START_SECONDS
        while not select.select([ready], [], [], 0.05)[0]:
            if self._process.poll() is not None or time.monotonic() > end:
                raise DaemonFailed(f"membrokerd did not start:\n{self.log_tail()}")

    @property
    def endpoint(self) -> Path:
        """The directory through which the benchmark's tenant enters."""
        return self._root / "tenants" / TENANT

    def counts(self) -> Counts:
        """Return the sums and counts of its histograms now."""
        return parsed(fresh_scrape(self._metrics_url, ANSWER_SECONDS))

    def log_tail(self) -> str:
        """Return the last lines that it wrote."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def stop(self) -> None:
        """Ask it to stop."""
        self._process.send_signal(signal.SIGTERM)
        if self._process.wait(STOP_SECONDS):
            raise DaemonFailed(f"membrokerd did not stop cleanly:\n{self.log_tail()}")

    def kill(self) -> None:
        """End it whatever happened."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _config(runtime: Path, driver: str, *, stock: bool) -> str:
    lines = [f'driver = "{driver}"', f'runtime_directory = "{runtime}"', f'state_directory = "{runtime}/kept"']
    lines.append(f'host_capacity = "{HOST_CAPACITY}"')
    if not stock:
        lines.append("stock = 0")
    if driver == "host":
        lines += [f"capacity = {TWIN_BYTES}", f'stock = "{TWIN_STOCK}"' if stock else ""]
    return "\n".join([*lines, "[metrics]", "port = 0", "[tenants]", f"{TENANT} = {{}}", ""])


def parsed(text: str) -> Counts:
    """Return what /metrics says of times and of the stock, by name and the labels that matter."""
    found: dict[tuple[str, Labels], float] = {}
    for name, labels, value in _SERIES.findall(text):
        kept = tuple(sorted((key, word) for key, word in _LABEL.findall(labels) if key not in _IGNORED))
        found[name, kept] = found.get((name, kept), 0.0) + float(value)
    return found


def difference(before: Counts, after: Counts) -> Counts:
    """Return what came to `before`."""
    return {key: value - before.get(key, 0) for key, value in after.items()}


@contextmanager
def running(driver: str, *, stock: bool) -> Iterator[Daemon]:
    """Run a daemon, which must stop cleanly at the end. Where the block fails, the end of its log is shown."""
    directory = Path(tempfile.mkdtemp(prefix="membroker-bench-"))
    daemon = None
    try:
        daemon = Daemon(directory, driver, stock=stock)
        yield daemon
        daemon.stop()
    except Exception:
        if daemon is not None:
            print(f"the end of the log of membrokerd, {'with' if stock else 'without'} stock:", file=sys.stderr)
            print(daemon.log_tail(), file=sys.stderr, flush=True)
        raise
    finally:
        if daemon is not None:
            daemon.kill()
        shutil.rmtree(directory, ignore_errors=True)
