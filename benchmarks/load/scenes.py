"""What is measured: six scenes, each with a daemon of its own, and in each the bare work beside the broker's.

Owns the story of a run and the names of its rows. A scene measures in the same minute what it compares.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from membroker.vmm.sizes import MIB

from ..report import Tell
from .bare import EXTENT, cores
from .crew import Crew, MakeJob, working
from .daemon import CpuMeter, Daemon, running
from .figures import WHOLE, Samples, Section, Timing, joined, timing
from .jobs import Filler, Idle, LibraryWorker, Neighbour, RawWorker, RefusedWorker, Registrar
from .stage import (
    ROUNDS,
    TENANTS,
    Scale,
    compared,
    grpc_server,
    honest_worker,
    in_turns,
    metered,
    note_memory,
    packet_server,
    repeated,
)

SESSIONS_PER_PROCESS = 16
"""The most that the broker lets one process have."""
FILLERS = 8
NEIGHBOURS = 16

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
        packet_server(lends=False, core=first) as echo,
        packet_server(lends=True, core=first) as lend,
        grpc_server() as grpc,
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
        taken = in_turns("one caller: bare, raw and the library", turns, scale.seconds, tell)
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
    with running() as lone, running() as daemon, honest_worker(lone) as alone, honest_worker(daemon) as among:
        note_memory(section, "idle.before", daemon, "daemon, without them")
        tell(f"idle sessions: opening {scale.sessions}")
        with working(_idle_jobs(daemon.endpoint(), scale.sessions)):
            # The daemon counts them, since it may have had room for fewer; the worker's own is one more.
            reached = daemon.device().sessions - 1
            section.note = _reached(reached, scale.sessions)
            section.figure("idle.sessions", "sessions open and idle", reached, "")
            note_memory(section, "idle.with", daemon, "daemon, with them")
            tell(f"idle sessions: {reached} are open, and nobody works")
            idle, busy = CpuMeter([daemon.process.pid]), CpuMeter([daemon.process.pid])
            with idle:
                time.sleep(scale.seconds)
            turns = {"alone": alone.run, "among": metered(busy, among.run)}
            taken = in_turns("idle sessions: the worker alone and among them", turns, scale.seconds, tell)
        section.figure("idle.cpu", "daemon CPU, nobody works", idle.percent, "%")
        section.figure("idle.busy_cpu", "daemon CPU, the worker works", busy.percent, "%")
    section.timings += compared("idle", taken, "worker alone", "worker among idle sessions")
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
    with running() as lone, running() as daemon, honest_worker(lone) as alone, honest_worker(daemon) as among:
        empty, _ = daemon.memory()
        with working([partial(Filler, daemon.endpoint(), share)] * FILLERS) as fillers:
            tell(f"extents: borrowing {share * FILLERS}")
            filled = _seconds(fillers.once)
            lent = daemon.device().locations[0].lent_bytes // EXTENT
            full, _ = daemon.memory()
            turns = {"alone": alone.run, "among": among.run}
            taken = in_turns("extents: the worker with empty and with full books", turns, scale.seconds, tell)
            tell("extents: scrapes and GetDevice with full books")
            asked = [
                timing("extents.scrape", "/metrics, one scrape", repeated(daemon.scrape, scale.scrapes)),
                timing("extents.get_device", "GetDevice", repeated(daemon.device, scale.scrapes)),
            ]
            tell(f"extents: giving {lent} back")
            emptied = _seconds(fillers.once)
        section.timings += [*compared("extents", taken, "worker, the books empty", "worker, the books full"), *asked]
        section.figure("extents.count", "extents lent", lent, "")
        section.figure("extents.fill", "time to borrow all", filled, "s")
        section.figure("extents.fill_each", "borrowing, an extent", filled / lent * 1e6, "us")
        section.figure("extents.rss", "daemon, the books full: RSS", full / MIB, "MiB")
        section.figure("extents.rss_each", "daemon RSS, an extent", (full - empty) / lent, "bytes")
        section.figure("extents.release", "time to give all back", emptied, "s")
        section.figure("extents.release_each", "release, an extent", emptied / lent * 1e6, "us")
        section.figure("extents.left", "extents lent afterwards", daemon.device().locations[0].lent_bytes / EXTENT, "")
    return section


def _seconds(work: Callable[[], object]) -> float:
    begun = time.monotonic_ns()
    work()
    return (time.monotonic_ns() - begun) / 1e9


# --- 4: many workers ---


def many_workers(scale: Scale, tell: Tell) -> Section:
    """Let many processes borrow and release at once, in turns with as many that do the bare work."""
    section = Section(
        f"{scale.workers} workers at once",
        f"{scale.workers} processes on this machine's processors, each borrowing and releasing one extent all the "
        "time; in turns with as many that do the bare packet echo + memfd against one server.",
    )
    tell(f"many workers: starting {scale.workers}, and as many bare ones")
    with packet_server(lends=True) as client, working([client(None)] * scale.workers) as bare, running() as daemon:
        job = partial(LibraryWorker, daemon.endpoint(), "handoff")
        with working([job] * scale.workers) as workers:
            its_cpu, their_cpu = CpuMeter([daemon.process.pid]), CpuMeter(workers.pids)
            turns = {"bare": bare.run, "broker": metered(its_cpu, metered(their_cpu, workers.run))}
            what = f"many workers: {scale.workers} bare ones, and {scale.workers} of the broker"
            taken = in_turns(what, turns, scale.busy_seconds, tell)
            section.figure("many.cpu", "daemon CPU", its_cpu.percent, "%")
            section.figure("many.workers_cpu", "the workers' CPU, all together", their_cpu.percent, "%")
            note_memory(section, "many", daemon, "daemon")
    lend = timing("many.bare", "bare packet echo + memfd", taken["bare"])
    section.timings += [
        lend,
        timing("many.allocate", "library, handoff: allocate", taken["broker"], "allocate", lend),
        timing("many.close", "library, handoff: close", taken["broker"], "close"),
        timing("many.both", "library, handoff: both", taken["broker"], WHOLE, lend),
    ]
    section.figure("many.rate", "bare calls/s over the broker's", _rate(taken["bare"]) / _rate(taken["broker"]), "x")
    return section


def _rate(samples: Samples) -> float:
    return samples.count / samples.elapsed


# --- 5: many models ---


def many_models(scale: Scale, tell: Tell) -> Section:
    """Scrape a daemon with many models again and again, while one worker works."""
    share = scale.models // len(TENANTS)
    section = Section(
        f"{share * len(TENANTS)} models, scraped",
        f"{len(TENANTS)} tenants with {share} models each, and the worker's own. A scrape is a connection, the request "
        "and the whole body; one follows the other without a pause, where Prometheus asks every 15 s or so.",
    )
    with running(TENANTS) as daemon, honest_worker(daemon) as worker:
        tell(f"models: {scale.scrapes} scrapes with the worker's model alone")
        one = timing("models.scrape_one", "/metrics with 1 model", repeated(daemon.scrape, scale.scrapes))
        tell(f"models: registering {scale.models}")
        with working([partial(Registrar, daemon.endpoint(tenant), share) for tenant in TENANTS]):
            tell(f"models: {scale.scrapes} scrapes, and nobody works")
            quiet = repeated(daemon.scrape, scale.scrapes)
            scrapes: list[Samples] = []
            turns = {"alone": worker.run, "among": lambda _: _scraped(daemon, worker, scale.scrapes, scrapes)}
            taken = in_turns("models: the worker alone and while scraped", turns, scale.seconds, tell)
            body = daemon.fresh_scrape()
            note_memory(section, "models", daemon, "daemon")
    section.timings += [
        one,
        timing("models.scrape_quiet", "/metrics, nobody works", quiet, WHOLE, one),
        timing("models.scrape", "/metrics, a worker works", joined(scrapes), WHOLE, one),
        *compared("models", taken, "worker, nobody scrapes", "worker, while scraped"),
    ]
    section.figure("models.count", "models in /metrics", body.count(b"\nmembroker_model_sessions{"), "")
    section.figure("models.body", "body of /metrics", len(body) / 1024, "KiB")
    return section


def _scraped(daemon: Daemon, worker: Crew, scrapes: int, taken: list[Samples]) -> Samples:
    """Let the worker work while one turn's part of the scrapes is made; these are added to `taken`."""
    worker.begin()
    taken.append(repeated(daemon.scrape, math.ceil(scrapes / ROUNDS)))
    return worker.end()


