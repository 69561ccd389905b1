"""Offloaded pools on a real GPU: the GPU's memory becomes free, and every byte returns to its address."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.support.daemons import until
from tests.support.gpu import at_rest, borrow, enter, near, on_gpu, still_has, until_lendable, used
from tests.support.seeds import chosen_seed
from tests.support.sizes import GIB, MIB
from tests.support.workers import Worker, worker, workers

from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("gpu")]

State = Callable[[str, str], None]
CONFIG = {"capacity": 2 * GIB, "host_capacity": 3 * GIB, "settle_seconds": 2.0}


def fill(one: Worker, size: int) -> int:
    """Have a worker back and fill the first `size` bytes of its pool with random bytes; return their checksum."""
    seed = chosen_seed()
    one.do("from tests.support.gpu_offload import *")
    one.do(f"pool.allocate(0, {size}); fill_random(pool, driver, {size}, {seed})")
    return int(one.ask(f"sum_of(pool, driver, {size})"))


def rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / GIB:.1f} GiB/s"


@pytest.mark.parametrize(("page", "size"), [("64MiB", GIB + 64 * MIB), ("2MiB", 512 * MIB)])
def test_two_models_take_turns_in_the_same_memory(gpu: CudaDriver, transport: str, page: str, size: int) -> None:
    """While one is offloaded the other fills the whole capacity; then they swap. Bytes and addresses stay."""
    with on_gpu(gpu, {**CONFIG, "capacity": size}) as daemon, workers(2) as (first, second):
        for each in (first, second):
            enter(each, daemon, transport=transport, page=page, model=f"m{each.pid}")
        empty = at_rest(lambda: used(gpu))
        before = fill(first, size)
        address = first.ask("pool.base_address")
        full = at_rest(lambda: used(gpu))
        assert near(full - empty, size)
        assert second.refused("pool.allocate(0, 64 * MIB)").error == "OutOfMemory"
        assert first.ask("pool.offload()") == size
        assert near(at_rest(lambda: used(gpu)), empty)
        assert daemon.books().lent_bytes == 0
        assert daemon.device().locations[1].lent_bytes == size
        borrow(second, size)
        assert still_has(second, size)
        refused = first.refused("pool.restore()")
        assert (refused.error, refused.metadata["restored_bytes"]) == ("OutOfMemory", "0")
        half = 256 * MIB
        second.do(f"pool.free({half}, {size - half})")
        refused = first.refused("pool.restore()")
        restored, rest = (int(refused.metadata[f"{what}_bytes"]) for what in ("restored", "offloaded"))
        assert restored + rest == size
        assert restored >= size - half - 64 * MIB
        second.do(f"pool.free(0, {half})")
        assert first.ask("pool.restore()") == rest
        assert first.ask("pool.base_address") == address
        assert first.ask(f"sum_of(pool, driver, {size})") == before
        assert daemon.device().locations[1].lent_bytes == 0
        for each in (first, second):
            each.do("client.close()")
        until_lendable(daemon)


def test_work_is_waited_for_and_pointers_stay(gpu: CudaDriver) -> None:
    """Kernels still write when the pool is offloaded: after the restore their results are at the same pointers."""
    with on_gpu(gpu, CONFIG) as daemon, worker() as one:
        enter(one, daemon)
        if not one.ask("torch_on_the_gpu() is not None"):
            pytest.skip("torch is not installed here")
        one.do("from tests.support.gpu_offload import *; import torch")
        one.do("address = pool.allocate(0, 256 * MIB)")
        one.do("tensor = tensor_over(address, 64 * MIB, driver.device.ordinal); tensor.zero_()")
        one.do("for _ in range(400): tensor.add_(1)\npool.offload()")
        one.do("pool.restore()")
        assert one.ask("bool((tensor == 400).all())")
        one.do("tensor.add_(1)")
        assert one.ask("tensor.sum().item()") == 401 * 64 * MIB
        one.do("del tensor; client.close()")
        until_lendable(daemon)


def test_a_killed_workers_segment_wakes_in_another(gpu: CudaDriver, transport: str, state: State) -> None:
    """The bytes lie in extents of the host that the broker keeps: another process restores them to the GPU."""
    size = GIB // 2
    with on_gpu(gpu, CONFIG) as daemon, workers(2) as (first, second):
        for each in (first, second):
            enter(each, daemon, transport=transport)
        before = fill(first, size)
        first.do("segment = model.create_segment('sleeping', pool.offload_size(), 'host')")
        began = time.monotonic()
        first.do("pool.offload(to=segment)")
        there = size / (time.monotonic() - began)
        assert first.ask("segment.writable") is False
        first.kill()
        until(lambda: daemon.books().lent_bytes == 0 and daemon.books().releasing_bytes == 0)
        second.do("from tests.support.gpu_offload import *; segment = client.attach('sleeping')")
        began = time.monotonic()
        assert second.ask("pool.restore_from(segment)") == size
        back = size / (time.monotonic() - began)
        assert second.ask(f"sum_of(pool, driver, {size})") == before
        second.do("segment.delete(); segment.close(); client.close()")
        until_lendable(daemon)
        until(lambda: not any(books.lent_bytes + books.releasing_bytes for books in daemon.device().locations))
    state("512 MiB to a host segment, sealed, and from it into another worker", f"{rate(there)}, {rate(back)}")
