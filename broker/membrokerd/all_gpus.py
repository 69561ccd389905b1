"""`membrokerd --all`: one daemon process for each GPU of the machine, all started from the same configuration.

Owns the processes: it starts them, starts one again that has died, passes SIGTERM and SIGHUP on, and serves the metrics
of all on one port. docs/operating.md says when it starts a daemon again, and when it ends. Each daemon tells its state
by systemd's notify protocol, on a socket of its own, and has a keeper of its own, because systemd's store belongs to
the parent. The kernel sends it a SIGTERM if the parent dies. It must never lend memory or touch a tenant's endpoint:
when it dies, no worker loses anything.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any
from urllib.parse import urlsplit

from membroker.vmm import DriverError, DriverUnavailable

from .ext import Config, DeviceDirectory, DirectoryError, Heartbeat, logs, notify, started_by_systemd
from .observe.merged import Merged
from .observe.metrics_server import METRICS_PORT, MetricsServer, authority

FIRST_DELAY_SECONDS, LAST_DELAY_SECONDS = 0.2, 30.0
"""How long a daemon that died stays away. The delay doubles with each death."""
STEADY_SECONDS = 10.0
"""A daemon that was ready for this long starts again after the first delay."""
STOP_SECONDS = 10.0
"""How long the daemons have for their stop; each cuts its calls after 5 s itself."""
SILENT_SECONDS = 30.0
"""A daemon whose event loop has not turned for this long is killed and started again."""
WATCH_SECONDS = 1.0
"""How often the parent looks for daemons that are silent."""
_SYSTEMD = ("FDSTORE", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_PID")
"""What systemd says to this process alone."""


def find(config: Config, count: int) -> tuple[str, list[str]]:
    """Return the driver that the daemons are told, and the UUIDs of all devices, which are values of `--device` too.

    The host driver has as many devices as it is asked for.

    The driver stays "auto" if no GPU is usable: the daemon then finds the same, warns, and shows it in its metrics.
    Raises `DriverUnavailable` if no GPU is usable and the configuration wants one.
    """
    if config.driver != "host":
        try:
            return "cuda", _gpus()
        except DriverUnavailable:
            if config.driver == "cuda":
                raise
    return config.driver, ["host", *(f"host-{number}" for number in range(1, count))]


def _gpus() -> list[str]:
    """Return the UUID of each GPU as NVML writes it.

    A GPU that no broker can use, such as an old one for a display, is left out: it must not stop the others. A GPU that
    NVML has lost is in the list: its daemon logs why it cannot start. Raises `DriverError` if no GPU can be used.
    """
    from membroker.vmm.cuda.gpu import Gpu

    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # number GPUs as nvidia-smi does
    found: list[str] = []
    unusable: list[DriverUnavailable] = []
    for number in itertools.count():
        try:
            found.append(_uuid_of(Gpu(number).uuid()))
        except DriverUnavailable as error:
            if error.call == "cuDeviceGetAttribute":
                unusable.append(error)
            elif error.call == "cuDeviceGet" and number:  # that was the last one
                break
            else:
                raise
    if not found:
        raise unusable[0]
    for why in unusable:
        logs.warn("no broker can use this GPU: it gets no daemon", error=str(why))
    return found


def _uuid_of(text: str) -> str:
    from membroker.vmm.cuda.nvml import NvmlDevice

    try:
        with closing(NvmlDevice(text)) as device:
            return device.uuid
    except DriverError as error:
        if error.call in ("import pynvml", "nvmlInit"):
            raise
        return f"GPU-{text}"


class _Child:
    """The daemon of one device, over all its processes."""

    def __init__(
        self,
        uuid: str,
        command: Sequence[str],
        directory: DeviceDirectory,
        stopping: asyncio.Event,
        on_change: Callable[[], None],
    ) -> None:
        self.uuid = uuid
        self.state = "starting"
        self.port: int | None = None
        self.restarts = 0
        self.status = 0
        self.tried = asyncio.Event()
        """Set once the first process is ready or has ended."""
        self.process: asyncio.subprocess.Process | None = None
        self._command = [*command, "--device", uuid]
        self._stopping, self._on_change = stopping, on_change
        self._reload_when_ready = False
        self._failures = 0
        self._ready_at = self._silent_seconds = 0.0
        self._address = directory.private("notify")
        try:
            self._listen()
        except OSError as error:
            raise DirectoryError(
                f"cannot put a socket at {self._address}: {error.strerror}; free some space there"
            ) from error

    def _listen(self) -> None:
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._notices.bind(os.fspath(self._address))
        asyncio.get_running_loop().add_reader(self._notices, self._read_notice)

    async def keep_running(self) -> None:
        """Run the daemon until it ends with status 0, as after `membroker drain --exit`, or all are to stop."""
        while not self._stopping.is_set():
            self.status = await self._run_once()
            self.port = None
            if not self.status or self._stopping.is_set():
                break
            seconds = self._delay()
            self.state = "waiting"
            logs.warn("a daemon has died", gpu=self.uuid, status=self.status, restart_seconds=seconds)
            self.tried.set()
            self._on_change()
            try:
                await asyncio.wait_for(self._stopping.wait(), seconds)
            except TimeoutError:
                self.restarts += 1
        self.state = "ended"
        logs.log("a daemon has ended", gpu=self.uuid, status=self.status)
        self.tried.set()
        self._on_change()

    async def _run_once(self) -> int:
        self.state, self._ready_at, self._silent_seconds = "starting", 0.0, 0.0
        environment = {name: value for name, value in os.environ.items() if name not in _SYSTEMD}
        environment |= {"NOTIFY_SOCKET": os.fspath(self._address), "WATCHDOG_USEC": str(int(SILENT_SECONDS * 1e6))}
        try:
            # A group of its own: Ctrl-C and a hangup are the parent's, and would kill an interpreter that starts.
            self.process = await asyncio.create_subprocess_exec(
                *self._command, env=environment, stdin=asyncio.subprocess.DEVNULL, process_group=0
            )
        except OSError as error:  # no memory, or too many processes
            logs.warn("a daemon cannot be started", gpu=self.uuid, error=error.strerror)
            return 1
        logs.log("a daemon was started", gpu=self.uuid, child=self.process.pid)
        if self._stopping.is_set():
            self.send(signal.SIGTERM)
        return await self.process.wait()

    def _delay(self) -> float:
        if self._ready_at and time.monotonic() - self._ready_at >= STEADY_SECONDS:
            self._failures = 0
        seconds = min(LAST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return seconds

    def _read_notice(self) -> None:
        text = self._notices.recv(4096).decode(errors="replace")
        said = dict(line.partition("=")[::2] for line in text.splitlines())
        self._silent_seconds = 0.0
        if said.get("READY") == "1" and self.state == "starting":
            self.state, self._ready_at = "ready", time.monotonic()
            self.port = urlsplit(said.get("X_METRICS_URL", "")).port
            logs.log("a daemon is ready", gpu=self.uuid)
            if self._reload_when_ready:
                self.reload()
            self.tried.set()
            self._on_change()

    def reload(self) -> None:
        """Have the daemon read its configuration again. An interpreter that starts would die of SIGHUP."""
        self._reload_when_ready = self.state != "ready"
        if not self._reload_when_ready:
            self.send(signal.SIGHUP)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if there is a process."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    def kill_if_silent(self) -> None:
        """Kill a daemon whose event loop does not turn. One that is starting may take as long as it needs.

        It is called every WATCH_SECONDS, and counts its calls instead of reading a clock: while the whole machine or
        container is frozen, the parent does not run either, and no daemon hangs.
        """
        self._silent_seconds += WATCH_SECONDS
        if not self._address.exists():
            self._listen_again()
        elif self.state == "ready" and self._silent_seconds > SILENT_SECONDS:
            logs.warn("a daemon does not answer: it gets SIGKILL", gpu=self.uuid)
            self._silent_seconds = 0.0
            self.send(signal.SIGKILL)

    def _listen_again(self) -> None:
        """Bind the socket again that was removed. Meanwhile no message of the daemon arrives, and it does not hang."""
        self._silent_seconds = 0.0
        try:
            self._address.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.close()
            self._listen()
        except OSError as error:
            logs.warn(
                "the parent cannot receive messages of a daemon",
                gpu=self.uuid,
                path=self._address,
                error=error.strerror,
            )
        else:
            logs.warn("a socket of the parent was removed and has been bound again", gpu=self.uuid, path=self._address)

    def close(self) -> None:
        """Remove the socket for notices, if it can be removed."""
        asyncio.get_running_loop().remove_reader(self._notices)
        self._notices.close()
        with suppress(OSError):
            self._address.unlink()


class AllGpus:
    """The parent of all daemons, from start to stop. `command` starts one, given its `--device`."""

    def __init__(self, config: Config, uuids: Sequence[str], command: Sequence[str]) -> None:
        self._config, self._uuids, self._command = config, uuids, command
        self._told_ready = False

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, or until every daemon has ended with status 0. Return the exit status."""
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()
        with ExitStack() as stack:
            directory = DeviceDirectory.of_all(self._config.runtime_directory)
            directory.clear_private(["notify"])
            self._warn_of_keepers()
            self._children = [_Child(uuid, self._command, directory, stopping, self._changed) for uuid in self._uuids]
            for child in self._children:
                stack.callback(child.close)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stopping.set)
            loop.add_signal_handler(signal.SIGHUP, self._reload)
            self._heartbeat = Heartbeat(loop, directory.state)
            self._serve_metrics(stack)
            running = [asyncio.create_task(child.keep_running()) for child in self._children]
            stop = asyncio.create_task(stopping.wait())
            watch = asyncio.create_task(self._watch())
            start = asyncio.create_task(self._all_fail(stopping))
            everything = asyncio.gather(*running)
            ends: list[asyncio.Future[Any]] = [stop, everything]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            watch.cancel()
            notify("STOPPING=1")
            logs.log("stopping")
            stopping.set()
            in_time = await self._stop(everything)
            failed = await start
        logs.log("stopped")
        return int(failed or not in_time)

    def _warn_of_keepers(self) -> None:
        """Each daemon starts a keeper, and systemd ends all processes of a service with it."""
        kept = self._config.descriptor_store != "memory" and self._config.keeper_socket is None
        if kept and started_by_systemd():
            logs.warn(
                "systemd started this process, and ends the keepers of descriptors with it: a restart of the service "
                "loses all segments; use membrokerd.target, or run `membroker-fdstore --stay` for each GPU in a "
                "service of its own and set keeper_socket"
            )

    async def _stop(self, everything: asyncio.Future[list[None]]) -> bool:
        """Stop every daemon; return whether all ended by themselves."""
        for child in self._children:
            child.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(everything), STOP_SECONDS)
        except TimeoutError:
            for child in self._children:
                child.send(signal.SIGKILL)
            await everything
            return False
        return True

    async def _all_fail(self, stopping: asyncio.Event) -> bool:
        """Stop and return True if no daemon could start: each has said why."""
        for child in self._children:
            await child.tried.wait()
        if stopping.is_set() or any(child.state == "ready" or not child.status for child in self._children):
            return False
        stopping.set()
        return True

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for child in self._children:
                child.kill_if_silent()

    def _reload(self) -> None:
        for child in self._children:
            child.reload()

    def _changed(self) -> None:
        """Tell systemd. It is ready once each daemon is or has failed once: one broken GPU must not stop the others."""
        sentence = self._readiness()[1]
        is_up = all(child.tried.is_set() for child in self._children) and any(
            child.state == "ready" for child in self._children
        )
        begins = is_up and not self._told_ready
        if begins:
            self._told_ready = True
            logs.log("ready", pid=os.getpid(), metrics=self._url)
        notify("READY=1\n" * begins + f"STATUS={sentence}")  # a message with READY=1 waits for systemd

    def _readiness(self) -> tuple[bool, str]:
        """Return whether all daemons that have not been drained are ready, and a sentence."""
        wanted = [child for child in self._children if child.state != "ended"]
        missing = [child.uuid for child in wanted if child.state != "ready"]
        sentence = f"{len(wanted) - len(missing)} of {len(self._children)} daemons are ready"
        return bool(wanted) and not missing, f"{sentence}; not ready: {', '.join(missing)}" if missing else sentence

    def _serve_metrics(self, stack: ExitStack) -> None:
        metrics = self._config.metrics
        self._url = "off"
        if not metrics.enabled:
            return
        merged = Merged(self._ports, lambda: {child.uuid: child.restarts for child in self._children})
        states = {"/healthz": self._heartbeat.health, "/readyz": self._readiness}
        port = METRICS_PORT if metrics.port is None else metrics.port
        try:
            server = MetricsServer(metrics.address, port, merged.render, states, merged.page)
        except OSError as error:
            raise DirectoryError(
                f"cannot serve metrics on {metrics.address} port {port}: {error.strerror}; choose another address or "
                "port in [metrics], or metrics.enabled = false"
            ) from error
        server.start()
        stack.callback(server.close)
        self._url = f"http://{authority(server.server_name, server.server_port)}/metrics"

    def _ports(self) -> Mapping[str, int | None]:
        return {child.uuid: child.port for child in self._children}


def command_of(options: Mapping[str, object], driver: str) -> list[str]:
    """Return the command of a daemon, without its device: the options that were given to the parent."""
    given = {name: value for name, value in options.items() if value is not None and not name.startswith("metrics.")}
    given["driver"] = driver
    words = (f"--{name.replace('.', '-').replace('_', '-')}={value}" for name, value in given.items())
    return [sys.executable, "-m", "membrokerd.cli", "--of-all", str(os.getpid()), *words]