# --- 6: refusals ---


def refusals(scale: Scale, tell: Tell) -> Section:
    """Refuse one worker again and again, alone and beside neighbours that borrow and release."""
    section = Section(
        f"A refusal beside {NEIGHBOURS} neighbours",
        "A worker asks for more than there is, without a wait. It is refused once all has been read that the others "
        f"had sent before. Each of the {NEIGHBOURS} neighbours borrows and releases a hundred times a second.",
    )
    with running(TENANTS[:2]) as daemon:
        mine, theirs = (daemon.endpoint(tenant) for tenant in TENANTS[:2])
        asker, granted = partial(RefusedWorker, mine, "handoff"), partial(LibraryWorker, mine, "handoff")
        neighbour = partial(Neighbour, theirs, "handoff")
        with working([asker]) as refused, working([granted]) as worker, working([neighbour] * NEIGHBOURS) as neighbours:
            turns = {
                "alone": refused.run,
                "beside": partial(_beside, neighbours, refused),
                "granted": partial(_beside, neighbours, worker),
            }
            taken = in_turns("refusals: alone and beside neighbours", turns, scale.seconds, tell)
    names = "a refusal, nobody else works", "a refusal beside neighbours"
    section.timings += compared("refused", {"alone": taken["alone"], "among": taken["beside"]}, *names)
    section.timings.append(timing("refused.granted", "a grant beside neighbours", taken["granted"], "allocate"))
    return section


def _beside(neighbours: Crew, worker: Crew, seconds: float) -> Samples:
    """Let a worker work while its neighbours do."""
    neighbours.begin()
    samples = worker.run(seconds)
    neighbours.end()
    return samples


SCENES: Sequence[Callable[[Scale, Tell], Section]] = (
    *(one_caller, idle_sessions, full_books, many_workers, many_models, refusals),
)
