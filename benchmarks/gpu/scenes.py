"""What is measured: six scenes, each with daemons of its own, and in each the driver in process beside the broker.

Owns the story of a run and the names of its rows. `stage` measures them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

from membroker.vmm.sizes import GIB, MIB, format_size
from membroker.wire.descriptors import close_all

from ..harness.crew import working
from ..harness.daemon import connect
from ..harness.jobs import Held, Job
from ..harness.stage import Stage
from .bare import open_bare
from .figures import ATTACH, EXTENTS, IN_PROCESS, OFFLOAD, PAGES, POOL, WORKERS, GpuSection, brokered, row
from .ways import TRANSPORTS, Way, broker, measure, routes
from .works import (
    BareCopy,
    CrowdWorker,
    Pair,
    PoolGrowth,
    bare_extent,
    bare_import,
    bare_pages,
    lender,
    pool_offload,
    pool_pages,
    segment_descriptors,
)

MODEL = "bench"
SIZES = (2 * MIB, 64 * MIB, GIB)
GROWN = GIB
PAGE_SIZES = (2 * MIB, 64 * MIB)
SEGMENTS = (GIB, 16 * GIB, 64 * GIB)
BEGIN_SECONDS = 0.05
"""From the word to all processes until the moment that they begin: all have heard it by then."""
KEPT_FREE = 2 * GIB
"""What a segment must leave of the GPU, for contexts and the broker's gate."""

IMPORT = "import and map alone"
PAIR = "two processes, no broker"
PAIR_AHEAD = "two processes, made ahead"
PAGE_BY_PAGE = "driver in process, access page by page"


def one_extent(stage: Stage) -> Iterator[GpuSection]:
    """Take and release one extent."""
    section = GpuSection(
        "One extent: allocate and map, free",
        "In process: reserve, create, map, set access; then synchronize, unmap, release, and free the addresses. By "
        "the broker: Model.allocate, and Buffer.close. 'import and map alone' is what a borrower's own driver does; "
        "its free frees no memory. 'two processes, no broker': another process creates each extent and passes it on in "
        "one packet, without books, frames or protection; 'made ahead': it has one ready, and makes the next when that "
        "is sent. What borrowing takes beyond that is the broker and the library. Each size has daemons of its own, so "
        "that the stock is of that size.",
        key=EXTENTS,
        calls=("allocate", "free"),
    )
    yield section
    with closing(open_bare(stage.driver)) as bare:
        for size in SIZES:
            with routes(stage.driver) as sessions, ExitStack() as stack:
                exported = bare.driver.lend(size, 1)
                stack.callback(close_all, exported)
                imported = bare_import(bare, exported, size, read_only=False)
                ways = [Way(IN_PROCESS, bare_extent(bare, size)), Way(IMPORT, imported)]
                for by, ahead in ((PAIR, False), (PAIR_AHEAD, True)):
                    path = stack.enter_context(lender(stage.driver, ahead=ahead))
                    ways.append(Way(by, stack.enter_context(closing(Pair(bare, path, size)))))
                for route in sessions:
                    model = route.client.model(MODEL)
                    ways.append(route.way(Held(partial(model.allocate, size))))
                measure(stage, section, format_size(size), ways, extents=1)


