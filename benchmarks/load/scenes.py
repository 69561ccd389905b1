"""What is measured: five scenes, each with a daemon of its own, and in each the bare work beside the broker's.

Owns the story of a run and the names of its rows. A scene measures in the same minute what it compares.
"""

from __future__ import annotations

import math
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from membroker.vmm.sizes import MIB

from ..report import Tell
from .bare import EXTENT, cores, serve_grpc, serve_packets
from .crew import Crew, MakeJob, serving, working
from .daemon import CpuMeter, Daemon, running
from .figures import WHOLE, Samples, Section, Timing, joined, timing
from .jobs import MODEL, Filler, GrpcEcho, Idle, LibraryWorker, PacketEcho, RawWorker, Registrar
from .wire import allocate_frame

SESSIONS_PER_PROCESS = 16
"""The most that the broker lets one process have."""
FILLERS = 8
TENANTS = ("bench", "bench-2", "bench-3", "bench-4")
ROUNDS = 3
"""What is compared is measured in so many turns, one after the other."""

"""Told what is being done now."""

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


# --- 1: one caller ---


def one_caller(scale: Scale, tell: Tell) -> Section:
    """Measure each kind of call by one process alone, in turns, the bare ones beside the broker's."""
    section = Section(
        "One caller",
        "2 MiB an extent. The bare packet and message have the size of an Allocate. Two bare processes on one core "
        "take turns; on two, each wakes the other's core, as a worker and a daemon do. All else runs where the kernel "
        "puts it. The library's 'allocate' imports and maps, its 'close' unmaps, and waits for an answer only by gRPC.",
    )
    first, last = cores()[0], cores()[-1]
    with (
        _packet_server(lends=False, core=first) as echo,
        _packet_server(lends=True, core=first) as lend,
        _grpc_server() as grpc,
        running() as daemon,
        ExitStack() as stack,
    ):
        jobs: dict[str, MakeJob] = {
            "echo, one core": echo(first),
            "echo, two cores": echo(last),
            "lend, one core": lend(first),
            "lend, two cores": lend(last),
            "echo by grpc": grpc,
            "raw": partial(RawWorker, daemon.endpoint()),
            "handoff": partial(LibraryWorker, daemon.endpoint(), "handoff"),
            "grpc": partial(LibraryWorker, daemon.endpoint(), "grpc"),
        }
        tell("one caller: starting the processes")
        turns = {name: stack.enter_context(working([job])).run for name, job in jobs.items()}
        taken = _in_turns("one caller: bare, raw and the library", turns, scale.seconds, tell)
    section.timings += _one_caller_rows(taken)
    return section


def _one_caller_rows(taken: Mapping[str, Samples]) -> Iterator[Timing]:
    yield timing("bare.echo.one_core", "bare packet echo, one core", taken["echo, one core"])
    yield (echo := timing("bare.echo", "bare packet echo, two cores", taken["echo, two cores"]))
    yield timing("bare.lend.one_core", "bare packet echo + memfd, one core", taken["lend, one core"])
    yield (lend := timing("bare.lend", "bare packet echo + memfd, two cores", taken["lend, two cores"]))
    yield (grpc := timing("bare.grpc", "bare gRPC echo", taken["echo by grpc"]))
    raw, handoff, by_grpc = taken["raw"], taken["handoff"], taken["grpc"]
    yield timing("raw.allocate", "raw handoff: allocate", raw, "allocate", lend)
    yield timing("raw.release", "raw handoff: release", raw, "release", echo)
    yield timing("raw", "raw handoff: both", raw)
    yield timing("handoff.allocate", "library, handoff: allocate", handoff, "allocate", lend)
    yield timing("handoff.close", "library, handoff: close", handoff, "close")
    yield timing("handoff", "library, handoff: both", handoff, WHOLE, lend)
    yield timing("grpc.allocate", "library, gRPC: allocate", by_grpc, "allocate", grpc)
    yield timing("grpc.close", "library, gRPC: close", by_grpc, "close", grpc)
    yield timing("grpc", "library, gRPC: both", by_grpc)


