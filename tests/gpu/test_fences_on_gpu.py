"""Release after an event on a real GPU: it waits for the work that uses the pages, and for no other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.gpu_work import torch_on_the_gpu
from tests.support.sizes import GIB, MIB

from membroker import LocalSource, VirtualMemoryPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("gpu")]

PAGE = 64 * MIB
LAYERS = [(at * GIB, PAGE) for at in range(8)]


@pytest.fixture
def torch() -> Any:
    found = torch_on_the_gpu()
    if found is None:
        pytest.skip("PyTorch is not installed here, or sees no GPU")
    return found


@pytest.fixture
def pool() -> Iterator[VirtualMemoryPool]:
    with LocalSource(limit="8GiB") as source, VirtualMemoryPool(source, "16GiB", PAGE) as pool:
        yield pool


def tensor(pool: VirtualMemoryPool, shape: tuple[int, ...]) -> Any:
    from membroker.adapters.torch import address_tensor

    return address_tensor(pool, shape, "int32")


def test_a_tensor_without_a_page(torch: Any, pool: VirtualMemoryPool) -> None:
    """torch takes addresses of which nothing is mapped, and kernels use the pages that come later."""
    cache = tensor(pool, (8, GIB // 4))
    assert (cache.is_cuda, cache.data_ptr()) == (True, pool.base_address)
    pool.allocate_ranges(LAYERS)
    cache[:, : PAGE // 4] = torch.arange(8, device="cuda", dtype=torch.int32)[:, None]
    assert cache[:, PAGE // 4 - 1].tolist() == list(range(8))
    pool.free_ranges(LAYERS[4:], after=recorded(torch))
    assert cache[:4, 0].tolist() == [0, 1, 2, 3]
    pool.allocate_ranges(LAYERS[4:])
    assert cache[4:, : PAGE // 4].count_nonzero() == 0


def recorded(torch: Any) -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


def test_it_waits_for_the_event_alone(torch: Any, pool: VirtualMemoryPool) -> None:
    """Work on another stream takes long. The release returns when the event has passed, and not when that has."""
    cache = tensor(pool, (8, GIB // 4))
    pool.allocate_ranges(LAYERS)
    other, long = torch.cuda.Stream(), torch.cuda.Event()
    cache[0, : PAGE // 4].fill_(7)
    fence = recorded(torch)
    with torch.cuda.stream(other):
        torch.cuda._sleep(4_000_000_000)  # some seconds
        long.record()
    began = time.perf_counter()
    pool.free_ranges(LAYERS, after=fence)
    took = time.perf_counter() - began
    assert not long.query(), f"the release took {took:.3f} s, as long as the work of the other stream"
    torch.cuda.synchronize()


def test_graphs_replay_while_pages_come_and_go(torch: Any, pool: VirtualMemoryPool) -> None:
    """A graph that uses the first page is replayed all the time; another thread maps and releases the other pages."""
    cache = tensor(pool, (8, GIB // 4))
    pool.allocate_ranges(LAYERS[:1])
    cache[0, : PAGE // 4] = 0
    warm = cache[0, : PAGE // 4]
    warm.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        warm.add_(1)
    stop, turns = threading.Event(), [0]

    def change() -> None:
        while not stop.is_set():
            pool.allocate_ranges(LAYERS[1:])
            pool.free_ranges(LAYERS[1:], after=recorded(torch))
            turns[0] += 1

    thread = threading.Thread(target=change)
    thread.start()
    for _ in range(2000):
        graph.replay()
    torch.cuda.synchronize()
    stop.set()
    thread.join()
    assert warm.min().item() == warm.max().item() == 2001
    assert turns[0]
