"""The stage: how much is measured, what runs beside a scene, and the turns in which a scene compares.

It knows no scene.
"""

from __future__ import annotations

import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from membroker.vmm.sizes import MIB

from ..report import Tell
from .bare import serve_grpc, serve_packets
from .crew import Crew, MakeJob, serving, working
from .daemon import CpuMeter, Daemon
from .figures import WHOLE, Samples, Section, Timing, joined, timing
from .jobs import MODEL, GrpcEcho, LibraryWorker, PacketEcho
from .wire import allocate_frame

TENANTS = ("bench", "bench-2", "bench-3", "bench-4")
ROUNDS = 3
"""What is compared is measured in so many turns, one after the other."""

Turn = Callable[[float], Samples]
"""Works for some seconds, and returns what it took."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of it: seconds of work for one row, of a look at the machine, and what the scenes are named after."""

    seconds: float
    busy_seconds: float
    look_seconds: float
    sessions: int
    extents: int
    workers: int
    models: int
    scrapes: int


FULL = Scale(
    seconds=4,
    busy_seconds=10,
    look_seconds=2,
    sessions=500,
    extents=100_000,
    workers=64,
    models=1_000,
    scrapes=50,
)
QUICK = Scale(
    seconds=0.1,
    busy_seconds=0.2,
    look_seconds=0.1,
    sessions=20,
    extents=2_000,
    workers=4,
    models=40,
    scrapes=5,
)


def frame_bytes() -> int:
    """Return the size of an Allocate, which the bare packets have too."""
    return allocate_frame(f"tenants/{TENANTS[0]}/models/{MODEL}").ByteSize()


@contextmanager
def packet_server(*, lends: bool, core: int | None = None) -> Iterator[Callable[[int | None], MakeJob]]:
    """Run a bare server of packets, on a core; yields what makes the job of a client, on the core that it is told."""
    with tempfile.TemporaryDirectory(prefix="membroker-bench-") as directory:
        path = Path(directory, "bare.sock")
        with serving(serve_packets, path, lends, core):
            yield lambda on: partial(PacketEcho, path, frame_bytes(), lends, on)


@contextmanager
def grpc_server() -> Iterator[MakeJob]:
    """Run a bare gRPC server; yields the job of its client."""
    with tempfile.TemporaryDirectory(prefix="membroker-bench-") as directory:
        path = Path(directory, "bare.sock")
        with serving(serve_grpc, path):
            yield partial(GrpcEcho, path, frame_bytes())


@contextmanager
def honest_worker(daemon: Daemon) -> Iterator[Crew]:
    """Run a worker of the library that borrows and releases one extent all the time."""
    with working([partial(LibraryWorker, daemon.endpoint(), "handoff")]) as workers:
        yield workers


def in_turns(what: str, turns: Mapping[str, Turn], seconds: float, tell: Tell) -> dict[str, Samples]:
    """Measure each for some seconds in all, in several turns, so that a slow moment of the machine falls on all."""
    taken: dict[str, list[Samples]] = {name: [] for name in turns}
    for number in range(ROUNDS):
        tell(f"{what}, turn {number + 1} of {ROUNDS}")
        for name, turn in turns.items():
            taken[name].append(turn(seconds / ROUNDS))
    return {name: joined(rounds) for name, rounds in taken.items()}


def metered(meter: CpuMeter, turn: Turn) -> Turn:
    """Return the turn, measured by the meter too."""

    def measured(seconds: float) -> Samples:
        with meter:
            return turn(seconds)

    return measured


def compared(key: str, taken: Mapping[str, Samples], alone_name: str, among_name: str) -> list[Timing]:
    """Return the rows of a worker that has the daemon to itself, and of one that has not, beside it."""
    alone = timing(f"{key}.alone", alone_name, taken["alone"])
    return [alone, timing(f"{key}.among", among_name, taken["among"], WHOLE, alone)]


def repeated(work: Callable[[], object], count: int) -> Samples:
    """Measure what this process asks of the daemon itself; the first time is the warm-up."""
    work()
    times = array("Q")
    begun = time.monotonic_ns()
    for _ in range(count):
        start = time.monotonic_ns()
        work()
        times.append(time.monotonic_ns() - start)
    return Samples({WHOLE: times}, time.monotonic_ns() - begun)


def note_memory(section: Section, key: str, daemon: Daemon, name: str) -> None:
    """Add what a daemon occupies to the figures of a section."""
    rss, pss = daemon.memory()
    section.figure(f"{key}.rss", f"{name}: RSS", rss / MIB, "MiB")
    section.figure(f"{key}.pss", f"{name}: PSS", pss / MIB, "MiB")