# --- 2: many sessions ---


def idle_sessions(scale: Scale, tell: Tell) -> Section:
    """Measure a worker of a daemon with many sessions that do nothing, in turns with one of a daemon without them."""
    section = Section("Idle sessions", "")
    with running() as lone, running() as daemon, _honest_worker(lone) as alone, _honest_worker(daemon) as among:
        _memory(section, "idle.before", daemon, "daemon, without them")
        tell(f"idle sessions: opening {scale.sessions}")
        with working(_idle_jobs(daemon.endpoint(), scale.sessions)):
            # The daemon counts them, since it may have had room for fewer; the worker's own is one more.
            reached = daemon.device().sessions - 1
            section.note = _reached(reached, scale.sessions)
            section.figure("idle.sessions", "sessions open and idle", reached, "")
            _memory(section, "idle.with", daemon, "daemon, with them")
            tell(f"idle sessions: {reached} are open, and nobody works")
            idle, busy = CpuMeter([daemon.process.pid]), CpuMeter([daemon.process.pid])
            with idle:
                time.sleep(scale.seconds)
            turns = {"alone": alone.run, "among": _metered(busy, among.run)}
            taken = _in_turns("idle sessions: the worker alone and among them", turns, scale.seconds, tell)
        section.figure("idle.cpu", "daemon CPU, nobody works", idle.percent, "%")
        section.figure("idle.busy_cpu", "daemon CPU, the worker works", busy.percent, "%")
    section.timings += _compared("idle", taken, "worker alone", "worker among idle sessions")
    return section


def _idle_jobs(endpoint: Path, sessions: int) -> list[MakeJob]:
    whole, rest = divmod(sessions, SESSIONS_PER_PROCESS)
    shares = [SESSIONS_PER_PROCESS] * whole + [rest] * bool(rest)
    return [partial(Idle, endpoint, share) for share in shares]


def _reached(sessions: int, wanted: int) -> str:
    if sessions >= wanted:
        return (
            "A worker (library, handoff) borrows and releases at a daemon with sessions that do nothing, in turns "
            "with one at a daemon without them."
        )
    return (
        f"The daemon had room for {sessions} of {wanted} sessions beside the worker's: it must be able to keep 129 "
        "descriptors for each, and the hard limit of descriptors (`ulimit -Hn`) does not allow more."
    )


# --- 3: many extents ---


def full_books(scale: Scale, tell: Tell) -> Section:
    """Fill the books, look at what full ones cost everybody, and empty them."""
    section = Section(
        "Extents in the books",
        f"{FILLERS} sessions borrow them at once, close the descriptors unused, and give all back at once. No memory "
        "stands behind them: this is the cost of the books, and of making and passing descriptors. The worker with "
        "empty books is another daemon's, in turns.",
    )
    share = scale.extents // FILLERS
    with running() as lone, running() as daemon, _honest_worker(lone) as alone, _honest_worker(daemon) as among:
        empty, _ = daemon.memory()
        with working([partial(Filler, daemon.endpoint(), share)] * FILLERS) as fillers:
            tell(f"extents: borrowing {share * FILLERS}")
            filled = _seconds(fillers.once)
            lent = daemon.device().locations[0].lent_bytes // EXTENT
            full, _ = daemon.memory()
            turns = {"alone": alone.run, "among": among.run}
            taken = _in_turns("extents: the worker with empty and with full books", turns, scale.seconds, tell)
            tell("extents: scrapes and GetDevice with full books")
            asked = [
                timing("extents.scrape", "/metrics, one scrape", _repeated(daemon.scrape, scale.scrapes)),
                timing("extents.get_device", "GetDevice", _repeated(daemon.device, scale.scrapes)),
            ]
            tell(f"extents: giving {lent} back")
            emptied = _seconds(fillers.once)
        section.timings += [*_compared("extents", taken, "worker, the books empty", "worker, the books full"), *asked]
        section.figure("extents.count", "extents lent", lent, "")
        section.figure("extents.fill", "time to borrow all", filled, "s")
        section.figure("extents.fill_each", "borrowing, an extent", filled / lent * 1e6, "us")
        section.figure("extents.rss", "daemon, the books full: RSS", full / MIB, "MiB")
        section.figure("extents.rss_each", "daemon RSS, an extent", (full - empty) / lent, "bytes")
        section.figure("extents.release", "time to give all back", emptied, "s")
        section.figure("extents.release_each", "release, an extent", emptied / lent * 1e6, "us")
        section.figure("extents.left", "extents lent afterwards", daemon.device().locations[0].lent_bytes / EXTENT, "")
    return section


