"""`TorchMemory` over the host driver, and a model of torch's pools that fails where torch's C++ asserts.

The rules of the model are those of torch 2.11 and 2.13 (c10/cuda/CUDACachingAllocator.cpp). The real thing is in
tests/gpu/pytorch/test_mempool.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.sizes import MIB

import membroker
from membroker.session.recalls import OpenRecall
from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2

torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
memories = pytest.importorskip("membroker.adapters.torch.memory")
mempools = pytest.importorskip("membroker.adapters.torch.mempool")

pytestmark = pytest.mark.shared_daemon


@dataclass
class Table:
    """What torch has of one pool: the uses, and the size of each segment; those without a tensor are cached."""

    uses: int = 1
    segments: dict[int, int] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)


class Torch:
    """The part of torch that the adapter uses."""

    def __init__(self) -> None:
        self.allocate: Any = None
        self.tables: dict[tuple[int, int], Table] = {}
        self.routed: list[tuple[int, int]] = []
        self.OutOfMemoryError = torch.OutOfMemoryError
        self._C = SimpleNamespace(
            _cuda_beginAllocateToPool=self.begin,
            _cuda_endAllocateToPool=lambda _, pool: self.routed.remove(pool),
            _cuda_releasePool=self.release,
            _cuda_clearCublasWorkspaces=lambda: None,
        )
        self.cuda = SimpleNamespace(
            init=lambda: None,
            device=lambda _: nullcontext(),
            MemPool=self.pool,
            caching_allocator_alloc=lambda size, _: self.malloc(size),
            caching_allocator_delete=self.free,
            empty_cache=self.empty_cache,
            memory_snapshot=self.snapshot,
            graph=lambda *_, **__: nullcontext(),
        )

    def pool(self, _allocator: object) -> Any:
        name = (0, len(self.tables) + 1)
        self.tables[name] = Table()
        return SimpleNamespace(id=name, use_count=lambda: self.tables[name].uses)

    def begin(self, _device: int, pool: tuple[int, int]) -> None:
        assert self.tables[pool].uses > 0, "torch asserts this"
        self.tables[pool].uses += 1
        self.routed.append(pool)

    def release(self, _device: int, pool: tuple[int, int]) -> None:
        self.tables[pool].uses -= 1
        assert self.tables[pool].uses >= 0, "torch asserts this"

    def malloc(self, size: int) -> int:
        table = self.tables[self.routed[-1]]
        for address in table.cached:
            if table.segments[address] >= size:
                table.cached.remove(address)
                return address
        found = self.allocate(max(size, 2 * MIB), 0, None)
        if found is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert table in self.tables.values(), "torch would use a table that it has deleted"
        table.segments[found] = max(size, 2 * MIB)
        return int(found)

    def free(self, address: int) -> None:
        (table,) = (table for table in self.tables.values() if address in table.segments)
        table.cached.add(address)

    def empty_cache(self) -> None:
        for name, table in list(self.tables.items()):
            if table.uses == 0:
                for address in table.cached:
                    del table.segments[address]
                table.cached.clear()
                if not table.segments:
                    assert name not in self.routed, "torch asserts a table for each allocation"
                    del self.tables[name]

    def snapshot(self) -> list[dict[str, Any]]:
        blocks = [{"state": "active_allocated"}]
        return [{"address": at, "blocks": blocks} for table in self.tables.values() for at in table.segments]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    fake = Torch()
    for module in (memories, mempools):
        monkeypatch.setattr(module, "torch", fake)
    monkeypatch.setattr(memories, "_card_of", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(memories, "_settle_allocator", lambda: None)
    monkeypatch.setattr(memories, "_allocator_over", lambda _: None)
    return fake


@pytest.fixture
def memory(daemon: Daemon, fake: Torch) -> Iterator[Any]:
    """A TorchMemory with a limit of 16 MiB; at its end everything has come back."""
    with membroker.connect(daemon.endpoint()) as client:
        with memories.TorchMemory(client.model("torch", limit="16MiB")) as memory:
            function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
            fake.allocate = function(memory._lending.allocate_address)
            yield memory
        assert memory.lent_bytes == 0
        assert not fake.tables
        until(lambda: daemon.books().lent_bytes == 0)


def test_a_refusal_releases_the_cache(memory: Any, fake: Torch) -> None:
    """12 MiB are cached, and 8 are needed. Afterwards the block goes on, and so does the next one."""
    for _ in range(2):
        before = memory.reclaimed_bytes
        with memory.use():
            fake.free(fake.malloc(10 * MIB))
            address = fake.malloc(12 * MIB)
            assert memory.reclaimed_bytes - before == 10 * MIB
            fake.free(address)
            assert fake.malloc(12 * MIB) == address, "from the cache"
            fake.free(address)
        assert memory.lent_bytes <= 6 * MIB, "this pool cannot be routed to again, so it keeps no cache"
    assert memory.refusals == 0


def test_what_is_needed_is_refused(memory: Any, fake: Torch) -> None:
    """A refusal that nothing can help reaches the program, with the broker's sentence, and is counted."""
    addresses = []
    with memory.use():
        addresses.append(fake.malloc(10 * MIB))
    with pytest.raises(torch.OutOfMemoryError) as caught, memory.use():
        fake.malloc(8 * MIB)
    assert "may hold 16.0 MiB" in caught.value.__notes__[0]
    assert (memory.refusals, memory.reclaimed_bytes) == (1, 0)
    fake.free(addresses[0])


