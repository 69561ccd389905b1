"""Ctrl-C anywhere in the public calls: books and mappings agree, nothing deadlocks, and nothing is left behind.

Each call is struck at points that a seed draws: those of a client against a real daemon, and those of `membroker.vmm`
on the host driver, where what is left is what docs/vmm.md says. `MEMBROKER_SEED` repeats a run, and
`MEMBROKER_POINTS` strikes more points of each call.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.forks import in_a_child
from tests.support.garbage import collect
from tests.support.interrupts import interrupted_at, sampled
from tests.support.processes import EXTENT, open_extents
from tests.support.seeds import chosen_seed
from tests.support.sizes import PAGE

import membroker
from membroker import MembrokerError
from membroker.adapters.blocks import BlockLending
from membroker.v1 import broker_pb2, handoff_pb2, resources_pb2
from membroker.vmm import AccessFlags, AddressRange, DriverError, Location, MappedRange, PhysicalMemory
from membroker.vmm.host.driver import HostDriver

pytestmark = pytest.mark.deep

POINTS = int(os.environ.get("MEMBROKER_POINTS") or 14)
VMM_POINTS = int(os.environ.get("MEMBROKER_POINTS") or 40)
SEED = chosen_seed()

Call = Callable[[], object]


class Program:
    """A worker with a client. `kept` is what it has, and loses at the end of each run."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.client = membroker.connect(daemon.endpoint())
        self.model = self.client.model("m")
        self.local = membroker.LocalSource("host")
        self.kept: list[Any] = []
        self.turn = 0

    def keep(self, thing: Any) -> Any:
        self.kept.append(thing)
        return thing

    def pool(self, pages: int = 0, spare_pages: int = 0) -> membroker.VirtualMemoryPool:
        pool = self.keep(self.model.pool(page_size=PAGE, virtual_capacity=64 * PAGE, spare_pages=spare_pages))
        if pages:
            pool.allocate(0, pages * PAGE)
        return pool  # type: ignore[no-any-return]

    def holes(self) -> membroker.VirtualMemoryPool:
        pool = self.pool(6)
        pool.free(0, PAGE)
        pool.free(3 * PAGE, PAGE)
        return pool

    def offloaded(self) -> membroker.VirtualMemoryPool:
        pool = self.pool(3)
        pool.offload()
        return pool

    def segment(self, *, sealed: bool = False) -> membroker.Segment:
        self.turn += 1
        segment = self.keep(self.model.create_segment(f"s{self.turn}", 1))
        if sealed:
            segment.seal()
        return segment  # type: ignore[no-any-return]

    def recall(self) -> membroker.Recall:
        """Return a recall that the program has yet to answer."""
        self.turn += 1
        self.model.on_recall(lambda _: membroker.DEFERRED)
        message = handoff_pb2.Recall(
            recall_id=self.turn, model=self.model.resource_name, location=resources_pb2.LOCATION_DEVICE, bytes=PAGE
        )
        self.client._recalls.heard(message, self.client._session.connection)
        return until(lambda: self.model.pending_recall)

    def lost_all(self) -> None:
        """Forget everything, as a notebook does whose cells are run again."""
        self.model.on_recall(None)
        for thing in self.kept:
            if hasattr(thing, "close"):
                thing.close()
        self.kept.clear()
        collect()
        with self.daemon.admin_stub() as admin:
            for one in admin.ListSegments(broker_pb2.ListSegmentsRequest()).segments:
                if one.state == resources_pb2.Segment.SEALED:
                    admin.DeleteSegment(broker_pb2.DeleteSegmentRequest(name=one.name))


def within(pool: membroker.VirtualMemoryPool, call: str, *arguments: Any) -> Call:
    return lambda: getattr(pool, call)(*arguments)


def beside_spare_pages(it: Program) -> Call:
    pool = it.pool(2, spare_pages=2)
    pool.free(0, 2 * PAGE)
    return within(pool, "allocate", PAGE, 3 * PAGE)


def ranges(it: Program, *, there: bool) -> Call:
    pool = it.pool(2, spare_pages=1)
    pool.free(PAGE, PAGE)
    where = [(at * PAGE, PAGE) for at in (1, 5, 6, 20)]
    if there:
        pool.allocate_ranges(where)
    return within(pool, "free_ranges" if there else "allocate_ranges", where)


def growable(it: Program, before: int, after: int) -> Call:
    buffer = it.keep(it.model.growable_buffer(before * PAGE, 16 * PAGE, PAGE))
    return lambda: buffer.resize(after * PAGE)


def tiles(it: Program, *, there: bool) -> Call:
    table = it.keep(it.model.sparse_array((64, PAGE), "U8"))
    if there:
        table.back(1, 3)
    return lambda: (table.drop if there else table.back)(1, 3)


