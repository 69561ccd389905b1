"""Ctrl-C anywhere in the public calls: books and mappings agree, nothing deadlocks, and nothing is left behind.

Each call is struck once, at points that a seed draws, against a real daemon. `MEMBROKER_SEED` repeats a run, and
`MEMBROKER_POINTS` strikes more points of each call.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.interrupts import interrupted_at, sampled
from tests.support.processes import EXTENT, open_extents

import membroker
from membroker import interrupts
from membroker.adapters.blocks import BlockLending
from membroker.interrupts import KeyedLocks, Operation, let_through, uninterrupted
from membroker.v1 import broker_pb2, handoff_pb2, resources_pb2

pytestmark = pytest.mark.deep

PAGE = 2 << 20
POINTS = int(os.environ.get("MEMBROKER_POINTS") or 14)
SEED = int(os.environ.get("MEMBROKER_SEED") or random.randrange(1 << 30))

Call = Callable[[], object]


class Program:
    """A worker with a client. `kept` is what it has, and loses at the end of each run."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.client = membroker.connect(daemon.endpoint())
        self.model = self.client.register_model("m")
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
        pool.deallocate(0, PAGE)
        pool.deallocate(3 * PAGE, PAGE)
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
        gc.collect()
        with self.daemon.admin_stub() as admin:
            for one in admin.ListSegments(broker_pb2.ListSegmentsRequest()).segments:
                if one.state == resources_pb2.Segment.SEALED:
                    admin.DeleteSegment(broker_pb2.DeleteSegmentRequest(name=one.name))


def prepared(program: Program, name: str) -> Call:
    """Return a public call, ready to be made."""
    match name:
        case "allocate a buffer":
            return lambda: program.model.allocate(PAGE)
        case "close a buffer":
            return program.keep(program.model.allocate(PAGE)).close  # type: ignore[no-any-return]
        case "make a pool":
            return lambda: program.model.pool(page_size=PAGE, virtual_capacity=64 * PAGE)
        case "allocate":
            pool = program.pool()
            return lambda: pool.allocate(0, 3 * PAGE)
        case "allocate beside spare pages":
            pool = program.pool(2, spare_pages=2)
            pool.deallocate(0, 2 * PAGE)
            return lambda: pool.allocate(PAGE, 3 * PAGE)
        case "grow":
            pool = program.pool(1)
            return lambda: pool.grow(PAGE)
        case "deallocate":
            pool = program.pool(3)
            return lambda: pool.deallocate(0, 2 * PAGE)
        case "allocate ranges" | "deallocate ranges":
            pool = program.pool(2, spare_pages=1)
            pool.deallocate(PAGE, PAGE)
            ranges = [(at * PAGE, PAGE) for at in (1, 5, 6, 20)]
            if name == "allocate ranges":
                return lambda: pool.allocate_ranges(ranges)
            pool.allocate_ranges(ranges)
            return lambda: pool.deallocate_ranges(ranges)
        case "free":
            pool = program.pool(3)
            return lambda: pool.free(pool.base_address)
        case "protect":
            pool = program.pool(3)
            return lambda: pool.protect(0, PAGE, "read")
        case "close a pool":
            return program.pool(3).close
        case "compact":
            return program.holes().compact
        case "offload":
            return program.pool(3).offload
        case "restore":
            return program.offloaded().restore
        case "make a growable buffer":
            return lambda: program.model.growable_buffer(PAGE, 16 * PAGE, PAGE)
        case "grow a buffer":
            buffer = program.keep(program.model.growable_buffer(PAGE, 16 * PAGE, PAGE))
            return lambda: buffer.resize(3 * PAGE)
        case "shrink a buffer":
            buffer = program.keep(program.model.growable_buffer(3 * PAGE, 16 * PAGE, PAGE))
            return lambda: buffer.resize(PAGE)
        case "back tiles" | "drop tiles":
            table = program.keep(program.model.sparse_array((64, PAGE), "U8"))
            if name == "back tiles":
                return lambda: table.back(1, 3)
            table.back(1, 3)
            return lambda: table.drop(1, 3)
        case "create a segment":
            return program.segment
        case "seal":
            return program.segment().seal
        case "attach":
            segment = program.segment(sealed=True)
            return lambda: program.client.attach(f"m/{segment.name}")
        case "close a segment":
            return program.segment().close
        case "allocate without a broker":
            own = program.keep(membroker.VirtualMemoryPool(program.local, 64 * PAGE, page_size=PAGE))
            return lambda: own.allocate(0, 3 * PAGE)
        case "deallocate without a broker":
            own = program.keep(membroker.VirtualMemoryPool(program.local, 64 * PAGE, page_size=PAGE))
            own.allocate(0, 3 * PAGE)
            return lambda: own.deallocate(0, 3 * PAGE)
        case "wait for memory" | "wait for a segment":

            def wait() -> None:
                """Wait for more than there is, as long as a few turns of the daemon take."""
                with suppress(membroker.OutOfMemory):
                    if name == "wait for memory":
                        program.model.allocate("1GiB", wait=0.05)
                    else:
                        program.model.create_segment("late", "1GiB", wait=0.05)

            return wait
        case "answer recalls":
            return lambda: program.model.on_recall(lambda _: None)
        case "answer no recalls":
            program.model.on_recall(lambda _: None)
            return lambda: program.model.on_recall(None)
        case "answer one recall":
            return program.recall().done
        case "hold up recalls":

            def hold_up() -> None:
                with program.client.defer_recalls():
                    pass

            return hold_up
        case "lend to a framework":
            lending = program.keep(BlockLending(program.model, PAGE))
            return lambda: lending.allocate(1)
    raise AssertionError(name)