def recall(memory: Any, size: int, seconds: float = 30.0) -> None:
    """Call the memory's callback in another thread, as the library does, with a recall of this many bytes."""
    model = memory._model
    message = pb.Recall(recall_id=1, model=model.resource_name, location=resources_pb2.LOCATION_DEVICE, bytes=size)
    message.within.FromNanoseconds(int(seconds * 1e9))
    asked = model._shown(OpenRecall(model._recalls, message, model._session.connection))
    thread = threading.Thread(target=lambda: model.recall_callback(asked))
    thread.start()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()


def test_a_recall_releases_what_torch_caches(memory: Any, fake: Torch) -> None:
    """In a block and outside, beside a living tensor: the tensor stays, and torch allocates on."""
    with memory.use():
        tensor, cached = fake.malloc(4 * MIB), fake.malloc(6 * MIB)
        fake.free(cached)
        recall(memory, 6 * MIB)
        assert memory.lent_bytes <= 6 * MIB, "the tensor, and the byte that keeps torch's table"
        assert tensor in memory._lending._lent
        fake.free(fake.malloc(8 * MIB))
    fake.free(tensor)
    recall(memory, 16 * MIB)
    assert memory.lent_bytes <= 2 * MIB
    assert memory.refusals == 0


def test_a_recall_amid_a_capture_keeps_all(memory: Any, fake: Torch) -> None:
    """It would wait for the device, which ends the capture. The library itself calls nothing in the block, either."""
    with memory.use():
        fake.free(fake.malloc(6 * MIB))
        held = memory.lent_bytes
        with memory.capture(None):
            assert memory._model._session.reconnecting.notices._background._held_up
            recall(memory, 6 * MIB, 0.02)
            assert memory.lent_bytes == held
        assert not memory._model._session.reconnecting.notices._background._held_up
        recall(memory, 6 * MIB)
        assert memory.lent_bytes < held


def test_the_programs_own_callback_stays(daemon: Daemon, fake: Torch) -> None:
    """TorchMemory answers where nobody else does, and no longer than it is open."""
    with membroker.connect(daemon.endpoint()) as client:
        model = client.model("torch")
        with memories.TorchMemory(model) as first:
            assert model.recall_callback == first._give_back
            with memories.TorchMemory(model) as second:
                assert model.recall_callback == second._give_back
        assert model.recall_callback is None
        mine: list[object] = []
        model.on_recall(mine.append)
        with memories.TorchMemory(model):
            assert model.recall_callback == mine.append
        assert model.recall_callback == mine.append
