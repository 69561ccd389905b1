"""What the figures depend on: the machine, the versions, and how much others were at work on it."""

from __future__ import annotations

import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path

import google.protobuf
import grpc

import membroker


def facts() -> dict[str, str]:
    """Return what a reader must know of this machine, by its name."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}Z",
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": f"{platform.system()} {platform.release()}",
        "load average": f"{os.getloadavg()[0]:.2f} when it began",
        "python": platform.python_version(),
        "grpc": grpc.__version__,
        "protobuf": google.protobuf.__version__,
        "membroker": membroker.__version__,
    }


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


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