CALLS = [
    *("allocate a buffer", "close a buffer", "make a pool", "allocate", "allocate beside spare pages", "grow"),
    *("deallocate", "free", "protect", "close a pool", "compact", "offload", "restore", "make a growable buffer"),
    *("grow a buffer", "shrink a buffer", "back tiles", "drop tiles", "create a segment", "seal", "attach"),
    *(
        "close a segment",
        "wait for memory",
        "wait for a segment",
        "answer recalls",
        "answer no recalls",
        "answer one recall",
        "hold up recalls",
        "lend to a framework",
        "allocate ranges",
        "deallocate ranges",
        "allocate without a broker",
        "deallocate without a broker",
    ),
]


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
    gc.collect()
    if "seal" not in name and "segment" not in name and "attach" not in name:
        until(lambda: program.daemon.books().lent_bytes + program.local.physical_usage_bytes == mapped_bytes())
    for pool in (thing for thing in program.kept if isinstance(thing, membroker.VirtualMemoryPool)):
        if not pool.closed:
            until(lambda pool=pool: not any(row.state == "changing" for row in pool.mappings()))
            pool.deallocate(0, PAGE) if pool.is_mapped(0) else pool.grow(PAGE)
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
        points, struck = interrupted_at(None, prepared(program, name))
        assert not struck
        program.lost_all()
    for point in sampled(SEED, points, POINTS):
        print(name, "point", point, "of", points)
        call = prepared(program, name)
        passed, struck = interrupted_at(point, call)
        assert struck or passed < point, "the interrupt was lost"
        del call
        check(program, name)


def test_no_file_of_the_library_touches_a_signal() -> None:
    """The handlers of a process are its program's: only the command line's own entry may set one."""
    library = Path(membroker.__file__).parent
    found = [path for path in library.rglob("*.py") if "signal.signal(" in path.read_text()]
    of_the_commands = {library / "wire/standard.py"}  # how the two commands import: quietly
    assert [path for path in found if "cli" not in path.parts and path not in of_the_commands] == []