def without_a_broker(it: Program, *, there: bool) -> Call:
    pool = it.keep(membroker.VirtualMemoryPool(it.local, 64 * PAGE, page_size=PAGE))
    if there:
        pool.allocate(0, 3 * PAGE)
    return within(pool, "free" if there else "allocate", 0, 3 * PAGE)


def without_a_connection(it: Program, call: str, pages: int) -> Call:
    """Make a call that finds that the connection is lost."""
    pool = it.pool(pages)
    it.client._session.connection._socket.shutdown(socket.SHUT_RDWR)
    return within(pool, call, 0, 3 * PAGE)


def attach(it: Program) -> Call:
    segment = it.segment(sealed=True)
    return lambda: it.client.attach(f"m/{segment.name}")


def refused(call: Call) -> Call:
    """Wait for more than there is, as long as a few turns of the daemon take."""

    def wait() -> None:
        with suppress(membroker.OutOfMemory):
            call()

    return wait


def no_recalls(it: Program) -> Call:
    it.model.on_recall(lambda _: None)
    return lambda: it.model.on_recall(None)


def hold_up(it: Program) -> Call:
    def block() -> None:
        with it.client.defer_recalls():
            pass

    return block


def lend(it: Program) -> Call:
    lending = it.keep(BlockLending(it.model, PAGE))
    return lambda: lending.allocate(1)


CALLS: dict[str, Callable[[Program], Call]] = {
    "allocate a buffer": lambda it: lambda: it.model.allocate(PAGE),
    "close a buffer": lambda it: it.keep(it.model.allocate(PAGE)).close,  # type: ignore[no-any-return]
    "make a pool": lambda it: lambda: it.model.pool(page_size=PAGE, virtual_capacity=64 * PAGE),
    "allocate": lambda it: within(it.pool(), "allocate", 0, 3 * PAGE),
    "allocate beside spare pages": beside_spare_pages,
    "grow": lambda it: within(it.pool(1), "grow", PAGE),
    "free": lambda it: within(it.pool(3), "free", 0, 2 * PAGE),
    "free an allocation": lambda it: (lambda pool: within(pool, "free", pool.base_address))(it.pool(3)),
    "protect": lambda it: within(it.pool(3), "protect", 0, PAGE, "read"),
    "close a pool": lambda it: it.pool(3).close,
    "compact": lambda it: it.holes().compact,
    "offload": lambda it: it.pool(3).offload,
    "restore": lambda it: it.offloaded().restore,
    "allocate ranges": partial(ranges, there=False),
    "free ranges": partial(ranges, there=True),
    "make a growable buffer": lambda it: lambda: it.model.growable_buffer(PAGE, 16 * PAGE, PAGE),
    "grow a buffer": lambda it: growable(it, 1, 3),
    "shrink a buffer": lambda it: growable(it, 3, 1),
    "back tiles": partial(tiles, there=False),
    "drop tiles": partial(tiles, there=True),
    "create a segment": lambda it: it.segment,
    "seal": lambda it: it.segment().seal,
    "attach": attach,
    "close a segment": lambda it: it.segment().close,
    "allocate without a connection": lambda it: without_a_connection(it, "allocate", 0),
    "free without a connection": lambda it: without_a_connection(it, "free", 3),
    "allocate without a broker": partial(without_a_broker, there=False),
    "free without a broker": partial(without_a_broker, there=True),
    "wait for memory": lambda it: refused(lambda: it.model.allocate("1GiB", timeout=0.05)),
    "wait for a segment": lambda it: refused(lambda: it.model.create_segment("late", "1GiB", timeout=0.05)),
    "answer recalls": lambda it: lambda: it.model.on_recall(lambda _: None),
    "answer no recalls": no_recalls,
    "answer one recall": lambda it: it.recall().done,
    "hold up recalls": hold_up,
    "lend to a framework": lend,
}
"""Each public call, ready to be made."""


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with running({"host_capacity": "64MiB"}) as daemon:
        one = Program(daemon)
        yield one
        one.client.close()
        one.local.close()


def mapped_bytes() -> int:
    """Return how many bytes of extents this process has mapped: each extent once."""
    rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if EXTENT in line]
    return len({row[4] for row in rows}) * PAGE


def in_time(call: Call) -> None:
    """Make a call in another thread, to its end."""
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(call()), daemon=True)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    assert done, "another thread waits for what an interrupt has left behind"


