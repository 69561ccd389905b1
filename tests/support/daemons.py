"""Real daemons for tests: started as a user would, in a directory of their own, and waited for without sleeping."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import shutil
import signal
import socket
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc
from prometheus_client.parser import text_string_to_metric_families

from membroker.v1 import admin_pb2_grpc, broker_pb2, resources_pb2
from tests.support.template import PythonProcess

_T = TypeVar("_T")
DEADLINE_SECONDS = 120.0
"""What is waited for has long come by then, on a machine where others compute, too: a test that waits longer hangs."""
SETTLE_SECONDS = 2.0
"""How long a daemon may take after a test until nobody uses it."""
DEFAULTS: Mapping[str, Any] = {
    "driver": "host",
    "capacity": "256MiB",
    "settle_seconds": 10.0,
    "metrics": {"port": 0},
    "tenants": {"red": {}, "blue": {}},
}


_CANCELLED = re.compile(
    r"Traceback \(most recent call last\):\n"
    r"(  File \"src/python/grpcio/\S+, line .*\n)+"
    r"asyncio.exceptions.CancelledError\n"
)
"""What gRPC's C code prints, past any logger, about a call that the daemon's stop has cancelled."""


def until(what: Callable[[], _T], seconds: float = DEADLINE_SECONDS) -> _T:
    """Return the first true value of `what`, or fail after `seconds`. For states that nothing announces."""
    began = time.monotonic()
    while True:
        value = what()
        if value:
            return value
        waited = time.monotonic() - began
        assert waited < seconds, "it did not become true in time"
        # To look costs CPU time, most often in a daemon, too. A look in a long wait may be late by a twentieth of it.
        time.sleep(min(0.002 + waited / 20, 0.1))


async def until_async(condition: Callable[[], object]) -> None:
    """Wait for a state in a coroutine. The event loop goes on meanwhile."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


