"""The stories of tests/system with a real GPU, a real daemon and real workers.

Nothing else may use the GPU meanwhile: its figures would include the other process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support import faulty_daemon
from tests.support.daemons import Daemon, until
from tests.support.gpu import (
    CAPACITY,
    SLACK,
    at_rest,
    borrow,
    enter,
    kill_and_time,
    milliseconds,
    near,
    on_gpu,
    states,
    still_has,
    unaccounted,
    until_lendable,
    used,
)
from tests.support.sizes import GIB, MIB
from tests.support.workers import PAGE, Worker, is_gone, worker, workers

from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("gpu")]

State = Callable[[str, str], None]
GATE_RESERVE = 256 * MIB
"""What the gate keeps of a GPU by default."""


STEPS = {
    "said Hello": "raw.hello()",
    "sent its Allocate": "raw.send_allocate(4)",
    "read the delivery": "raw.read_delivery()",
    "imported it": "raw.driver = membroker.vmm.open_driver('cuda', raw.welcome.device_uuid); raw.import_all()",
    "acknowledged it": "raw.acknowledge()",
    "read the reply": "raw.read_reply()",
    "sent its Release and kept the memory": "raw.send_release()",
}


def go_bare(one: Worker, daemon: Daemon, transport: str) -> None:
    """Have a worker connect without the library."""
    one.do("from tests.support.gpu_work import *")
    one.do(f"raw = Raw({str(daemon.endpoint())!r}, {transport!r})")


def test_a_worker_killed_at_any_step_leaves_nothing(gpu: CudaDriver, transport: str) -> None:
    """At each step its descriptors end with it, including those still in a socket's buffer."""
    with on_gpu(gpu) as daemon:
        for last in STEPS:
            rest = at_rest(lambda: used(gpu))
            with worker() as one:
                go_bare(one, daemon, transport)
                for step, line in STEPS.items():
                    one.do(line)
                    if step == last:
                        break
                one.kill()
                until(lambda: not daemon.sessions())
                until_lendable(daemon)
                until(lambda rest=rest: used(gpu) <= rest + 4 * MIB)


@pytest.mark.parametrize(
    ("page", "size"), [("2MiB", GIB), ("64MiB", CAPACITY), ("1GiB", CAPACITY)], ids=["2MiB", "64MiB", "1GiB"]
)
def test_a_killed_workers_bytes_are_lent_again_when_the_gpu_shows_them_free(
    gpu: CudaDriver, state: State, page: str, size: int
) -> None:
    """Three workers one after the other are killed, and then another worker borrows the whole capacity."""
    times = []
    with on_gpu(gpu) as daemon, worker() as other:
        enter(other, daemon, "blue")
        for _ in range(3):
            with worker() as one:
                enter(one, daemon, page=page)
                borrow(one, size)
                held = at_rest(lambda: used(gpu))
                times.append(kill_and_time(one, daemon))
                assert used(gpu) <= held - size + SLACK, "lent again while the GPU shows it in use"
        assert "proven=false" not in daemon.log(), "credited by the time limit, not because the GPU showed it free"
        borrow(other, CAPACITY)
        other.do("client.close()")
    state(f"from SIGKILL until lendable, {size >> 30} GiB in pages of {page}", milliseconds(times))


# Outlived by its memory


def test_a_forked_child_keeps_its_dead_parents_charge(gpu: CudaDriver, state: State) -> None:
    """The child inherited the GPU's descriptors by a fork behind Python's back: the memory stays in use, and charged.

    Other workers start and die meanwhile; their deaths are settled, and are not mistaken for this one.
    """
    size = 2 * GIB
    with on_gpu(gpu, {"settle_seconds": 60.0}) as daemon, worker() as parent, worker() as other:
        enter(parent, daemon)
        enter(other, daemon, "blue")
        borrow(parent, size)
        held = at_rest(lambda: used(gpu))
        child = parent.ask("fork_unseen()")
        try:
            parent.kill()
            until(lambda: daemon.books().releasing_bytes == size)
            assert states(daemon) == ["RELEASING", "OPEN"]
            assert other.refused("pool.allocate(0, '3GiB')").numbers == ("capacity", 3 * GIB, 2 * GIB, CAPACITY)
            for _ in range(2):
                with worker() as stranger:
                    enter(stranger, daemon, "blue")
                    borrow(stranger, 256 * MIB)
                    stranger.kill()
                    until(lambda: states(daemon) == ["RELEASING", "OPEN"])
            assert daemon.books().releasing_bytes == size, "credited while a child still held it"
            assert used(gpu) >= held - SLACK, "the child does not hold it: the test shows nothing"
        finally:
            os.kill(child, signal.SIGKILL)
        began = time.monotonic()
        until(lambda: daemon.books().releasing_bytes == 0)
        state(
            "from SIGKILL of a forked child until its parent's 2 GiB are lendable",
            milliseconds([time.monotonic() - began]),
        )
        assert used(gpu) <= held - size + SLACK
        assert "proven=false" not in daemon.log()
        borrow(other, CAPACITY)
        other.do("client.close()")


