"""A daemon on the host driver, with its memory and its share of a processor as the kernel reports them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from membroker.v1 import admin_pb2

from .. import daemon
from ..daemon import TENANT

_CPU_CLOCK = 2
"""What makes a pid the number of a process's CPU clock, as clock_getcpuclockid(3) does."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# The capacity is a figure only: what is borrowed is never written to, so it needs no memory.
_CONFIG = """\
driver = "host"
capacity = "256GiB"
[metrics]
port = 0
[tenants]
"""


class Daemon(daemon.Daemon):
    """A running membrokerd: this tree's, or that of another checkout at `tree`."""

    def __init__(self, directory: Path, tenants: Sequence[str], tree: Path | None = None, config: str = "") -> None:
        names = "".join(f"{name} = {{}}\n" for name in tenants)
        sources = {"PYTHONPATH": f"{tree}/client:{tree}/broker"} if tree is not None else {}
        super().__init__(directory, config + _CONFIG + names, sources)

    def memory(self) -> tuple[int, int]:
        """Return the bytes that the daemon has resident (RSS), and its share of them (PSS)."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
        return sizes["Rss:"], sizes["Pss:"]

    def guarantee(self, tenant: str, size: int) -> None:
        """Guarantee a tenant so many bytes of the device."""
        request = admin_pb2.SetQuotaRequest(name=f"tenants/{tenant}", guarantee_bytes=size)
        request.update_mask.paths.append("guarantee_bytes")
        self._admin.SetQuota(request)

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used, in nanoseconds' resolution."""
        return time.clock_gettime((~self.process.pid << 3) | _CPU_CLOCK)


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


def running(
    tenants: Sequence[str] = (TENANT,), tree: Path | None = None, config: str = ""
) -> AbstractContextManager[Daemon]:
    """Run a daemon; it must stop cleanly at the end."""
    return daemon.running(lambda directory: Daemon(directory, tenants, tree, config))