def pages(stage: Stage) -> Iterator[GpuSection]:
    """Grow and shrink by many pages."""
    section = GpuSection(
        f"{format_size(GROWN)} by pages: grow and shrink",
        "In addresses that stay reserved. In process: create and map each page and set the access of all at the end, "
        "or of each as it comes; then synchronize, unmap all in one call, release each. By the broker: a pool's "
        "allocate and free, without spare pages. 'two processes, no broker': as for one extent, in packets of "
        "64. x is to the first. Each size has daemons of its own.",
        key=PAGES,
        calls=("grow", "shrink"),
    )
    yield section
    with closing(open_bare(stage.driver)) as bare:
        for page in PAGE_SIZES:
            with routes(stage.driver) as sessions, ExitStack() as stack:
                path = stack.enter_context(lender(stage.driver))
                jobs = {
                    IN_PROCESS: bare_pages(bare, GROWN, page, access_each=False),
                    PAGE_BY_PAGE: bare_pages(bare, GROWN, page, access_each=True),
                    PAIR: Pair(bare, path, page, GROWN // page, keeps_addresses=True),
                }
                ways = [Way(by, stack.enter_context(closing(job))) for by, job in jobs.items()]
                for route in sessions:
                    model = route.client.model(MODEL)
                    pool = stack.enter_context(model.pool(page_size=page, virtual_capacity=GROWN))
                    ways.append(route.way(pool_pages(pool, GROWN)))
                measure(stage, section, pages_of(page), ways, extents=GROWN // page)


def pages_of(page: int) -> str:
    """Return how the rows of growth by such pages are called."""
    return f"{format_size(GROWN)} by {format_size(page)}"


SPARE_PAGE = f"one page of {format_size(PAGE_SIZES[0])}"
SPARE_GROWTH = f"grow by a page of {format_size(PAGE_SIZES[0])}"
SPARE_GIB = pages_of(PAGE_SIZES[0])


def cached(stage: Stage) -> Iterator[GpuSection]:
    """Take from what a pool holds."""
    section = GpuSection(
        "From what a pool holds: nobody is asked",
        "A pool with spare pages, all of them prepared. Beside it the driver in process, which creates and maps.",
        key=POOL,
        calls=("allocate", "free"),
    )
    yield section
    page, count = PAGE_SIZES[0], GROWN // PAGE_SIZES[0]
    with closing(open_bare(stage.driver)) as bare, broker(stage.driver, stock=False) as daemon, ExitStack() as stack:
        model = stack.enter_context(connect(daemon.endpoint(), TRANSPORTS[0])).model(MODEL)
        fresh = stack.enter_context(closing(bare_pages(bare, GROWN, page, access_each=False)))
        alone = bare_extent(bare, page)
        for work, beside in ((SPARE_PAGE, alone), (SPARE_GROWTH, alone), (SPARE_GIB, fresh)):
            with model.pool(page_size=page, virtual_capacity=GROWN, spare_pages=count) as pool:
                pool.prepare(GROWN)
                held: Job = PoolGrowth(pool)
                if work != SPARE_GROWTH:
                    held = pool_pages(pool, page if work == SPARE_PAGE else GROWN)
                measure(stage, section, work, [Way(IN_PROCESS, beside), Way("pool", held)])


def attach(stage: Stage) -> Iterator[GpuSection]:
    """Attach segments, and leave them."""
    section = GpuSection(
        "A segment: attach and close",
        f"Sealed segments in extents of {format_size(GIB)}. In process: reserve, import and map as many descriptors, "
        "those of the same segment, set the access of all; then synchronize, unmap in one call, release, and free the "
        "addresses.",
        key=ATTACH,
        calls=("attach", "close"),
    )
    yield section
    with closing(open_bare(stage.driver)) as bare, routes(stage.driver, stocks=(False,)) as sessions:
        first = sessions[0]
        model = first.client.model(MODEL)
        for size in SEGMENTS:
            fits = min(first.client.capacities["device"], bare.free_bytes - KEPT_FREE)
            if size > fits:
                section.note += (
                    f" {format_size(size)} did not fit here: there was room for {format_size(max(0, fits))}."
                )
                continue
            name = f"{MODEL}/segment-{size // GIB}"
            stage.tell(f"attach: making a segment of {format_size(size)}")
            with model.create_segment(name.rpartition("/")[2], size) as made:
                made.seal()
                resource = made.resource_name
            descriptors = segment_descriptors(first.daemon.endpoint(), resource)
            try:
                ways = [Way(IN_PROCESS, bare_import(bare, descriptors, GIB, read_only=True))]
                ways += [route.way(Held(partial(route.client.attach, name))) for route in sessions]
                measure(stage, section, format_size(size), ways, extents=size // GIB)
            finally:
                close_all(descriptors)
                first.client.delete_segment(name)


PIN_EACH = "driver in process, pinned each time"
POOL_PINNED, POOL_PINS = "pool, kept pinned", "pool, pinned each time"


def offload(stage: Stage) -> Iterator[GpuSection]:
    """Put a pool to sleep, and wake it."""
    size = stage.size(2 * GIB, 64 * MIB)
    section = GpuSection(
        f"{format_size(size)} to the host and back: offload and restore",
        "In process: one copy to pinned memory that is there, and one back, nothing else. By the broker: "
        "VirtualMemoryPool.offload and restore, which also unmap and release every page, and borrow and map it again. "
        "To pin host memory takes far longer than to copy to it: the rows that pin each time say how long.",
        key=OFFLOAD,
        calls=("offload", "restore"),
        moved_bytes=size,
    )
    yield section
    with closing(open_bare(stage.driver)) as bare, broker(stage.driver, stock=False) as daemon, ExitStack() as stack:
        model = stack.enter_context(connect(daemon.endpoint(), TRANSPORTS[0])).model(MODEL)
        for page in PAGE_SIZES:
            with ExitStack() as held:
                ways = []
                pinning = page == PAGE_SIZES[-1]  # which takes as long with any pages
                for by, pin_each in ((IN_PROCESS, False), (PIN_EACH, True))[: 1 + pinning]:
                    ways.append(Way(by, held.enter_context(closing(BareCopy(bare, size, pin_each=pin_each)))))
                for by, keep_pinned in ((POOL_PINNED, True), (POOL_PINS, False))[: 1 + pinning]:
                    pool = held.enter_context(model.pool(page_size=page, virtual_capacity=size))
                    ways.append(Way(by, pool_offload(pool, size, keep_pinned=keep_pinned)))
                measure(stage, section, f"{format_size(size)} by {format_size(page)}", ways, warm_up=1)


def crowd(stage: Stage) -> Iterator[GpuSection]:
    """Let many processes take and release at once."""
    counts, size = stage.size((1, 2, 4, 8, 16, 32), (1, 2)), SIZES[0]
    section = GpuSection(
        f"1 to {max(counts)} processes at once",
        f"Each takes one extent of {format_size(size)} and gives it back, all the time; the same processes in turns by "
        "themselves, by a process that lends to all of them and does nothing else, and by the broker. rate is all of "
        "them together, in works of two calls a second.",
        key=WORKERS,
        calls=("allocate", "free"),
    )
    yield section
    with (
        broker(stage.driver, stock=False) as without,
        broker(stage.driver, stock=True) as stocked,
        lender(stage.driver) as path,
    ):
        ways = {
            brokered(transport, stock): (daemon.endpoint(), transport)
            for transport in TRANSPORTS
            for daemon, stock in ((without, False), (stocked, True))
        }
        stage.tell(f"workers: starting {max(counts)} processes")
        jobs = [partial(CrowdWorker, stage.driver, size, ways, {PAIR: path})] * max(counts)
        with working(jobs) as workers:
            for count in counts:
                turns = {
                    by: partial(workers.run, name=by, count=count, after=BEGIN_SECONDS)
                    for by in (IN_PROCESS, PAIR, *ways)
                }
                rounds = stage.size(2, 1)
                taken = stage.in_turns(f"workers: {count} at once", turns, stage.size(1.0, 0.1) * rounds, rounds)
                base = None
                for by, samples in taken.items():
                    section.rows.append(row(workers_of(count), 0, by, samples, base, rate=True))
                    base = base or section.rows[-1]


def workers_of(count: int) -> str:
    """Return how the rows of so many processes are called."""
    return "1 process" if count == 1 else f"{count} processes"


SCENES = {
    EXTENTS: one_extent,
    PAGES: pages,
    POOL: cached,
    ATTACH: attach,
    OFFLOAD: offload,
    WORKERS: crowd,
}