def check(program: Program, name: str) -> None:
    """Raise unless the promise is kept after an interrupt of a call."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    in_time(program.model.allocate(PAGE).close)
    collect()
    if "seal" not in name and "segment" not in name and "attach" not in name:
        until(lambda: program.daemon.books().lent_bytes + program.local.physical_usage_bytes == mapped_bytes())
    for pool in (thing for thing in program.kept if isinstance(thing, membroker.VirtualMemoryPool)):
        if not pool.closed:
            until(lambda pool=pool: not any(row.state == "changing" for row in pool.mappings()))
            pool.free(0, PAGE) if pool.is_mapped(0) else pool.grow(PAGE)
    line, recalls = program.client._session.reconnecting, program.client._recalls
    assert not line.notices._background._held_up
    until(lambda: recalls._answering.keys() <= line.inventory.answering)
    program.lost_all()
    assert program.model.pending_recall is None
    assert not line.inventory.answering
    until(lambda: program.daemon.books().lent_bytes + program.local.physical_usage_bytes == 0)
    assert (mapped_bytes(), open_extents()) == (0, 0)
    until(lambda: not program.client._session._holdings)  # the background thread forgets a holding after it unmapped it


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_anywhere(program: Program, name: str) -> None:
    """Somebody presses Ctrl-C in a notebook, and runs the next cell."""
    print("MEMBROKER_SEED", SEED)
    points = 0
    for _ in range(2):  # the first call also imports
        points, struck = interrupted_at(None, CALLS[name](program))
        assert not struck
        program.lost_all()
    for point in sampled(SEED, points, POINTS):
        print(name, "point", point, "of", points)
        call = CALLS[name](program)
        passed, struck = interrupted_at(point, call)
        assert struck or passed < point, "the interrupt was lost"
        del call
        check(program, name)


# membroker.vmm


class VmmProgram:
    """One page of memory at the first of four pages of addresses."""

    def __init__(self) -> None:
        self.driver = HostDriver()
        PhysicalMemory.create(self.driver, PAGE).close()  # its first extent opens the driver's own descriptors
        self.before = self.now()
        self.addresses = AddressRange(self.driver, 4 * PAGE)
        self.memory = PhysicalMemory.create(self.driver, PAGE)
        self.mapping = MappedRange(self.addresses, self.memory)
        self.more = PhysicalMemory.create(self.driver, PAGE)

    def end(self) -> None:
        """Close what can be closed, twice where the first time cannot."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                for one in [*self.addresses.mappings, self.mapping, self.memory, self.more, self.addresses]:
                    with suppress(MembrokerError, DriverError, KeyError):
                        one.close()

    def now(self) -> Counter[str]:
        """Return what there is of all of it, by kind."""
        addresses = self.driver._process.addresses
        memory = self.driver.memory(Location.DEVICE)
        return Counter(
            handles=len(self.driver._handles),
            reservations=len(addresses._reserved),
            mappings=len(addresses._mapped),
            pages=memory.used // PAGE,
            descriptors=len(os.listdir("/proc/self/fd")),
        )

    def left(self) -> Counter[str]:
        """Return what there is more than at the beginning."""
        return self.now() - self.before


ALL = {"handles", "reservations", "mappings", "pages", "descriptors"}
VMM_CALLS: dict[str, tuple[Callable[[VmmProgram], object], set[str]]] = {
    "set_access": (lambda it: it.mapping.set_access(AccessFlags.READ), set()),
    "get_access": (lambda it: it.mapping.get_access(), set()),
    "mappings": (lambda it: it.addresses.mappings, set()),
    "mappings_in": (lambda it: it.addresses.mappings_in(0, PAGE), set()),
    "AddressRange": (lambda it: AddressRange(it.driver, PAGE), {"reservations"}),
    "create": (lambda it: PhysicalMemory.create(it.driver, PAGE), {"handles", "pages", "descriptors"}),
    "export": (lambda it: it.memory.export(), {"descriptors", "pages"}),
    "MappedRange": (lambda it: MappedRange(it.addresses, it.more, PAGE), ALL),
    "close a mapping": (lambda it: it.mapping.close(), ALL),
    "close memory": (lambda it: it.more.close(), {"handles", "pages", "descriptors"}),
}
"""Each call, and the kinds of what it may leave."""


@pytest.mark.parametrize("name", VMM_CALLS)
def test_an_interrupt_leaves_no_more_than_the_page_says(name: str) -> None:
    print(f"seed {SEED}")
    in_a_child(partial(strike, name))  # what is left ends with it


def strike(name: str) -> None:
    """Interrupt a call at many points, each time in a new program."""
    warnings.simplefilter("ignore", ResourceWarning)
    call, may_stay = VMM_CALLS[name]
    program = VmmProgram()
    points, _ = interrupted_at(None, partial(call, program))
    program.driver.close()
    struck = 0
    for point in sampled(SEED, points, VMM_POINTS):
        program = VmmProgram()
        struck += interrupted_at(point, partial(call, program))[1]
        in_time(partial(cycle, program.driver))
        in_time(program.end)
        left = +program.left()
        program.driver.close()
        assert left.keys() <= may_stay, f"point {point}: {left}"
    assert struck


def cycle(driver: HostDriver) -> None:
    """Use the driver as a program does after the interrupt."""
    with (
        AddressRange(driver, PAGE) as addresses,
        PhysicalMemory.create(driver, PAGE) as memory,
        MappedRange(addresses, memory) as mapping,
    ):
        driver.write(mapping.address, b"bytes")
        assert driver.read(mapping.address, 5) == b"bytes"
