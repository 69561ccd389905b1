"""What is measured: seven scenes, each with a daemon of its own, and in each the bare work beside the broker's.

Owns the story of a run and the names of its rows. A scene measures in the same minute what it compares.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

from membroker.vmm.sizes import MIB

from ..harness.crew import Crew, MakeJob, working
from ..harness.daemon import TENANT, Daemon, configuration, running
from ..harness.jobs import repeated
from ..harness.machine import CpuMeter
from ..harness.samples import WHOLE, Samples, joined
from ..harness.stage import ROUNDS, Stage, Turn
from .bare import EXTENT, cores, grpc_server, packet_server
from .figures import LoadSection, Timing, compared, timing
from .jobs import MODEL, Filler, Flooder, Idle, LibraryWorker, Neighbour, RawWorker, RefusedWorker
from .wire import allocate_frame

TENANTS = (TENANT, "bench-2", "bench-3", "bench-4")
FRAME_BYTES = allocate_frame(f"tenants/{TENANT}/models/{MODEL}").ByteSize()
"""The size of an Allocate, which the bare packets have too."""
SECONDS, BUSY_SECONDS = (4.0, 0.1), (10.0, 0.2)
"""For one row, and where many work at once: in full, and quick. So are these."""
OPEN_SESSIONS, EXTENTS, WORKERS, MODELS, SCRAPES = (500, 20), (100_000, 2_000), (64, 4), (1_000, 40), (50, 5)
SESSIONS_PER_PROCESS = 16
"""The most that the broker lets one process have."""
FILLERS = 8
NEIGHBOURS = 16
FLOODING = tuple(f"flood-{number}" for number in range(5))
FLOODING_PROCESSES = 10, 1
"""Of each tenant: 160 connections, if the daemon may have as many descriptors."""


def daemon_on_host(tenants: Sequence[str] = (TENANT,)) -> AbstractContextManager[Daemon]:
    """Run a daemon on the host driver."""
    return running(configuration("host", {f"tenants.{name}": {} for name in tenants}))


def honest_worker(daemon: Daemon) -> AbstractContextManager[Crew]:
    """Run a worker of the library that borrows and releases one extent all the time."""
    return working([partial(LibraryWorker, daemon.endpoint())])


def metered(meter: CpuMeter, turn: Turn) -> Turn:
    """Return the turn, measured by the meter too."""

    def measured(seconds: float) -> Samples:
        with meter:
            return turn(seconds)

    return measured


# --- 1: one caller ---


def one_caller(stage: Stage) -> Iterator[LoadSection]:
    """Measure each kind of call by one process alone, in turns, the bare ones beside the broker's."""
    section = LoadSection(
        "One caller",
        "2 MiB an extent. The bare packet and message have the size of an Allocate. Two bare processes on one core "
        "take turns; on two, each wakes the other's core, as a worker and a daemon do. All else runs where the kernel "
        "puts it. The library's 'allocate' imports and maps, its 'close' unmaps, and waits for an answer only by gRPC.",
    )
    yield section
    first, last = cores()[0], cores()[-1]
    with (
        packet_server(FRAME_BYTES, lends=False, core=first) as echo,
        packet_server(FRAME_BYTES, lends=True, core=first) as lend,
        grpc_server(FRAME_BYTES) as grpc,
        daemon_on_host() as daemon,
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
        stage.tell("one caller: starting the processes")
        turns = {name: stack.enter_context(working([job])).run for name, job in jobs.items()}
        taken = stage.in_turns("one caller: bare, raw and the library", turns, stage.size(*SECONDS))
    section.timings += _one_caller_rows(taken)


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


def idle_sessions(stage: Stage) -> Iterator[LoadSection]:
    """Measure a worker of a daemon with many sessions that do nothing, in turns with one of a daemon without them."""
    wanted = stage.size(*OPEN_SESSIONS)
    section = LoadSection("Idle sessions", "")
    yield section
    with (
        daemon_on_host() as lone,
        daemon_on_host() as daemon,
        honest_worker(lone) as alone,
        honest_worker(daemon) as among,
    ):
        section.note_memory("idle.before", daemon, "daemon, without them")
        stage.tell(f"idle sessions: opening {wanted}")
        with working(_idle_jobs(daemon.endpoint(), wanted)):
            # The daemon counts them, since it may have had room for fewer; the worker's own is one more.
            reached = daemon.device().sessions - 1
            section.note = _reached(reached, wanted)
            section.figure("idle.sessions", "sessions open and idle", reached, "")
            section.note_memory("idle.with", daemon, "daemon, with them")
            stage.tell(f"idle sessions: {reached} are open, and nobody works")
            idle, busy = CpuMeter([daemon.process.pid]), CpuMeter([daemon.process.pid])
            with idle:
                time.sleep(stage.size(*SECONDS))
            turns = {"alone": alone.run, "among": metered(busy, among.run)}
            taken = stage.in_turns("idle sessions: the worker alone and among them", turns, stage.size(*SECONDS))
        section.figure("idle.cpu", "daemon CPU, nobody works", idle.percent, "%")
        section.figure("idle.busy_cpu", "daemon CPU, the worker works", busy.percent, "%")
    section.timings += compared("idle", taken, "worker alone", "worker among idle sessions")


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


def full_books(stage: Stage) -> Iterator[LoadSection]:
    """Fill the books, look at what full ones cost everybody, and empty them."""
    section = LoadSection(
        "Extents in the books",
        f"{FILLERS} sessions borrow them at once, close the descriptors unused, and give all back at once. No memory "
        "stands behind them: this is the cost of the books, and of making and passing descriptors. The worker with "
        "empty books is another daemon's, in turns.",
    )
    yield section
    share, scrapes = stage.size(*EXTENTS) // FILLERS, stage.size(*SCRAPES)
    with (
        daemon_on_host() as lone,
        daemon_on_host() as daemon,
        honest_worker(lone) as alone,
        honest_worker(daemon) as among,
    ):
        empty, _ = daemon.memory()
        with working([partial(Filler, daemon.endpoint(), share)] * FILLERS) as fillers:
            stage.tell(f"extents: borrowing {share * FILLERS}")
            filled = _seconds(fillers.once)
            lent = daemon.device().locations[0].lent_bytes // EXTENT
            full, _ = daemon.memory()
            turns = {"alone": alone.run, "among": among.run}
            taken = stage.in_turns("extents: the worker with empty and with full books", turns, stage.size(*SECONDS))
            stage.tell("extents: scrapes and GetDevice with full books")
            asked = [
                timing("extents.scrape", "/metrics, one scrape", repeated(daemon.scrape, scrapes)),
                timing("extents.get_device", "GetDevice", repeated(daemon.device, scrapes)),
            ]
            stage.tell(f"extents: giving {lent} back")
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


def _seconds(work: Callable[[], object]) -> float:
    begun = time.monotonic_ns()
    work()
    return (time.monotonic_ns() - begun) / 1e9


# --- 4: many workers ---


def many_workers(stage: Stage) -> Iterator[LoadSection]:
    """Let many processes borrow and release at once, in turns with as many that do the bare work."""
    count = stage.size(*WORKERS)
    section = LoadSection(
        f"{count} workers at once",
        f"{count} processes on this machine's processors, each borrowing and releasing one extent all the "
        "time; in turns with as many that do the bare packet echo + memfd against one server.",
    )
    yield section
    stage.tell(f"many workers: starting {count}, and as many bare ones")
    with (
        packet_server(FRAME_BYTES, lends=True) as client,
        working([client(None)] * count) as bare,
        daemon_on_host() as daemon,
    ):
        job = partial(LibraryWorker, daemon.endpoint(), "handoff")
        with working([job] * count) as workers:
            its_cpu, their_cpu = CpuMeter([daemon.process.pid]), CpuMeter(workers.pids)
            turns = {"bare": bare.run, "broker": metered(its_cpu, metered(their_cpu, workers.run))}
            what = f"many workers: {count} bare ones, and {count} of the broker"
            taken = stage.in_turns(what, turns, stage.size(*BUSY_SECONDS))
            section.figure("many.cpu", "daemon CPU", its_cpu.percent, "%")
            section.figure("many.workers_cpu", "the workers' CPU, all together", their_cpu.percent, "%")
            section.note_memory("many", daemon, "daemon")
    lend = timing("many.bare", "bare packet echo + memfd", taken["bare"])
    section.timings += [
        lend,
        timing("many.allocate", "library, handoff: allocate", taken["broker"], "allocate", lend),
        timing("many.close", "library, handoff: close", taken["broker"], "close"),
        timing("many.both", "library, handoff: both", taken["broker"], WHOLE, lend),
    ]
    section.figure(
        "many.rate", "bare calls/s over the broker's", taken["bare"].per_second / taken["broker"].per_second, "x"
    )


# --- 5: many models ---


def many_models(stage: Stage) -> Iterator[LoadSection]:
    """Scrape a daemon with many models again and again, while one worker works."""
    share, scrapes = stage.size(*MODELS) // len(TENANTS), stage.size(*SCRAPES)
    section = LoadSection(
        f"{share * len(TENANTS)} models, scraped",
        f"{len(TENANTS)} tenants with {share} models each, and the worker's own. A scrape is a connection, the request "
        "and the whole body; one follows the other without a pause, where Prometheus asks every 15 s or so.",
    )
    yield section
    with daemon_on_host(TENANTS) as daemon, honest_worker(daemon) as worker:
        stage.tell(f"models: {scrapes} scrapes with the worker's model alone")
        one = timing("models.scrape_one", "/metrics with 1 model", repeated(daemon.scrape, scrapes))
        stage.tell(f"models: registering {share * len(TENANTS)}")
        with working([partial(Idle, daemon.endpoint(tenant), 1, share) for tenant in TENANTS]):
            stage.tell(f"models: {scrapes} scrapes, and nobody works")
            quiet = repeated(daemon.scrape, scrapes)
            scraped: list[Samples] = []
            turns = {"alone": worker.run, "among": lambda _: _scraped(daemon, worker, scrapes, scraped)}
            taken = stage.in_turns("models: the worker alone and while scraped", turns, stage.size(*SECONDS))
            body = daemon.fresh_scrape()
            section.note_memory("models", daemon, "daemon")
    section.timings += [
        one,
        timing("models.scrape_quiet", "/metrics, nobody works", quiet, WHOLE, one),
        timing("models.scrape", "/metrics, a worker works", joined(scraped), WHOLE, one),
        *compared("models", taken, "worker, nobody scrapes", "worker, while scraped"),
    ]
    section.figure("models.count", "models in /metrics", body.count(b"\nmembroker_model_sessions{"), "")
    section.figure("models.body", "body of /metrics", len(body) / 1024, "KiB")


def _scraped(daemon: Daemon, worker: Crew, scrapes: int, taken: list[Samples]) -> Samples:
    """Let the worker work while one turn's part of the scrapes is made; these are added to `taken`."""
    worker.begin()
    taken.append(repeated(daemon.scrape, math.ceil(scrapes / ROUNDS)))
    return worker.end()


# --- 6: refusals ---


def refusals(stage: Stage) -> Iterator[LoadSection]:
    """Refuse one worker again and again, alone and beside neighbours that borrow and release."""
    section = LoadSection(
        f"A refusal beside {NEIGHBOURS} neighbours",
        "A worker asks for more than there is, without a wait. It is refused once all has been read that the others "
        f"had sent before. Each of the {NEIGHBOURS} neighbours borrows and releases a hundred times a second.",
    )
    yield section
    with daemon_on_host(TENANTS[:2]) as daemon:
        mine, theirs = (daemon.endpoint(tenant) for tenant in TENANTS[:2])
        asker, granted = partial(RefusedWorker, mine), partial(LibraryWorker, mine)
        neighbour = partial(Neighbour, theirs)
        with working([asker]) as refused, working([granted]) as worker, working([neighbour] * NEIGHBOURS) as neighbours:
            turns = {
                "alone": refused.run,
                "beside": partial(_beside, neighbours, refused),
                "granted": partial(_beside, neighbours, worker),
            }
            taken = stage.in_turns("refusals: alone and beside neighbours", turns, stage.size(*SECONDS))
    names = "a refusal, nobody else works", "a refusal beside neighbours"
    section.timings += compared("refused", {"alone": taken["alone"], "among": taken["beside"]}, *names)
    section.timings.append(timing("refused.granted", "a grant beside neighbours", taken["granted"], "allocate"))


def _beside(neighbours: Crew, worker: Crew, seconds: float, count: int | None = None) -> Samples:
    """Let a worker work while the first `count` of its neighbours do, or all."""
    neighbours.begin(count=count)
    samples = worker.run(seconds)
    neighbours.end(count)
    return samples


# --- 7: floods ---


def floods(stage: Stage) -> Iterator[LoadSection]:
    """Let one worker work beside five tenants that flood, with one connection each, with sixteen, and with many."""
    processes = stage.size(*FLOODING_PROCESSES)
    section = LoadSection(f"A worker beside {len(FLOODING)} tenants that flood", "")
    yield section
    with daemon_on_host((TENANT, *FLOODING)) as daemon:
        endpoints = [daemon.endpoint(tenant) for tenant in FLOODING]
        few = [partial(Flooder, endpoint, 1) for endpoint in endpoints]
        many = [partial(Flooder, endpoint, SESSIONS_PER_PROCESS) for _ in range(processes) for endpoint in endpoints]
        with honest_worker(daemon) as worker, working(few) as lone, working(many) as crowd:
            most = (daemon.device().sessions - 1) // len(FLOODING) - 1
            section.note = (
                "A worker (library, handoff) borrows and releases, beside tenants whose connections send releases of "
                f"4,096 unknown ids without a pause. Each had {most} connections at most, by the limit of descriptors."
            )
            turns = {
                "alone": worker.run,
                "one": partial(_beside, lone, worker),
                "sixteen": partial(_beside, crowd, worker, count=len(FLOODING)),
                "most": partial(_beside, crowd, worker),
            }
            taken = stage.in_turns("floods: a worker alone and beside them", turns, stage.size(*BUSY_SECONDS))
    alone = timing("floods.alone", "worker without floods", taken["alone"])
    section.timings.append(alone)
    for key, connections in {"one": 1, "sixteen": SESSIONS_PER_PROCESS, "most": most}.items():
        name = f"worker beside them, {key}: {connections} connections each"
        section.timings.append(timing(f"floods.{key}", name, taken[key], WHOLE, alone))


SCENES = (one_caller, idle_sessions, full_books, many_workers, many_models, refusals, floods)
