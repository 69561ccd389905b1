"""What the figures depend on: the machine, the versions, the GPU, and how much others were at work."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import google.protobuf
import grpc

import membroker
from membroker.vmm import Driver, Location, format_size

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def facts(driver: Driver | None = None, packages: Iterable[str] = ()) -> dict[str, str]:
    """Return what a reader must know, by its name: the machine, a driver's device, and packages if they are there."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}Z",
        **({} if driver is None else _device(driver)),
        **_versions(packages),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": f"{platform.system()} {platform.release()}",
        "load average": f"{os.getloadavg()[0]:.2f} when it began",
        "python": platform.python_version(),
        "grpc": grpc.__version__,
        "protobuf": google.protobuf.__version__,
        "membroker": membroker.__version__,
        "descriptors": str(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        "user": "root" if os.geteuid() == 0 else "not root",
    }


def _device(driver: Driver) -> dict[str, str]:
    device, memory = driver.device, driver.memory(Location.DEVICE)
    about = {"device": device.name}
    if memory is not None:
        about["memory"] = f"{format_size(memory.total)}, of which {format_size(memory.used)} in use when it began"
    if device.driver == "cuda":
        about |= {"driver": device.driver_version, "CUDA": _cuda_version(), **_versions(["cuda-bindings"])}
    return about | {"granularity": format_size(device.granularity)}


def _cuda_version() -> str:
    """Return the CUDA version that the driver speaks."""
    import cuda.bindings.driver as cuda

    try:
        result, number = cuda.cuDriverGetVersion()
    except RuntimeError:  # the bindings' own, for a libcuda that lacks the call
        return "unknown"
    return "unknown" if int(result) else f"{number // 1000}.{number % 1000 // 10}"


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def busy_percent(seconds: float) -> float:
    """Wait, and return how busy all processors were; asked while the benchmark does nothing, it is the others' work."""
    busy, total = _ticks()
    time.sleep(seconds)
    busy_then, total_then = _ticks()
    return 100 * (busy_then - busy) / max(1, total_then - total)


def _ticks() -> tuple[int, int]:
    """Return the ticks of all processors since the machine began: those that were worked in, and all."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


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