def test_the_librarys_fork_hook_gives_the_memory_back(gpu: CudaDriver) -> None:
    """A data loader is forked with Python's own fork: the child drops the memory, so the parent's death frees it."""
    size = 2 * GIB
    with on_gpu(gpu) as daemon, worker() as parent:
        enter(parent, daemon)
        borrow(parent, size)
        held = at_rest(lambda: used(gpu))
        child = parent.ask("fork_seen()")
        try:
            assert still_has(parent, size)
            parent.do("pool.grow(64 * MIB)")
            parent.kill()
            until_lendable(daemon)
            assert used(gpu) <= held - size + SLACK
            assert not is_gone(child), "the child died: the test shows nothing"
            assert "proven=false" not in daemon.log()
        finally:
            os.kill(child, signal.SIGKILL)


# Liars and strangers


@contextmanager
def a_full_gpu(gpu: CudaDriver, left: int, call: str = "cuMemAlloc") -> Iterator[Worker]:
    """Have a process without the broker take all of the GPU but `left` bytes."""
    with worker() as stranger:
        stranger.do(f"from tests.support.gpu_work import *; stranger = Stranger({gpu.device.uuid!r}, {call!r})")
        free = stranger.ask(f"stranger.leave({left})")
        assert left - SLACK <= free <= left + SLACK, f"{free >> 20} MiB are left of the GPU, not {left >> 20}"
        yield stranger


@pytest.mark.parametrize(("call", "transport"), [("cuMemAlloc", "handoff"), ("cudaMalloc", "grpc")])
def test_a_stranger_that_fills_the_gpu_is_told_as_a_full_device(gpu: CudaDriver, transport: str, call: str) -> None:
    """The books have 4 GiB and the GPU has 1: the gate refuses before the driver fails, and lends what fits."""
    with on_gpu(gpu, {"stock": "1GiB"}) as daemon, worker() as one:
        enter(one, daemon, transport=transport)
        rest = at_rest(lambda: unaccounted(daemon))
        with a_full_gpu(gpu, GIB + GATE_RESERVE, call) as stranger:
            for attempt in ("model.allocate('2GiB')", "pool.allocate(0, '2GiB')"):
                refused = one.refused(attempt)
                assert (refused.error, refused.reason) == ("OutOfMemory", "DEVICE_FULL"), refused
                assert refused.numbers[:2] == ("device", 2 * GIB)
                assert near(int(refused.metadata["device_free_bytes"]), GIB + GATE_RESERVE)
                assert "driver_says" not in refused.metadata, "the driver was asked although the gate already knew"
                assert "unaccounted" in refused.message
                until_lendable(daemon)
            until(lambda: unaccounted(daemon) > rest + 8 * GIB)
            borrow(one, 768 * MIB)
            assert still_has(one, 768 * MIB)
            assert one.refused("pool.grow('512MiB')").reason == "DEVICE_FULL"
            assert daemon.books().lent_bytes == 768 * MIB
            stranger.kill()
        until(lambda: near(unaccounted(daemon), rest))
        one.do(f"pool.grow({CAPACITY - 768 * MIB})")
        one.do("client.close()")


def test_a_worker_that_says_released_and_keeps_its_mapping_is_found_out(gpu: CudaDriver, state: State) -> None:
    """The worker says that the bytes are free, and the GPU shows them in use: they are unaccounted, and not lent,
    until it dies.
    """
    audit, size = 0.5, 2 * GIB
    with on_gpu(gpu, {"audit_seconds": audit}) as daemon, workers(2) as (liar, other):
        enter(liar, daemon)
        enter(other, daemon, "blue")
        borrow(liar, size)
        rest = at_rest(lambda: unaccounted(daemon), 2 * audit)
        with a_full_gpu(gpu, GIB + GATE_RESERVE):
            filled = at_rest(lambda: unaccounted(daemon), 2 * audit)
            began = time.monotonic()
            liar.do("client._session.reconnecting.release(list(pool._holding.extents.values()))")
            until(lambda: unaccounted(daemon) >= filled + size - SLACK)
            seconds = time.monotonic() - began
            assert daemon.books().lent_bytes == 0
            assert daemon.books().free_bytes == CAPACITY
            assert other.refused("pool.allocate(0, '2GiB')").reason == "DEVICE_FULL"
            borrow(other, 768 * MIB)
            assert still_has(liar, size), "its memory was lent to another worker"
            suspects = dict(gpu.processes())
            seen = f"NVML names it, with {suspects.get(liar.pid, 0) >> 20} MiB"
            state("a liar that keeps 2 GiB mapped", seen if liar.pid in suspects else f"NVML names only {suspects}")
            if liar.pid in suspects:
                until(lambda: liar.pid in daemon.suspects())
        until(lambda: near(unaccounted(daemon), rest + size))
        liar.kill()
        until(lambda: unaccounted(daemon) <= rest + SLACK)
        other.do("client.close()")
    state(f"a liar is found out, with an audit every {1000 * audit:.0f} ms, after", milliseconds([seconds]))


