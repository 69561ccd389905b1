"""What is measured: six scenes, each with daemons of its own, and in each the driver in process beside the broker.

Owns the story of a run and the names of its rows. `stage` measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

from membroker.session.session import Session
from membroker.v1 import broker_pb2
from membroker.v1.handoff_pb2 import Frame
from membroker.vmm.sizes import GIB, MIB, format_size

from .bare import close_all, free_bytes
from .crew import working
from .daemon import Daemon, running
from .figures import (
    ATTACH,
    EXTENTS,
    IN_PROCESS,
    OFFLOAD,
    PAGES,
    POOL,
    WORKERS,
    Row,
    Section,
    Times,
    brokered,
    crowd_row,
)
from .pair import PairExtent, PairPages
from .stage import TRANSPORTS, Stage, Way, bare_driver, lender, routes
from .works import (
    AttachedSegment,
    BareCopy,
    BareExtent,
    BareImport,
    BarePages,
    BorrowedExtent,
    Keeper,
    PoolGrowth,
    PoolOffload,
    PoolPages,
    Work,
    connect,
)

MODEL = "bench"
SIZES = (2 * MIB, 64 * MIB, GIB)
GROWN = GIB
PAGE_SIZES = (2 * MIB, 64 * MIB)
SEGMENTS = (GIB, 16 * GIB, 64 * GIB)
KEPT_FREE = 2 * GIB
"""What a segment must leave of the GPU, for contexts and the broker's gate."""

IMPORT = "import and map alone"
PAIR = "two processes, no broker"
PAIR_AHEAD = "two processes, made ahead"
PAGE_BY_PAGE = "driver in process, access page by page"


def one_extent(stage: Stage) -> Iterator[Section]:
    """Take and release one extent."""
    section = Section(
        EXTENTS,
        "One extent: allocate and map, free",
        "In process: reserve, create, map, set access; then synchronize, unmap, release, and free the addresses. By "
        "the broker: Model.allocate, and Buffer.close. 'import and map alone' is what a borrower's own driver does; "
        "its free frees no memory. 'two processes, no broker': another process creates each extent and passes it on in "
        "one packet, without books, frames or protection; 'made ahead': it has one ready, and makes the next when that "
        "is sent. What borrowing takes beyond that is the broker and the library. Each size has daemons of its own, so "
        "that the stock is of that size.",
        ("allocate", "free"),
    )
    yield section
    with bare_driver(stage.driver) as bare:
        for size in SIZES:
            with routes(stage) as sessions, ExitStack() as stack:
                imported = BareImport(bare, [(bare.export(size), size)], read_only=False)
                stack.callback(imported.close)
                ways = [Way(IN_PROCESS, BareExtent(bare, size)), Way(IMPORT, imported)]
                for by, ahead in ((PAIR, False), (PAIR_AHEAD, True)):
                    pair = PairExtent(bare, stack.enter_context(lender(stage.driver, ahead=ahead)).path, size)
                    stack.callback(pair.close)
                    ways.append(Way(by, pair))
                for route in sessions:
                    ways.append(route.way(BorrowedExtent(route.client.register_model(MODEL), size)))
                stage.measure(section, format_size(size), ways, extents=1)