class Daemon:
    """A running membrokerd. `config` are TOML keys above DEFAULTS; None leaves one out. `device` is a host driver's."""

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any] | None = None,
        descriptors: int | None = None,
        module: str = "membrokerd.cli",
        device: int = 0,
    ):
        self.directory = directory
        self.module = module
        self.device_number = device
        self.log_path = directory / "log"
        self.config = {**DEFAULTS, **(config or {})}
        runtime = Path(self.config.get("runtime_directory", directory / "run"))
        self.root = runtime / (f"host-{device}" if device else "host")
        self._start(descriptors)

    def _start(self, descriptors: int | None, *, may_end: bool = False) -> None:
        path = self.directory / "membrokerd.toml"
        places = {"runtime_directory": str(self.directory / "run"), "state_directory": str(self.directory / "kept")}
        given = {**places, **self.config}
        path.write_text(to_toml({key: value for key, value in given.items() if value is not None}))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            address = self.directory / "notify"
            address.unlink(missing_ok=True)
            notified.bind(str(address))
            arguments = ["-m", *self.module.split(), "--config", str(path), "--log-level", "debug"]
            if self.device_number:
                arguments += ["--device", str(self.device_number)]
            if descriptors is not None:
                limit = f"import resource,sys,os;resource.setrlimit(resource.RLIMIT_NOFILE,({descriptors},)*2)"
                arguments = ["-c", f"{limit};os.execv(sys.executable,[sys.executable,*sys.argv[1:]])", *arguments]
            with self.log_path.open("ab") as log:
                environment = {**os.environ, "NOTIFY_SOCKET": str(address)}
                self.process = PythonProcess(arguments, stderr=log, stdout=log, env=environment)
            self._wait_until_ready(notified, may_end)

    def _wait_until_ready(self, notified: socket.socket, may_end: bool) -> None:
        end = time.monotonic() + DEADLINE_SECONDS
        while not select.select([notified], [], [], 0.05)[0]:
            if may_end and self.process.poll() is not None:
                return
            assert self.process.poll() is None, f"membrokerd did not start:\n{self.log()}"
            assert time.monotonic() < end, f"membrokerd did not become ready:\n{self.log()}"

    def endpoint(self, tenant: str = "red") -> Path:
        return self.root / "tenants" / tenant

    @property
    def admin(self) -> Path:
        return self.root / "admin"

    def log(self) -> str:
        """Return the whole lines of its log: it may be writing another one at this moment."""
        return whole_lines(self.log_path)

    def suspects(self) -> list[int]:
        """Return the pids of the processes that the daemon has named in its log, in that order."""
        return [int(pid) for pid in re.findall(r"more of the device than it is charged pid=(\d+) ", self.log())]

    @contextmanager
    def admin_stub(self) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
        with grpc.insecure_channel(f"unix:{self.admin}/grpc.sock") as channel:
            yield admin_pb2_grpc.AdminServiceStub(channel)

    def device(self) -> Any:
        with self.admin_stub() as stub:
            return stub.GetDevice(broker_pb2.GetDeviceRequest(), wait_for_ready=True, timeout=DEADLINE_SECONDS)

    def books(self) -> Any:
        return self.device().locations[0]

    def sessions(self) -> list[Any]:
        with self.admin_stub() as stub:
            return list(stub.ListSessions(broker_pb2.ListSessionsRequest(page_size=1000)).sessions)

    def models(self) -> list[Any]:
        with self.admin_stub() as stub:
            return list(stub.ListModels(broker_pb2.ListModelsRequest(page_size=1000)).models)

    def metrics(self) -> str:
        """Return a scrape that is not older than this call: the daemon keeps one for a second."""
        began, url = time.time(), self.device().metrics_url

        def scrape() -> str:
            with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
                text = str(answer.read().decode())
            taken = re.search(r"^membroker_scrape_time_seconds\S* (\S+)$", text, re.MULTILINE)
            return text if taken is not None and float(taken[1]) >= began else ""

        return until(scrape)

    def figure(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series that have these labels, by a scrape: 0 without any."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.metrics())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def is_unused(self) -> bool:
        """Say whether there is no session, no model, no segment, no byte lent and no drain."""
        with self.admin_stub() as stub:
            device = stub.GetDevice(broker_pb2.GetDeviceRequest())
            if device.draining or any(
                books.lent_bytes or books.releasing_bytes or books.unaccounted_bytes for books in device.locations
            ):
                return False
            sessions = stub.ListSessions(broker_pb2.ListSessionsRequest()).sessions
            return not sessions and not stub.ListModels(broker_pb2.ListModelsRequest()).models

    def delete_segments(self) -> None:
        """Delete every sealed segment; those that are still held end with their last hold."""
        with self.admin_stub() as stub:
            for one in stub.ListSegments(broker_pb2.ListSegmentsRequest(page_size=1000)).segments:
                if one.state == resources_pb2.Segment.SEALED:
                    try:
                        stub.DeleteSegment(broker_pb2.DeleteSegmentRequest(name=one.name))
                    except grpc.RpcError as error:
                        if error.code() is not grpc.StatusCode.NOT_FOUND:  # its last session came first
                            raise

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def resident_bytes(self) -> int:
        """Return the daemon's resident memory that is its own (no memfd pages)."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_SECONDS)

    def start_again(self, *, may_end: bool = False) -> None:
        """Start a successor in the same place, and wait until it is ready, or with `may_end` until it has ended."""
        assert self.process.poll() is not None, "it still runs"
        self._start(None, may_end=may_end)

    def keeper(self) -> int:
        """Return the pid of the process that keeps the descriptors; 0 if it does not run at the moment."""
        socket_path = os.fsencode(self.root / "state" / "fdstore.sock")
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and socket_path in (entry / "cmdline").read_bytes().split(b"\0"):
                    return int(entry.name)
        return 0


@contextmanager
def running(
    config: Mapping[str, Any] | None = None, descriptors: int | None = None, module: str = "membrokerd.cli"
) -> Iterator[Daemon]:
    """Run a daemon; at the end it must still answer, and stop with status 0, unless the test ended it itself."""
    directory = Path(tempfile.mkdtemp(prefix="mb-"))
    daemon = None
    try:
        daemon = Daemon(directory, config, descriptors, module)
        yield daemon
        if daemon.process.poll() is None:
            assert daemon.stop() == 0, daemon.log()
            assert "a fault of the broker" not in daemon.log(), daemon.log()
            assert not has_traceback(daemon.log()), daemon.log()
    finally:
        if daemon is not None:
            with suppress(ProcessLookupError):
                daemon.process.kill()
            daemon.process.wait()
        shutil.rmtree(directory, ignore_errors=True)  # a keeper that ends takes its socket away


def whole_lines(log: Path) -> str:
    """Return what a log has, up to the end of its last whole line."""
    written = log.read_bytes()
    return written[: written.rfind(b"\n") + 1].decode()


def has_traceback(log: str) -> bool:
    """Say whether a daemon's log has a traceback, besides that of a call by gRPC that the daemon's stop cancelled."""
    life, stopping, end = log.partition(" INFO stopping")
    return "Traceback" in life + stopping + _CANCELLED.sub("", end)


def find_root(daemon: Daemon) -> Daemon:
    """Tell a daemon's wrapper the directory of its device, which is named after the GPU; return the wrapper."""
    (daemon.root,) = (daemon.directory / "run").glob("gpu-*")
    return daemon


class Shared:
    """One daemon for several tests, as long as each leaves it unused: a start costs more than most tests."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._daemon: Daemon | None = None

    @contextmanager
    def borrowed(self) -> Iterator[Daemon]:
        """Yield the daemon. The next test has another one, where this one ended or has something left in its books."""
        if self._daemon is None:
            self._daemon = self._open.enter_context(running({"model_grace_seconds": 0}))
        try:
            yield self._daemon
        except BaseException:
            self.close()
            raise
        if not self._is_as_before(self._daemon):
            self.close()

    def _is_as_before(self, daemon: Daemon) -> bool:
        if daemon.process.poll() is None:
            daemon.delete_segments()
        try:
            until(lambda: daemon.process.poll() is not None or daemon.is_unused(), SETTLE_SECONDS)
        except AssertionError:
            return False
        return daemon.process.poll() is None

    def close(self) -> None:
        """End the daemon, which must still answer, and stop with status 0, unless a test ended it."""
        self._daemon = None
        self._open.close()


@contextmanager
def hold_still(daemon: Daemon) -> Iterator[None]:
    """Stop the daemon for a moment, so that what happens meanwhile finds it all at once, in any order."""
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitpid(daemon.process.pid, os.WUNTRACED)
    try:
        yield
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def to_toml(document: Mapping[str, Any]) -> str:
    """Write a configuration: plain values first, then tables."""
    text = _table(document, "")
    assert tomllib.loads(text) == json.loads(json.dumps(document))
    return text


def _table(table: Mapping[str, Any], name: str) -> str:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"[{name}]"] if name else []
    lines += [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    keys = {key: key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key) for key in table}
    inner = (_table(table[key], f"{name}.{keys[key]}" if name else keys[key]) for key in table if key not in plain)
    return "\n".join([*lines, *inner, ""])