def test_a_worker_that_says_released_and_keeps_its_descriptors_is_found_out(
    gpu: CudaDriver, state: State, transport: str
) -> None:
    """It never imports and has no context, so NVML names no process; the GPU shows the bytes in use all the same."""
    audit, count = 0.5, 64
    with on_gpu(gpu, {"audit_seconds": audit}) as daemon, worker() as keeper:
        rest = at_rest(lambda: unaccounted(daemon), 2 * audit)
        go_bare(keeper, daemon, transport)
        keeper.do(f"raw.hello(); raw.send_allocate({count})")
        keeper.do("raw.read_delivery(); raw.acknowledge(); raw.read_reply()")
        assert daemon.books().lent_bytes == count * PAGE
        began = time.monotonic()
        keeper.do("raw.send_release(); raw.read_release()")
        assert daemon.books().lent_bytes == 0
        until(lambda: unaccounted(daemon) >= rest + count * PAGE - 4 * MIB)
        seconds = time.monotonic() - began
        assert dict(gpu.processes()).get(keeper.pid, 0) == 0
        keeper.do("[os.close(one) for one in raw.descriptors]")
        until(lambda: unaccounted(daemon) <= rest + 4 * MIB)
    state("a liar that keeps its descriptors is found out after", milliseconds([seconds]))


# The daemon's own death


def test_workers_compute_on_when_the_daemon_is_killed(gpu: CudaDriver, state: State) -> None:
    """Kernels run on borrowed memory before, during and after the daemon's death; the next one has the same books."""
    size = GIB

    def rounds(one: Worker) -> int:
        error, done = one.ask("[computing.error, computing.rounds]")
        assert not error, error
        return int(done)

    def go_on(engines: list[Worker], more: int) -> None:
        goals = {each.pid: rounds(each) + more for each in engines}
        until(lambda: all(rounds(each) >= goals[each.pid] for each in engines), 60)

    with on_gpu(gpu) as daemon, workers(2) as engines:
        for number, each in enumerate(engines):
            enter(each, daemon, ["red", "blue"][number])
            each.do(f"computing = Computing(model, {size})")
        go_on(engines, 3)
        contexts = at_rest(lambda: unaccounted(daemon))
        daemon.kill()
        go_on(engines, 10)
        began = time.monotonic()
        engines[0].begin("pool.grow('64MiB')")
        daemon.start_again()
        engines[0].result()
        state("a call made while no daemon ran, from the next one's start", f"{time.monotonic() - began:.2f} s")
        assert daemon.books().lent_bytes == 2 * size + 64 * MIB
        assert near(unaccounted(daemon), contexts), "lent memory was counted as unaccounted"
        go_on(engines, 3)
        done = [each.ask("computing.stop()") for each in engines]
        how = engines[0].ask("'torch' if torch_on_the_gpu() else 'memset'")
        state(f"rounds of {how} on borrowed memory over the daemon's death", f"{done[0]} and {done[1]}")
        for each in engines:
            each.do("pool.close(); client.close()")
        until_lendable(daemon)
        for each in engines:
            assert each.finish() == 0


@pytest.mark.parametrize("point", ["debited", "created", "deliver", "credited", "stored", "sealed", "reconcile"])
def test_the_daemon_dies_at_a_point(
    gpu: CudaDriver, point: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sample of tests/system/test_crash_points.py on the GPU: the bytes are the same afterwards."""
    monkeypatch.setenv(faulty_daemon.ARMED, str(tmp_path / "armed"))
    calls = {
        "credited": "spare.close()",
        "stored": "segment = model.create_segment('weights', GIB)",
        "sealed": "segment = model.create_segment('weights', GIB); write_blocks(segment, 1); segment.seal()",
    }
    with on_gpu(gpu, module="tests.support.faulty_daemon crash") as daemon, worker() as one:
        enter(one, daemon)
        borrow(one, GIB)
        one.do("spare = model.allocate('64MiB')")
        if point == "reconcile":
            daemon.kill()
            faulty_daemon.arm(point, 0)
            daemon.start_again()
        else:
            faulty_daemon.arm(point, 0)
        one.begin(calls.get(point, "more = model.allocate('64MiB')"))
        daemon.process.wait(60)
        daemon.start_again()
        one.result()
        assert still_has(one, GIB)
        held = GIB + (0 if point == "credited" else 64 * MIB) + (GIB if point in calls and point != "credited" else 0)
        held += 64 * MIB if point not in calls else 0
        until(lambda: daemon.books().lent_bytes == held)
        if point in ("stored", "sealed"):
            one.do("if segment.writable:\n    write_blocks(segment, 1)\n    segment.seal()")
            with worker() as reader:
                reader.connect(daemon)
                reader.do("from tests.support.gpu_work import *")
                reader.do("driver = client.model('m').driver; segment = client.attach('m/weights')")
                assert reader.ask("digest(segment, driver)") == one.ask("digest(segment, driver)")
            one.do("segment.delete()")
        one.do("client.close()")
        until_lendable(daemon)


# Sizes and places
