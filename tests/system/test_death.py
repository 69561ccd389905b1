"""Death, and worse: what a worker leaves behind at each step, and that only the device's own figure brings it back.

Every test ends where it began: books of zero, the anchor and nothing else on the device, and as many descriptors open
in the daemon as before, so that a fault shows in whatever it leaked.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.daemons import Daemon, hold_still, running, until
from tests.support.sizes import MIB
from tests.support.workers import (
    PAGE,
    Worker,
    descriptors_at_start,
    device_used,
    is_gone,
    until_clean,
    worker,
)
from tests.system.test_suspects import processes

COUNT = 4
"""Extents of a raw worker's Allocate, of one granule each."""

STEPS = {
    "said Hello": "raw.hello()",
    "sent its Allocate": f"raw.send_allocate({COUNT})",
    "read the delivery": "raw.read_delivery()",
    "imported it": "raw.import_all()",
    "acknowledged it": "raw.acknowledge()",
    "read the reply": "raw.read_reply()",
    "mapped it": "raw.map_all()",
    "sent its Release with the mappings kept": "raw.send_release()",
    "unmapped and read the answer": "raw.read_release(); raw.unmap_all()",
}


@contextmanager
def raw_worker(daemon: Daemon, last_step: str = "", transport: str = "handoff") -> Iterator[Worker]:
    """Yield a worker without the library that has gone as far as `last_step`."""
    with worker() as one:
        one.do(f"raw = Raw({str(daemon.endpoint())!r}, {transport!r})")
        if last_step:
            go(one, *STEPS_UNTIL[last_step])
        yield one


STEPS_UNTIL = {step: list(STEPS.values())[: number + 1] for number, step in enumerate(STEPS)}


def go(one: Worker, *steps: str) -> None:
    for step in steps:
        one.do(step)


def borrow(one: Worker, daemon: Daemon, size: int, tenant: str = "red") -> Worker:
    one.connect(daemon, tenant)
    one.do("model = client.model('m', virtual_capacity='1GiB'); pool = model.pool(page_size='2MiB')")
    one.do(f"pool.allocate(0, {size}); pool.view(0, {size})[:4] = b'mine'")
    return one


def states(daemon: Daemon) -> list[str]:
    return [type(session).State.Name(session.state) for session in daemon.sessions()]


# Killed


@pytest.mark.deep
def test_a_worker_killed_at_a_step_leaves_nothing(daemon: Daemon, transport: str) -> None:
    """The kernel's out-of-memory killer does not wait for a good moment."""
    at_start = descriptors_at_start(daemon)
    for step in STEPS:
        print(f"killed when it has {step}")
        with raw_worker(daemon, step, transport) as one:
            one.kill()
            until_clean(daemon, at_start)


def test_a_frame_and_the_death_of_its_sender_arrive_together(daemon: Daemon, transport: str) -> None:
    """The daemon was busy; when it looks again there is a frame, an end of the connection, and a dead process."""
    at_start = descriptors_at_start(daemon)
    for step in ("sent its Allocate", "acknowledged it", "sent its Release with the mappings kept"):
        print(f"killed when it has {step}")
        *before, last = STEPS_UNTIL[step]
        with raw_worker(daemon, transport=transport) as one:
            go(one, *before)
            with hold_still(daemon):
                one.do(last)
                one.kill()
            until_clean(daemon, at_start)


def test_a_worker_killed_with_its_window_full_leaves_nothing() -> None:
    """It read none of four packets: two lie in the kernel until the socket is gone, two wait in the daemon."""
    with running({"capacity": "1GiB"}) as daemon:
        at_start = descriptors_at_start(daemon)
        with raw_worker(daemon, "said Hello") as one:
            one.do("raw.send_allocate(256)")
            until(lambda: daemon.books().lent_bytes == 512 * MIB)
            until(lambda: device_used(daemon) == 256 * MIB)
            until(lambda: daemon.descriptors() <= at_start + 10)  # what is sent is not open in the daemon any more
            one.do("raw.read_delivery(); raw.acknowledge()")
            until(lambda: device_used(daemon) == 384 * MIB)
            one.kill()
            until_clean(daemon, at_start)


# Outlived by its memory


@pytest.fixture
def patient() -> Iterator[Daemon]:
    """A daemon that credits the dead by the device's figure alone, however long a test takes."""
    with running({"settle_seconds": 600.0}) as one:
        yield one


def test_a_forked_child_keeps_its_dead_parents_charge(patient: Daemon) -> None:
    """A rank is killed, its child process inherited everything by a fork that Python never saw.

    Connection, descriptors and mapping live on in the child, so neither the socket nor the pidfd is proof: the bytes
    are releasing, charged and lent to nobody, and come back when the child dies.
    """
    daemon = patient
    at_start = descriptors_at_start(daemon)
    with worker() as parent, worker() as other:
        borrow(parent, daemon, 64 * MIB)
        other.connect(daemon, "blue").do("model = client.model('n')")
        child = parent.ask("fork_unseen()")
        try:
            parent.kill()
            until(lambda: daemon.books().releasing_bytes == 64 * MIB)
            assert states(daemon) == ["RELEASING", "OPEN"]
            refused = other.refused("model.allocate('194MiB')")
            assert refused.numbers == ("capacity", 194 * MIB, 192 * MIB, 256 * MIB)
            look = daemon.device().revision
            for _ in range(3):  # audits come each 10 ms meanwhile, and must not be taken in by other deaths
                with worker() as stranger:
                    borrow(stranger, daemon, 16 * MIB, "blue")
                    stranger.kill()
                    until(lambda: states(daemon) == ["RELEASING", "OPEN"])
            assert daemon.device().revision > look
            assert daemon.books().releasing_bytes == 64 * MIB, "credited while a child still held it"
            assert device_used(daemon) == 64 * MIB
        finally:
            os.kill(child, signal.SIGKILL)
        until(lambda: daemon.books().releasing_bytes == 0)
        assert "proven=false" not in daemon.log()
        assert daemon.figure("membroker_device_unproven_releases_total", location="device") == 0
        other.do("buffer = model.allocate('256MiB'); buffer.close(); client.close()")
        until_clean(daemon, at_start)