def pages(stage: Stage) -> Iterator[Section]:
    """Grow and shrink by many pages."""
    section = Section(
        PAGES,
        f"{format_size(GROWN)} by pages: grow and shrink",
        "In addresses that stay reserved. In process: create and map each page and set the access of all at the end, "
        "or of each as it comes; then synchronize, unmap all in one call, release each. By the broker: a pool's "
        "allocate and deallocate, without spare pages. 'two processes, no broker': as for one extent, in packets of "
        "64. x is to the first. Each size has daemons of its own.",
        ("grow", "shrink"),
    )
    yield section
    with bare_driver(stage.driver) as bare:
        for page in PAGE_SIZES:
            with routes(stage) as sessions, ExitStack() as stack:
                at_once = BarePages(bare, GROWN, page, access_each=False)
                stack.callback(at_once.close)
                each = BarePages(bare, GROWN, page, access_each=True)
                stack.callback(each.close)
                pair = PairPages(bare, stack.enter_context(lender(stage.driver)).path, GROWN, page)
                stack.callback(pair.close)
                ways = [Way(IN_PROCESS, at_once), Way(PAGE_BY_PAGE, each), Way(PAIR, pair)]
                for route in sessions:
                    model = route.client.register_model(MODEL)
                    pool = stack.enter_context(model.pool(page_size=page, virtual_capacity=GROWN))
                    ways.append(route.way(PoolPages(pool, GROWN)))
                stage.measure(section, pages_of(page), ways, extents=GROWN // page)


def pages_of(page: int) -> str:
    """Return how the rows of growth by such pages are called."""
    return f"{format_size(GROWN)} by {format_size(page)}"


SPARE_PAGE = f"one page of {format_size(PAGE_SIZES[0])}"
SPARE_GROWTH = f"grow by a page of {format_size(PAGE_SIZES[0])}"
SPARE_GIB = pages_of(PAGE_SIZES[0])


def cached(stage: Stage) -> Iterator[Section]:
    """Take from what a pool holds."""
    section = Section(
        POOL,
        "From what a pool holds: nobody is asked",
        "A pool with spare pages, all of them prepared. Beside it the driver in process, which creates and maps.",
        ("allocate", "deallocate"),
    )
    yield section
    page, count = PAGE_SIZES[0], GROWN // PAGE_SIZES[0]
    with bare_driver(stage.driver) as bare, running(stage.driver, stock=False) as daemon, ExitStack() as stack:
        model = stack.enter_context(connect(daemon.endpoint(), TRANSPORTS[0])).register_model(MODEL)
        fresh = BarePages(bare, GROWN, page, access_each=False)
        stack.callback(fresh.close)
        bares: Mapping[str, Work] = {
            SPARE_PAGE: BareExtent(bare, page),
            SPARE_GROWTH: BareExtent(bare, page),
            SPARE_GIB: fresh,
        }
        for work, beside in bares.items():
            with model.pool(page_size=page, virtual_capacity=GROWN, spare_pages=count) as pool:
                pool.prepare(GROWN)
                held: Work = PoolGrowth(pool) if work == SPARE_GROWTH else PoolPages(pool, GROWN)
                if work == SPARE_PAGE:
                    held = PoolPages(pool, page)
                stage.measure(section, work, [Way(IN_PROCESS, beside), Way("pool", held)])


def attach(stage: Stage) -> Iterator[Section]:
    """Attach segments, and leave them."""
    section = Section(
        ATTACH,
        "A segment: attach and close",
        f"Sealed segments in extents of {format_size(GIB)}. In process: reserve, import and map as many descriptors, "
        "those of the same segment, set the access of all; then synchronize, unmap in one call, release, and free the "
        "addresses.",
        ("attach", "close"),
    )
    yield section
    with bare_driver(stage.driver) as bare, routes(stage, stocks=(False,)) as sessions:
        first = sessions[0]
        model = first.client.register_model(MODEL)
        for size in SEGMENTS:
            fits = min(first.client.capacities["device"], free_bytes(bare) - KEPT_FREE)
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
            imported = BareImport(bare, _descriptors(first.daemon, resource), read_only=True)
            try:
                ways = [Way(IN_PROCESS, imported)]
                ways += [route.way(AttachedSegment(route.client, name)) for route in sessions]
                stage.measure(section, format_size(size), ways, extents=size // GIB)
            finally:
                imported.close()
                first.client.delete_segment(name)


def _descriptors(daemon: Daemon, resource: str) -> list[tuple[int, int]]:
    """Return copies of a segment's descriptors, which the broker exported, with their sizes."""
    session = Session(daemon.endpoint(), client="benchmarks", timeout=60)
    keeper = Keeper()
    try:
        session.reconnecting.call(Frame(attach_segment=broker_pb2.AttachSegmentRequest(name=resource)), keeper)
    except BaseException:
        close_all(keeper.descriptors)
        raise
    finally:
        session.close()
    return keeper.descriptors


PIN_EACH = "driver in process, pinned each time"
POOL_PINNED, POOL_PINS = "pool, kept pinned", "pool, pinned each time"


def offload(stage: Stage) -> Iterator[Section]:
    """Put a pool to sleep, and wake it."""
    size = stage.scale.offloaded
    section = Section(
        OFFLOAD,
        f"{format_size(size)} to the host and back: offload and restore",
        "In process: one copy to pinned memory that is there, and one back, nothing else. By the broker: "
        "VirtualMemoryPool.offload and restore, which also unmap and release every page, and borrow and map it again. "
        "To pin host memory takes far longer than to copy to it: the rows that pin each time say how long.",
        ("offload", "restore"),
        size,
    )
    yield section
    with bare_driver(stage.driver) as bare, running(stage.driver, stock=False) as daemon, ExitStack() as stack:
        model = stack.enter_context(connect(daemon.endpoint(), TRANSPORTS[0])).register_model(MODEL)
        for page in PAGE_SIZES:
            with ExitStack() as held:
                ways = []
                pinning = page == PAGE_SIZES[-1]  # which takes as long with any pages
                for by, pin_each in ((IN_PROCESS, False), (PIN_EACH, True))[: 1 + pinning]:
                    copy = BareCopy(bare, size, pin_each=pin_each)
                    held.callback(copy.close)
                    ways.append(Way(by, copy))
                for by, keep_pinned in ((POOL_PINNED, True), (POOL_PINS, False))[: 1 + pinning]:
                    pool = held.enter_context(model.pool(page_size=page, virtual_capacity=size))
                    ways.append(Way(by, PoolOffload(pool, size, keep_pinned=keep_pinned)))
                stage.measure(section, f"{format_size(size)} by {format_size(page)}", ways, warm_up=1)


def crowd(stage: Stage) -> Iterator[Section]:
    """Let many processes take and release at once."""
    scale, size = stage.scale, SIZES[0]
    section = Section(
        WORKERS,
        f"1 to {max(scale.workers)} processes at once",
        f"Each takes one extent of {format_size(size)} and gives it back, all the time; the same processes in turns by "
        "themselves, by a process that lends to all of them and does nothing else, and by the broker. rate is all of "
        "them together, in works of two calls a second.",
        ("allocate", "free"),
    )
    yield section
    with (
        running(stage.driver, stock=False) as without,
        running(stage.driver, stock=True) as stocked,
        lender(stage.driver) as bare_lender,
    ):
        ways = {
            brokered(transport, daemon.stock): (daemon.endpoint(), transport)
            for transport in TRANSPORTS
            for daemon in (without, stocked)
        }
        stage.tell(f"workers: starting {max(scale.workers)} processes")
        bys = (IN_PROCESS, PAIR, *ways)
        with working(max(scale.workers), stage.driver, size, ways, {PAIR: bare_lender.path}) as workers:
            for count in scale.workers:
                taken: dict[str, list[Times]] = {by: [Times() for _ in range(count)] for by in bys}
                for number in range(scale.worker_rounds):
                    stage.tell(f"workers: {count} at once, turn {number + 1} of {scale.worker_rounds}")
                    for by, all_times in taken.items():
                        for times, more in zip(all_times, workers.run(count, by, scale.worker_seconds), strict=True):
                            times.add(more)
                base: Row | None = None
                for by, all_times in taken.items():
                    section.rows.append(crowd_row(workers_of(count), by, all_times, base))
                    base = base or section.rows[-1]


def workers_of(count: int) -> str:
    """Return how the rows of so many processes are called."""
    return "1 process" if count == 1 else f"{count} processes"


SCENES: Mapping[str, Callable[[Stage], Iterator[Section]]] = {
    EXTENTS: one_extent,
    PAGES: pages,
    POOL: cached,
    ATTACH: attach,
    OFFLOAD: offload,
    WORKERS: crowd,
}
"""Each yields its section before it measures, so that what it has seen when it fails is not lost."""
