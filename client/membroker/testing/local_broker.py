"""`broker()`: a broker of host memory for the tests of a program, with faults that it is to survive.

Owns one daemon, its directory, and the faults. The program under test borrows as it always does, from a real daemon:
nothing of the library is replaced. It needs `membroker[broker]`, and neither a GPU nor root.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from ..errors import InvalidRequest, MembrokerError
from ..ext import arguments, names
from ..vmm.driver import Location

if TYPE_CHECKING:
    from .. import Client
    from ..admin import Admin
    from ..types import DeviceStatus

START_SECONDS = 60.0
"""How long a daemon may take to start, on a machine where many tests run."""
NEIGHBOUR = "neighbour"
"""The tenant that `recall_now` borrows for."""
PROGRAM = "default"
"""The tenant of the program under test."""
_RECALL_SECONDS = 60.0

_CONFIG = """\
driver = "host"
capacity = "{capacity}"
host_capacity = "{host_capacity}"
settle_seconds = 0.5
model_grace_seconds = 0
runtime_directory = "{directory}/run"
state_directory = "{directory}/state"
{config}
[metrics]
port = 0
[tenants.{program}]
[tenants.{neighbour}]
"""


class LocalBroker:
    """A running daemon that lends memory of this machine. `broker()` makes it."""

    def __init__(self, directory: Path, config: str) -> None:
        self._directory = directory
        self._faults = directory / "faults"
        self._faults.mkdir()
        self._number = 0
        self._neighbour: Client | None = None
        self._process: subprocess.Popen[bytes] | None = None
        (directory / "membrokerd.toml").write_text(config)
        self.start()

    @property
    def endpoint(self) -> Path:
        """The directory of the program's endpoint: for `connect`, or MEMBROKER_ENDPOINT of another process."""
        return self._directory / "run" / "host" / "tenants" / PROGRAM

    @property
    def log(self) -> str:
        """What the daemon has logged."""
        return (self._directory / "log").read_text(errors="replace")

    def device(self) -> DeviceStatus:
        """Return the books: what is lent now, and what is free."""
        with self._admin() as admin:
            return admin.device()

    # Faults

    def refuse_next(self, count: int = 1) -> None:
        """Refuse the next `count` requests for bytes, of any process, with `OutOfMemory`, as if all were lent.

        Requests that a pool makes ahead of need do not count.
        """
        for _ in range(count):
            self._number += 1
            (self._faults / f"refuse-{self._number}").touch()

    @property
    def refusals_left(self) -> int:
        """How many of those refusals are still to come."""
        return len(list(self._faults.glob("refuse-*")))

    def recall_now(self, size: int, location: str = "device") -> Future[None]:
        """Let another tenant want `size` bytes more than are free, within its guarantee, so that they are recalled.

        The program's `on_recall` is called for them. The result comes when the bytes have been released, and the other
        tenant has left them; it is `OutOfMemory` when the program has released too little for 60 seconds.
        """
        recalled: Future[None] = Future()
        place = arguments.location_of(location)
        Thread(target=self._recall, args=(size, place, recalled), name="membroker-recall-now", daemon=True).start()
        return recalled

    def _recall(self, size: int, place: Location, recalled: Future[None]) -> None:
        try:
            if self._neighbour is None:
                from .. import connect  # late: the suite for drivers shares this package, and needs no gRPC

                self._neighbour = connect(self.endpoint.with_name(NEIGHBOUR))
            model = self._neighbour.model(NEIGHBOUR)
            with self._admin() as admin:
                books = admin.device().locations[place.value]
                wanted = books.capacity_bytes - books.lent_bytes + size
                admin.set_quota(f"tenants/{NEIGHBOUR}", place, {"guarantee_bytes": wanted})
                admin.set_quota(model.resource_name, place, {"guarantee_bytes": wanted})
                try:
                    model.declare(wanted, place, timeout=_RECALL_SECONDS)
                finally:
                    model.declare(0, place)
                    admin.set_quota(model.resource_name, place, {"guarantee_bytes": None})
                    admin.set_quota(f"tenants/{NEIGHBOUR}", place, {"guarantee_bytes": None})
        except BaseException as error:  # noqa: BLE001  # raised where the result is taken
            recalled.set_exception(error)
        else:
            recalled.set_result(None)

    def die(self) -> None:
        """Kill the daemon. Mapped memory stays valid, and calls wait for the next daemon: `start`."""
        self._end(signal.SIGKILL)

    def start(self) -> None:
        """Start the daemon, again after `die`; it takes over what the last one had lent."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified, (self._directory / "log").open("ab") as log:
            address = self._directory / "notify"
            address.unlink(missing_ok=True)
            notified.bind(str(address))
            notified.settimeout(0.05)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "membrokerd.testing", self._directory, "--config", "membrokerd.toml"],
                cwd=self._directory,
                stdin=subprocess.PIPE,  # it ends when this is closed, also by the death of this process
                stdout=log,
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": str(address)},
            )
            deadline = time.monotonic() + START_SECONDS
            while not _is_notified(notified):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._end(signal.SIGKILL)
                    raise MembrokerError(f"the broker for the tests did not start:\n{self.log}")

    def _admin(self) -> Admin:
        from ..admin import Admin

        return Admin(self._directory / "run" / "host" / "admin" / "grpc.sock")

    def close(self) -> None:
        """Stop the daemon."""
        if self._neighbour is not None:
            with suppress(MembrokerError):
                self._neighbour.close()
        self._end(signal.SIGTERM)

    def _end(self, signal_number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with process:  # it closes the standard input, and waits
            process.send_signal(signal_number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(START_SECONDS)
            process.kill()


def _is_notified(notified: socket.socket) -> bool:
    with suppress(TimeoutError):
        return bool(notified.recv(4096))
    return False


@contextmanager
def broker(
    capacity: int | str = "1GiB", *, host_capacity: int | str = "256MiB", config: str = ""
) -> Iterator[LocalBroker]:
    """Run a broker of host memory during a block; MEMBROKER_ENDPOINT leads to it meanwhile. For a pytest fixture:

        @pytest.fixture
        def broker():
            with membroker.testing.broker("64MiB") as running:
                yield running

    A program under test connects as always, in this process or in those that it starts. `config` are more keys, as
    lines of the daemon's TOML. A model ends with its last session, so each test begins with none.

    Raises `InvalidRequest` without the package `membroker[broker]`, and `MembrokerError` with the daemon's log if it
    does not start.
    """
    if find_spec("membrokerd") is None or find_spec("pydantic") is None:
        raise InvalidRequest("a broker for tests needs its packages: pip install 'membroker[broker]'")
    directory = Path(tempfile.mkdtemp(prefix="membroker-"))
    before = os.environ.get(names.ENDPOINT_VARIABLE)
    running = None
    try:
        text = _CONFIG.format(
            capacity=capacity,
            host_capacity=host_capacity,
            directory=directory,
            config=config,
            program=PROGRAM,
            neighbour=NEIGHBOUR,
        )
        running = LocalBroker(directory, text)
        os.environ[names.ENDPOINT_VARIABLE] = str(running.endpoint)
        yield running
    finally:
        if before is None:
            os.environ.pop(names.ENDPOINT_VARIABLE, None)
        else:
            os.environ[names.ENDPOINT_VARIABLE] = before
        if running is not None:
            running.close()
        shutil.rmtree(directory, ignore_errors=True)
