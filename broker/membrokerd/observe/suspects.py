"""Who uses more of the device than the books say: what the driver sees of each process, beside its sessions' charges.

Owns the comparison, which is pure, and what a suspect is called in the log. It names suspects for an operator: the
driver's figures of processes are never booked, and nobody is refused anything for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from membroker.vmm import format_size
from membroker.vmm.sizes import MIB
from membroker.wire.names import session_name

from ..core.events import ModelName
from ..core.snapshot import HolderView

NOTHING = HolderView(0, 0, (), ())
CONTEXT_BYTES: Mapping[str, int] = {"cuda": 600 * MIB, "host": 0}
"""What a process may use beyond its charge without being a suspect, by driver: a context (518 MiB on an H200)."""
MOST_NAMED = 8
"""How many suspects of one rise are named."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the driver and the books see it, in bytes at the device.

    `charged` is what its sessions are charged, dead ones included; `segments` is the size of the segments that they
    hold, which are mapped by it and charged to models.
    """

    pid: int
    used: int
    charged: int
    segments: int
    sessions: tuple[int, ...]
    models: tuple[ModelName, ...]

    @property
    def known(self) -> int:
        """What the books know that it may use."""
        return self.charged + self.segments

    @property
    def excess(self) -> int:
        """What it uses beyond that; 0 where it uses less."""
        return max(0, self.used - self.known)


def compare(
    listed: Iterable[tuple[int, int]], before: Mapping[int, HolderView], after: Mapping[int, HolderView]
) -> list[Process]:
    """Return the processes that a driver listed as (pid, bytes), largest excess first.

    The holders were taken before and after the driver was asked, by pid, and the one that holds more counts: what a
    process borrowed or released meanwhile is not an excess.
    """
    found = [_process(pid, used, after.get(pid, NOTHING), before.get(pid, NOTHING)) for pid, used in listed]
    return sorted(found, key=lambda process: (-process.excess, process.pid))


def _process(pid: int, used: int, *holders: HolderView) -> Process:
    held = max(holders, key=lambda holder: holder.charged + holder.segments)
    return Process(pid, used, held.charged, held.segments, held.sessions, held.models)


def fields(process: Process) -> dict[str, Any]:
    """Return what a log line says of a suspect."""
    return {
        "pid": process.pid,
        "command": command_of(process.pid),
        "uses": format_size(process.used),
        "charged": format_size(process.charged),
        "segments": format_size(process.segments),
        "sessions": " ".join(map(session_name, process.sessions)) or "none",
        "models": " ".join(map(str, process.models)) or "none",
    }


def command_of(pid: int) -> str:
    """Return the command of a process as the kernel shortens it; nothing where it has ended, or cannot be read."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return comm.read().strip()
    except OSError:
        return ""
