"""The source without a broker: its memory, its limits, and its end."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.driver_errors import named
from tests.support.fake_lender import PAGE, FlakyDriver, put, text
from tests.support.garbage import collect, without_collections
from tests.support.host_driver import used
from tests.support.processes import descriptors, threads_of_library
from tests.support.sizes import MIB
from tests.support.threads import together

from membroker import LocalSource, VirtualMemoryPool
from membroker.errors import AlreadyMapped, ClosedError, DeviceFailure, InvalidRequest, OutOfMemory
from membroker.memory import lifetime
from membroker.memory.buffer import Buffer
from membroker.vmm import Location


def test_an_elastic_pool_without_a_broker() -> None:
    """A library's user: a source, a pool, a gigabyte of addresses, memory as it is needed. Nothing else runs."""
    threads, before = threads_of_library(), descriptors()
    with LocalSource("host") as source, VirtualMemoryPool(source, "64GiB", page_size="2MiB") as pool:
        assert pool.allocate(0, "8MiB") == pool.base_address
        put(pool, 3, b"hello")
        assert (source.physical_usage_bytes, source.limit) == (8 * MIB, None)
        assert source.driver.memory(Location.DEVICE).used == 8 * MIB
        pool.free(0, "6MiB")
        assert source.physical_usage_bytes == source.driver.memory(Location.DEVICE).used == 2 * MIB
        pool.compact()
        assert text(pool, 0, 5) == b"hello"
        assert "host memory" in repr(source)
    assert threads_of_library() <= threads
    assert descriptors() == before
    assert "closed" in repr(source)


def test_a_limit_is_kept(driver: FlakyDriver) -> None:
    """Two pools and a buffer of one source: together no more than its limit, refused with the numbers."""
    with LocalSource(driver, limit="16MiB") as source:
        first, second = (VirtualMemoryPool(source, 64 * PAGE, PAGE) for _ in range(2))
        first.allocate(0, 5 * PAGE)
        buffer = Buffer(source, PAGE + 1)
        with pytest.raises(OutOfMemory) as refused:
            second.allocate(0, 2 * PAGE)
        error = refused.value
        assert (error.level, error.limit_bytes) == ("capacity", 16 * MIB)
        assert (error.requested_bytes, error.available_bytes) == (2 * PAGE, PAGE)
        assert second.stats().mapped_pages == 0
        second.allocate(0, PAGE)
        assert source.physical_usage_bytes == used(driver) == 16 * MIB
        buffer.close()
        second.allocate(PAGE, 2 * PAGE)


def test_the_host_has_a_limit_of_its_own(driver: FlakyDriver) -> None:
    with LocalSource(driver, limit=0, host_limit=PAGE) as source:
        with VirtualMemoryPool(source, 4 * PAGE, PAGE, "host") as pool:
            pool.allocate(0, PAGE)
            assert used(driver, Location.HOST) == PAGE
            with pytest.raises(OutOfMemory):
                pool.allocate(PAGE, PAGE)
        for _ in range(2):  # what a pool copies to the host counts until it is restored
            source.charge(PAGE, Location.HOST)
            with pytest.raises(OutOfMemory):
                source.charge(1, Location.HOST)
            source.credit(PAGE, Location.HOST)


def test_a_full_device(driver: FlakyDriver) -> None:
    """Strangers fill the card in the middle of a growth: nothing of it stays, and the error says what there was."""
    with LocalSource(driver) as source, VirtualMemoryPool(source, "32GiB", PAGE) as pool:
        pool.allocate(0, 10 * PAGE)
        driver.stranger_bytes = 16 * (1 << 30) - 100 * PAGE  # 90 pages are left
        with pytest.raises(OutOfMemory) as refused:
            pool.allocate(10 * PAGE, 200 * PAGE)
        error = refused.value
        assert (error.level, error.reason, error.limit_bytes) == ("device", "DEVICE_FULL", None)
        assert (error.requested_bytes, error.available_bytes) == (200 * PAGE, 90 * PAGE)
        assert pool.stats().mapped_pages == 10
        assert source.physical_usage_bytes == 10 * PAGE
        pool.allocate(10 * PAGE, 90 * PAGE)
        driver.stranger_bytes = 0


@pytest.mark.parametrize("mappings", [1, 70])
def test_the_driver_fails_at_map_k(driver: FlakyDriver, mappings: int) -> None:
    """In the first packet of extents, or in the second: no descriptor is left, and nothing is charged."""
    with LocalSource(driver) as source, VirtualMemoryPool(source, 256 * PAGE, PAGE) as pool:
        opened = descriptors()
        driver.maps_left = mappings
        with pytest.raises(DeviceFailure, check=named("ENOMEM")):
            pool.allocate(0, 100 * PAGE)
        assert (source.physical_usage_bytes, used(driver), descriptors()) == (0, 0, opened)


@pytest.mark.parametrize(("device", "limit"), [("tpu", None), *(("host", limit) for limit in (-1, "much", 1.5, 2**63))])
def test_arguments_that_are_none(device: str, limit: Any) -> None:
    with pytest.raises(InvalidRequest):
        LocalSource(device, limit=limit)


