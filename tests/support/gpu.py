"""The tests' side of a GPU: a daemon on it, its workers, and the figures that both are compared with.

A GPU shows only one sum. What a worker's context takes of it (518 MiB on an H200) is in no books and shows as
unaccounted, so figures are compared with what they were when all contexts were there, and to `SLACK`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from membroker.vmm import Location
from membroker.vmm.cuda.driver import CudaDriver
from tests.support.daemons import DEADLINE_SECONDS, Daemon, find_root, running, until
from tests.support.sizes import GIB, MIB
from tests.support.workers import ROOT, Worker

_T = TypeVar("_T")
SLACK = 64 * MIB
"""What a GPU may show more or less: page tables, kernels that are loaded at their first use."""
CAPACITY = 4 * GIB


def used(gpu: CudaDriver) -> int:
    """Bytes of the GPU in use by any process."""
    memory = gpu.memory(Location.DEVICE)
    return memory.used


def at_rest(what: Callable[[], _T], seconds: float = 0.3) -> _T:
    """Return a figure once it has been the same for a while: a dead process's context goes bit by bit."""
    last: list[Any] = [what(), time.monotonic()]

    def still() -> bool:
        value = what()
        if value != last[0]:
            last[:] = value, time.monotonic()
        return time.monotonic() - last[1] >= seconds

    until(still)
    value: _T = last[0]
    return value


@contextmanager
def on_gpu(
    gpu: CudaDriver,
    config: Mapping[str, Any] | None = None,
    *,
    back: bool = True,
    module: str = "membrokerd.cli",
) -> Iterator[Daemon]:
    """Run a daemon on the GPU; at the end the GPU has as much in use as before, unless `back` is False.

    Without a stock, unless `config` has one: it changes the GPU's figure when nothing is requested.
    """
    before = at_rest(lambda: used(gpu))
    ours = {"driver": "cuda", "device": gpu.device.uuid, "capacity": CAPACITY, "audit_seconds": 0.1, "stock": 0}
    with running({**ours, **(config or {})}, module=module) as daemon:
        find_root(daemon)
        yield daemon
    if back:
        until(lambda: used(gpu) <= before + SLACK)


def enter(
    one: Worker, daemon: Daemon, tenant: str = "red", transport: str = "handoff", model: str = "m", page: str = "64MiB"
) -> Worker:
    """Have a worker open a session, a context, a model and a pool; it holds nothing yet."""
    one.connect(daemon, tenant, transport)
    one.do("from tests.support.gpu_work import *")
    one.do(f"model = client.model({model!r}, virtual_capacity='64GiB'); pool = model.pool(page_size={page!r})")
    one.do("driver = model.driver; warm_up(driver)")
    return one


def borrow(one: Worker, size: int, value: int = 0x5A) -> None:
    """Have a worker back the first `size` bytes of its pool and fill them."""
    one.do(f"address = pool.allocate(0, {size}); fill(driver, address, {size}, {value})")


def still_has(one: Worker, size: int, value: int = 0x5A) -> bool:
    """Say whether the first `size` bytes of a worker's pool hold `value`, at some places of them."""
    return bool(one.ask(f"holds(driver, pool.base_address, {size}, {value})"))


def unaccounted(daemon: Daemon) -> int:
    """What the GPU has in use beyond the books, at the last audit."""
    return int(daemon.books().unaccounted_bytes)


def near(figure: int, expected: int) -> bool:
    """Say whether a figure is the expected one, to `SLACK`."""
    return abs(figure - expected) <= SLACK


def states(daemon: Daemon) -> list[str]:
    return [type(session).State.Name(session.state) for session in daemon.sessions()]


def until_lendable(daemon: Daemon, left: int = 0) -> None:
    """Wait until no more than `left` bytes are lent, and nothing is charged to the dead."""

    def free() -> bool:
        books = daemon.books()
        return bool(books.lent_bytes == left and books.releasing_bytes == 0)

    until(free)


def kill_and_time(one: Worker, daemon: Daemon, left: int = 0) -> float:
    """Kill a worker with SIGKILL, and return the seconds until all but `left` bytes could be lent again."""
    began = time.monotonic()
    one.process.kill()
    until_lendable(daemon, left)
    seconds = time.monotonic() - began
    one.process.wait(DEADLINE_SECONDS)
    return seconds


def milliseconds(times: list[float]) -> str:
    return ", ".join(f"{1000 * each:.0f}" for each in times) + " ms"


def run(*command: str, status: int = 0, seconds: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python module with arguments, as a shell would; it must end with `status` and without a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == status, f"status {done.returncode}: {done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done
