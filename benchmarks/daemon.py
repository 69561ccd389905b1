"""A daemon of a benchmark's own: its start, its stop, and what it says of itself."""

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
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from membroker.v1 import admin_pb2_grpc, broker_pb2

START_SECONDS = 60.0
STOP_SECONDS = 60.0
ANSWER_SECONDS = 60.0
TENANT = "bench"
TAIL_LINES = 30


class DaemonFailed(Exception):
    """The daemon did not start, or did not stop cleanly; the message has the end of its log."""


class Daemon:
    """A running membrokerd, watched from outside. It gets the configuration `config`, and directories of its own."""

    module = "membrokerd.cli"

    def __init__(self, directory: Path, config: str, environment: Mapping[str, str] | None = None) -> None:
        self._log = directory / "log"
        file, runtime = directory / "membrokerd.toml", directory / "run"
        places = f'runtime_directory = "{runtime}"\nstate_directory = "{directory}/kept"\n'
        file.write_text(f"{places}{config}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, self._log.open("w") as log:
            ready.bind(str(directory / "notify"))
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, "--config", str(file)],
                env={**os.environ, **(environment or {}), "NOTIFY_SOCKET": str(directory / "notify")},
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
        self._channel = grpc.insecure_channel(f"unix:{self._root}/admin/grpc.sock")
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


_D = TypeVar("_D", bound=Daemon)


@contextmanager
def running(start: Callable[[Path], _D]) -> Iterator[_D]:
    """Run the daemon that `start` makes; it must stop cleanly. If the block fails, print the end of its log."""
    directory = Path(tempfile.mkdtemp(prefix="membroker-bench-"))
    daemon = None
    try:
        daemon = start(directory)
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
