"""How much host memory the image of a guest may still take: of the machine, and of the control groups around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Return what is free, or None if nothing says so. A program that takes more is killed by the kernel."""
    return min((size for size in (_of_machine(), *of_groups()) if size is not None), default=None)


def _of_machine() -> int | None:
    return _field(Path("/proc/meminfo"), "MemAvailable:", 1024)


def of_groups(groups: Path = _GROUPS, file: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield what this process's control group, and each around it, leaves free. Memory of files can be taken back."""
    try:
        own = next(line for line in file.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    path = groups / own.removeprefix("0::").strip("/")
    while path.is_relative_to(groups):
        try:
            limit, used = (path / "memory.max").read_text().strip(), int((path / "memory.current").read_text())
        except (OSError, ValueError):
            limit, used = "max", 0  # the root has no limit, and neither has a group without this controller
        if limit.isdecimal():
            yield max(0, int(limit) - used + (_field(path / "memory.stat", "inactive_file", 1) or 0))
        path = path.parent


def _field(file: Path, name: str, unit: int) -> int | None:
    try:
        for line in file.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * unit
    except (OSError, ValueError):
        pass
    return None
