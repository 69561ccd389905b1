"""Suspects: processes that use more of the device than the books say.

Owns the comparison of the driver's figure of each process with its sessions' charges, which is pure, and the fields of
a suspect in the log. A guest's processes have no session: what `membroker run --guest`, their ancestor, has declared
counts for them. Suspects are named for the operator only: the driver's figures are never booked, and no request
is refused because of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from membroker.vmm import format_size
from membroker.vmm.sizes import MIB
from membroker.wire.names import session_name

from ..core.names import ModelName
from ..core.snapshot import HolderView
from ..system.pods import Pod

NOTHING = HolderView(0, 0, (), ())
CONTEXT_BYTES: Mapping[str, int] = {"cuda": 600 * MIB, "host": 0}
"""What a process may use beyond its charge without being a suspect, by driver: a context (518 MiB on an H200)."""
MOST_ANCESTORS = 32
"""How many generations of a process are looked at."""
MOST_NAMED = 8
"""How many suspects of one rise are named."""


@dataclass(frozen=True, slots=True)
class SeenProcess:
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
    def excess(self) -> int:
        """Bytes that it uses beyond what the books have of it; 0 if it uses less."""
        return max(0, self.used - self.charged - self.segments)


def compare(
    listed: Iterable[tuple[int, int]],
    before: Mapping[int, HolderView],
    after: Mapping[int, HolderView],
    ancestors: Callable[[int], Iterable[int]] = lambda pid: (),
) -> list[SeenProcess]:
    """Return the processes that a driver listed as (pid, bytes), largest excess first.

    The holders were taken before and after the driver was asked, by pid, and the one that holds more counts: what a
    process borrowed or released meanwhile is not an excess. A process without a session is a part of its nearest
    ancestor that has one, and is charged with what that one is charged and does not use itself.
    """
    used = dict(listed)
    held = {pid: _held(after.get(pid, NOTHING), before.get(pid, NOTHING)) for pid in {*before, *after}}
    left = {pid: max(0, holder.charged - used.get(pid, 0)) for pid, holder in held.items()}
    found = []
    for pid, size in used.items():
        owner = next((each for each in chain([pid], ancestors(pid)) if each in held), pid)
        holder = held.get(owner, NOTHING)
        charged, segments = holder.charged, holder.segments
        if owner != pid:
            charged, segments = min(size, left[owner]), 0
            left[owner] -= charged
        found.append(SeenProcess(pid, size, charged, segments, holder.sessions, holder.models))
    return sorted(found, key=lambda process: (-process.excess, process.pid))


def _held(*holders: HolderView) -> HolderView:
    return max(holders, key=lambda holder: holder.charged + holder.segments)


def ancestors_of(pid: int) -> Iterator[int]:
    """Yield the pids of the parent of a process, and so on, as far as /proc shows them."""
    for _ in range(MOST_ANCESTORS):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return
        if pid <= 1:
            return
        yield pid


def fields(process: SeenProcess, pod: Pod) -> dict[str, Any]:
    """Return the fields of a suspect's log line."""
    return {
        "pid": process.pid,
        "command": command_of(process.pid),
        "uses": format_size(process.used),
        "charged": format_size(process.charged),
        "segments": format_size(process.segments),
        "sessions": " ".join(map(session_name, process.sessions)) or "none",
        "models": " ".join(map(str, process.models)) or "none",
        **pod.fields(),
    }


def command_of(pid: int) -> str:
    """Return the command of a process, as the kernel shortens it; "" if it has ended or cannot be read."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return comm.read().strip()
    except OSError:
        return ""