# --- 4: many workers ---


def many_workers(scale: Scale, tell: Tell) -> Section:
    """Let many processes borrow and release at once, in turns with as many that do the bare work."""
    section = Section(
        f"{scale.workers} workers at once",
        f"{scale.workers} processes on this machine's processors, each borrowing and releasing one extent all the "
        "time; in turns with as many that do the bare packet echo + memfd against one server.",
    )
    tell(f"many workers: starting {scale.workers}, and as many bare ones")
    with _packet_server(lends=True) as client, working([client(None)] * scale.workers) as bare, running() as daemon:
        job = partial(LibraryWorker, daemon.endpoint(), "handoff")
        with working([job] * scale.workers) as workers:
            its_cpu, their_cpu = CpuMeter([daemon.process.pid]), CpuMeter(workers.pids)
            turns = {"bare": bare.run, "broker": _metered(its_cpu, _metered(their_cpu, workers.run))}
            what = f"many workers: {scale.workers} bare ones, and {scale.workers} of the broker"
            taken = _in_turns(what, turns, scale.busy_seconds, tell)
            section.figure("many.cpu", "daemon CPU", its_cpu.percent, "%")
            section.figure("many.workers_cpu", "the workers' CPU, all together", their_cpu.percent, "%")
            _memory(section, "many", daemon, "daemon")
    lend = timing("many.bare", "bare packet echo + memfd", taken["bare"])
    section.timings += [
        lend,
        timing("many.allocate", "library, handoff: allocate", taken["broker"], "allocate", lend),
        timing("many.close", "library, handoff: close", taken["broker"], "close"),
        timing("many.both", "library, handoff: both", taken["broker"], WHOLE, lend),
    ]
    section.figure("many.rate", "bare calls/s over the broker's", _rate(taken["bare"]) / _rate(taken["broker"]), "x")
    return section


# --- 5: many models ---


def many_models(scale: Scale, tell: Tell) -> Section:
    """Scrape a daemon with many models again and again, while one worker works."""
    share = scale.models // len(TENANTS)
    section = Section(
        f"{share * len(TENANTS)} models, scraped",
        f"{len(TENANTS)} tenants with {share} models each, and the worker's own. A scrape is a connection, the request "
        "and the whole body; one follows the other without a pause, where Prometheus asks every 15 s or so.",
    )
    with running(TENANTS) as daemon, _honest_worker(daemon) as worker:
        tell(f"models: {scale.scrapes} scrapes with the worker's model alone")
        one = timing("models.scrape_one", "/metrics with 1 model", _repeated(daemon.scrape, scale.scrapes))
        tell(f"models: registering {scale.models}")
        with working([partial(Registrar, daemon.endpoint(tenant), share) for tenant in TENANTS]):
            tell(f"models: {scale.scrapes} scrapes, and nobody works")
            quiet = _repeated(daemon.scrape, scale.scrapes)
            scrapes: list[Samples] = []
            turns = {"alone": worker.run, "among": lambda _: _scraped(daemon, worker, scale.scrapes, scrapes)}
            taken = _in_turns("models: the worker alone and while scraped", turns, scale.seconds, tell)
            body = daemon.fresh_scrape()
            _memory(section, "models", daemon, "daemon")
    section.timings += [
        one,
        timing("models.scrape_quiet", "/metrics, nobody works", quiet, WHOLE, one),
        timing("models.scrape", "/metrics, a worker works", joined(scrapes), WHOLE, one),
        *_compared("models", taken, "worker, nobody scrapes", "worker, while scraped"),
    ]
    section.figure("models.count", "models in /metrics", body.count(b"\nmembroker_model_sessions{"), "")
    section.figure("models.body", "body of /metrics", len(body) / 1024, "KiB")
    return section