class TestUninterrupted:
    def test_the_work_runs_elsewhere_and_its_result_comes_back(self) -> None:
        assert uninterrupted(threading.current_thread) is not threading.main_thread()
        with pytest.raises(ZeroDivisionError):
            uninterrupted(lambda: 1 // 0)

    def test_an_interrupt_stops_the_work_between_two_steps(self) -> None:
        steps: list[int] = []

        def work() -> None:
            steps.append(1)
            os.kill(os.getpid(), signal.SIGINT)
            task = interrupts._here.task
            assert task is not None
            until(lambda: task.interrupted)
            steps.append(2)
            let_through()
            steps.append(3)

        with pytest.raises(KeyboardInterrupt):
            uninterrupted(work)
        assert steps == [1, 2]

    def test_an_interrupt_does_not_wait_for_ever(self) -> None:
        """A broker that answers nothing: the person gets the prompt back."""
        go_on = threading.Event()

        def work() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            assert go_on.wait(DEADLINE_SECONDS)

        with pytest.raises(KeyboardInterrupt):
            uninterrupted(work, patience=0.0)
        go_on.set()


class Used:
    """What operations work on, and notes what they say."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self, operation: Operation) -> None:
        self.told.append("begin")

    def finish(self, operation: Operation) -> None:
        self.told.append("finish")

    def interrupted(self) -> None:
        self.told.append("interrupted")


class TestOperation:
    def test_complete(self) -> None:
        used = Used()
        with Operation(used) as operation:
            operation.ends.append(lambda: used.told.append("end"))
        assert used.told == ["begin", "end", "finish"]

    @pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
    def test_a_failure_is_undone_last_step_first(self, error: BaseException) -> None:
        """The connection is dropped after an interrupt only, and last of all: the session states the truth."""
        used = Used()
        with pytest.raises(type(error)), Operation(used) as operation:  # noqa: PT012 - the block is what is tested
            operation.ends.append(lambda: used.told.append("end"))
            operation.undo += [lambda: used.told.append("first"), lambda: used.told.append("second")]
            raise error
        assert used.told[:5] == ["begin", "second", "first", "end", "finish"]
        assert ("interrupted" in used.told) == isinstance(error, KeyboardInterrupt)

    def test_an_interrupt_of_the_end_runs_it_again(self) -> None:
        used, interrupts_left = Used(), [1]

        def end() -> None:
            used.told.append("end")
            if interrupts_left:
                interrupts_left.pop()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), Operation(used) as operation:
            operation.ends.append(end)
        assert used.told == ["begin", "end", "end", "finish", "interrupted"]

    def test_a_step_forward_is_completed(self) -> None:
        """What cannot be taken back is finished, although Ctrl-C came in the middle of it."""
        used, interrupts_left = Used(), [1]

        def step() -> None:
            used.told.append("step")
            if interrupts_left:
                interrupts_left.pop()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), Operation(used) as operation:  # noqa: PT012 - as above
            operation.undo.append(lambda: used.told.append("undo"))
            operation.forward(step)
        assert used.told[:3] == ["begin", "step", "step"]
        assert "undo" not in used.told


class TestTurns:
    def test_one_at_a_time(self) -> None:
        """Eight threads take overlapping things again and again: no two are at the same one, and all get through."""
        turns, at_it, errors = KeyedLocks(), [threading.Lock() for _ in range(4)], []

        def take(number: int) -> None:
            things = {number % 4, (number + 1) % 4}
            for _ in range(200):
                with Operation(Used()) as operation:
                    turns.take(things, operation)
                    errors.extend(thing for thing in things if not at_it[thing].acquire(blocking=False))
                    for thing in things:
                        at_it[thing].release()

        threads = [threading.Thread(target=take, args=(number,), daemon=True) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        assert errors == []

    @pytest.mark.parametrize("to", ["the process", "another thread"])
    def test_an_interrupt_ends_the_wait_and_nothing_else(self, to: str) -> None:
        """Ctrl-C while a thread waits for its turn at a call that hangs: it gets out, and has taken nothing.

        The kernel may give the signal to any thread, and then it does not wake the one that waits.
        """
        turns, taken, done = KeyedLocks(), threading.Event(), threading.Event()

        def hang() -> None:
            with Operation(Used()) as operation:
                turns.take({1}, operation)
                taken.set()
                until(lambda: bool(turns._changed._waiting))
                if to == "the process":
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
                done.wait(DEADLINE_SECONDS)

        hanging = threading.Thread(target=hang)
        hanging.start()
        assert taken.wait(DEADLINE_SECONDS)
        with pytest.raises(KeyboardInterrupt), Operation(Used()) as operation:
            turns.take({1, 2}, operation)
        assert hanging.is_alive(), "it waited for the call that hangs"
        with Operation(Used()) as operation:
            turns.take({2}, operation)
            done.set()
        hanging.join()
        with Operation(Used()) as operation:
            turns.take({1, 2}, operation)