def test_memory_that_never_comes_back_is_written_off_and_lent_to_nobody() -> None:
    """The child lives on. The books say free; the gate, which asks the device, says no before the driver fails."""
    with running({"settle_seconds": 0.3, "audit_seconds": 0.1}) as daemon:
        at_start = descriptors_at_start(daemon)
        with worker() as parent, worker() as other:
            borrow(parent, daemon, 64 * MIB)
            child = parent.ask("fork_unseen()")
            try:
                parent.kill()
                until(lambda: daemon.books().unaccounted_bytes == 64 * MIB)
                books = daemon.books()
                assert (books.lent_bytes, books.releasing_bytes, books.free_bytes) == (0, 0, 256 * MIB)
                assert daemon.sessions() == []
                until(lambda: "proven=false" in daemon.log())
                assert daemon.figure("membroker_device_unproven_releases_total", location="device") == 1
                until(lambda: child in daemon.suspects())
                shown = processes(daemon)[child]
                assert (shown.used_bytes, shown.excess_bytes, list(shown.sessions)) == (64 * MIB, 64 * MIB, [])
                other.connect(daemon, "blue").do("model = client.model('n', virtual_capacity='1GiB')")
                other.do("pool = model.pool(page_size='2MiB')")
                for attempt in ("model.allocate('194MiB')", "pool.allocate(0, 194 * MIB)"):
                    refused = other.refused(attempt)
                    assert (refused.error, refused.reason) == ("OutOfMemory", "DEVICE_FULL")
                    assert refused.numbers[0] == "device"
                    assert "driver_says" not in refused.metadata, "the driver was asked for what the gate knew"
                    assert "unaccounted" in refused.message
                    until(lambda: daemon.books().lent_bytes == 0)
                    until(lambda: device_used(daemon) == 64 * MIB)
                other.do("buffer = model.allocate('192MiB')")
                assert other.refused("model.allocate(PAGE)").metadata["device_free_bytes"] == "0"
                until(lambda: daemon.books().unaccounted_bytes == 64 * MIB)  # as the next audit finds it
            finally:
                os.kill(child, signal.SIGKILL)
            until(lambda: daemon.books().unaccounted_bytes == 0)
            other.do("rest = model.allocate('64MiB')")
            other.kill()
            until_clean(daemon, at_start)


def test_the_librarys_fork_hook_gives_the_memory_back(daemon: Daemon) -> None:
    """A data loader is forked by Python: the library lets go in the child, which the parent does not feel."""
    at_start = descriptors_at_start(daemon)
    with worker() as parent:
        borrow(parent, daemon, 64 * MIB)
        child = parent.ask("fork_seen()")
        try:
            parent.do("pool.grow(2 * MIB)")
            assert parent.ask("bytes(pool.view(0, 4)).decode()") == "mine"
            assert states(daemon) == ["OPEN"]
            parent.kill()
            until_clean(daemon, at_start)
            assert not is_gone(child), "the child died: the test shows nothing"
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_worker_that_only_keeps_descriptors_is_charged_until_it_dies(daemon: Daemon) -> None:
    """It never imports, never maps and never acknowledges; it has the memory all the same, and pays for it."""
    at_start = descriptors_at_start(daemon)
    with raw_worker(daemon, "read the delivery") as keeper:
        keeper.do("raw.socket.close(); raw.notices.close()")
        until(lambda: states(daemon) == ["DETACHED"])
        until(lambda: device_used(daemon) == COUNT * PAGE)
        assert daemon.books().lent_bytes == COUNT * PAGE
        assert keeper.ask("len(raw.descriptors)") == COUNT
        keeper.kill()
        until_clean(daemon, at_start)


def test_a_descriptor_passed_to_another_process_keeps_the_charge(patient: Daemon) -> None:
    """A descriptor is a bearer capability: the borrower is dead, a process the broker never met holds its memory."""
    daemon = patient
    at_start = descriptors_at_start(daemon)
    with raw_worker(daemon, "acknowledged it") as borrower, worker() as stranger:
        borrower.do("kept = [raw.driver._handles[handle].descriptor for handle in raw.handles]")
        stranger.do(f"kept = [os.open(f'/proc/{borrower.pid}/fd/{{n}}', os.O_RDWR) for n in {borrower.ask('kept')}]")
        borrower.kill()
        until(lambda: daemon.books().releasing_bytes == COUNT * PAGE)
        stranger.do("os.close(kept.pop())")
        until(lambda: device_used(daemon) == (COUNT - 1) * PAGE)
        assert daemon.books().releasing_bytes == COUNT * PAGE, "credited before the last of it was gone"
        stranger.do("[os.close(one) for one in kept]")
        until_clean(daemon, at_start)