def _scraped(daemon: Daemon, worker: Crew, scrapes: int, taken: list[Samples]) -> Samples:
    """Let the worker work while one turn's part of the scrapes is made; these are added to `taken`."""
    worker.begin()
    taken.append(_repeated(daemon.scrape, math.ceil(scrapes / ROUNDS)))
    return worker.end()


# --- what scenes share ---

SCENES: Sequence[Callable[[Scale, Tell], Section]] = (one_caller, idle_sessions, full_books, many_workers, many_models)


@contextmanager
def _packet_server(*, lends: bool, core: int | None = None) -> Iterator[Callable[[int | None], MakeJob]]:
    """Run a bare server of packets, on a core; yields what makes the job of a client, on the core that it is told."""
    with tempfile.TemporaryDirectory(prefix="membroker-bench-") as directory:
        path = Path(directory, "bare.sock")
        with serving(serve_packets, path, lends, core):
            yield lambda on: partial(PacketEcho, path, frame_bytes(), lends, on)


@contextmanager
def _grpc_server() -> Iterator[MakeJob]:
    """Run a bare gRPC server; yields the job of its client."""
    with tempfile.TemporaryDirectory(prefix="membroker-bench-") as directory:
        path = Path(directory, "bare.sock")
        with serving(serve_grpc, path):
            yield partial(GrpcEcho, path, frame_bytes())


@contextmanager
def _honest_worker(daemon: Daemon) -> Iterator[Crew]:
    with working([partial(LibraryWorker, daemon.endpoint(), "handoff")]) as workers:
        yield workers


def _in_turns(what: str, turns: Mapping[str, Turn], seconds: float, tell: Tell) -> dict[str, Samples]:
    """Measure each for some seconds in all, in several turns, so that a slow moment of the machine falls on all."""
    taken: dict[str, list[Samples]] = {name: [] for name in turns}
    for number in range(ROUNDS):
        tell(f"{what}, turn {number + 1} of {ROUNDS}")
        for name, turn in turns.items():
            taken[name].append(turn(seconds / ROUNDS))
    return {name: joined(rounds) for name, rounds in taken.items()}


def _metered(meter: CpuMeter, turn: Turn) -> Turn:
    def measured(seconds: float) -> Samples:
        with meter:
            return turn(seconds)

    return measured


def _compared(key: str, taken: Mapping[str, Samples], alone_name: str, among_name: str) -> list[Timing]:
    """Return the rows of a worker that has the daemon to itself, and of one that has not, beside it."""
    alone = timing(f"{key}.alone", alone_name, taken["alone"])
    return [alone, timing(f"{key}.among", among_name, taken["among"], WHOLE, alone)]


def _rate(samples: Samples) -> float:
    return samples.count / samples.elapsed


def _seconds(work: Callable[[], object]) -> float:
    begun = time.monotonic_ns()
    work()
    return (time.monotonic_ns() - begun) / 1e9


def _repeated(work: Callable[[], object], count: int) -> Samples:
    """Measure what this process asks of the daemon itself; the first time is the warm-up."""
    work()
    times = array("Q")
    begun = time.monotonic_ns()
    for _ in range(count):
        start = time.monotonic_ns()
        work()
        times.append(time.monotonic_ns() - start)
    return Samples({WHOLE: times}, time.monotonic_ns() - begun)


def _memory(section: Section, key: str, daemon: Daemon, name: str) -> None:
    rss, pss = daemon.memory()
    section.figure(f"{key}.rss", f"{name}: RSS", rss / MIB, "MiB")
    section.figure(f"{key}.pss", f"{name}: PSS", pss / MIB, "MiB")