class TestEnd:
    def test_close_ends_what_is_held(self, driver: FlakyDriver) -> None:
        source = LocalSource(driver)
        pool = VirtualMemoryPool(source, 64 * PAGE, PAGE, spare_pages=2)
        pool.allocate(0, 3 * PAGE)
        buffer = Buffer(source, PAGE)
        source.close()
        source.close()
        assert (source.closed, pool.closed, buffer.closed, used(driver)) == (True, True, True, 0)
        for call in (
            lambda: Buffer(source, 1),
            lambda: VirtualMemoryPool(source, PAGE, PAGE),
            lambda: source.borrow(PAGE, 1, Location.DEVICE, None),
        ):
            with pytest.raises(ClosedError):
                call()
        driver.release(driver.create(PAGE))  # it stays the caller's

    def test_a_view_keeps_its_memory(self, driver: FlakyDriver) -> None:
        """Results are read after the end of the program's work; the last view's end is the source's."""
        threads = threads_of_library()
        source = LocalSource(driver)
        pool = VirtualMemoryPool(source, 64 * PAGE, PAGE)
        pool.allocate(0, PAGE)
        view = pool.view(0, 5)
        view[:] = b"hello"
        source.close()
        with pytest.raises(ClosedError):
            VirtualMemoryPool(source, PAGE, PAGE)
        assert bytes(view) == b"hello"
        assert used(driver) == PAGE
        del view
        until(lambda: used(driver) == 0)
        until(lambda: threads_of_library() <= threads)

    def test_what_is_forgotten_is_given_back(self, driver: FlakyDriver) -> None:
        """Nobody closes anything: the pool goes with the garbage, and then the source, its thread and its driver."""
        threads = threads_of_library()
        source = LocalSource(driver)
        pool = VirtualMemoryPool(source, 64 * PAGE, PAGE)
        pool.allocate(0, 3 * PAGE)
        del pool
        collect()
        gone = weakref.ref(source)
        until(lambda: used(driver) == gone().physical_usage_bytes == 0)
        del source
        collect()
        until(lambda: gone() is None)
        until(lambda: threads_of_library() <= threads)

    def test_a_finalizer_leaves_the_end_to_the_thread(
        self, driver: FlakyDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may have interrupted a call that has the locks. So the `close` in it returns at once."""
        me = threading.get_ident()
        monkeypatch.setattr(lifetime, "in_a_finalizer", lambda: threading.get_ident() == me)
        with LocalSource(driver) as source:
            buffer = Buffer(source, PAGE)
            buffer.close()
            until(lambda: source.physical_usage_bytes == used(driver) == 0)

    def test_at_exit_and_in_a_forked_child(self) -> None:
        """The child's copies raise, and its parent's memory is not kept by it; the parent ends without closing."""
        script = """
import os, sys, membroker
from membroker.vmm import Location
source = membroker.LocalSource("host")
pool = membroker.VirtualMemoryPool(source, "1GiB", "2MiB", spare_pages=1)
pool.allocate(0, "8MiB")
pool.free(0, "2MiB")
view = pool.view(2 << 20, 5); view[:] = b"hello"
shared = membroker.SharedMemoryPool(source, page_size="2MiB")
shared.register_model("m", "4MiB")
source._lock.acquire(), shared._lock.acquire()  # as threads of the parent may have them
child = os.fork()
if child:
    source._lock.release(), shared._lock.release()
else:
    for call in (lambda: pool.allocate(0, 1), lambda: pool.compact(), pool.trim, pool.mappings, pool.stats,
                 lambda: pool.protect(4 << 20, 1, "read"), lambda: pool.shrink(1), lambda: pool.allocate_anywhere(1),
                 lambda: pool.pin(4 << 20, 1).__enter__(), lambda: membroker.VirtualMemoryPool(source, 1, "2MiB"),
                 lambda: shared.allocate_for_model("m", 1), lambda: shared.register_model("n", "2MiB"),
                 lambda: shared.unregister_model("m"), lambda: shared.get_model_stats("m")):
        try:
            call()
        except membroker.ClosedError as error:
            assert "forked" in str(error) or "another process" in str(error), error
        else:
            sys.exit(1)
    pool.close(); shared.close(); source.close()
    with open("/proc/self/maps") as maps:
        assert "membroker-extent" not in maps.read()
    own = membroker.LocalSource("host")
    with membroker.VirtualMemoryPool(own, "1GiB", "2MiB") as another:
        another.allocate(0, 1)
    own.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert bytes(view) == b"hello"
del view
pool.compact()
assert source.driver.memory(Location.DEVICE).used == 6 << 20
print("done")
"""
        command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_refused_call_keeps_no_pool(driver: FlakyDriver) -> None:
    """The main thread drops a pool that could not be offloaded: its memory goes at once, without a collection."""
    with LocalSource(driver, host_limit=PAGE) as source, without_collections():
        pool = VirtualMemoryPool(source, 8 * PAGE, PAGE)
        pool.allocate(0, 2 * PAGE)
        with suppress(OutOfMemory):
            pool.offload()
        del pool
        until(lambda: source.physical_usage_bytes == 0)


def test_many_threads_share_a_limit(driver: FlakyDriver) -> None:
    """Eight threads churn pages of one source: never above the limit, and all of it is back at the end."""
    refusals = [0]
    with LocalSource(driver, limit=6 * PAGE) as source, VirtualMemoryPool(source, 64 * PAGE, PAGE) as pool:

        def churn() -> None:
            for _ in range(100):
                assert source.physical_usage_bytes <= 6 * PAGE
                try:
                    address = pool.allocate_anywhere(2 * PAGE)
                except OutOfMemory:
                    refusals[0] += 1
                    continue
                pool.free(address - pool.base_address, 2 * PAGE)

        together([churn] * 8)
        assert source.physical_usage_bytes == used(driver) == 0
        with suppress(AlreadyMapped):
            pool.allocate(0, 6 * PAGE)
        assert pool.stats().mapped_pages == 6
