"""`TorchMemory`: torch's own allocations, borrowed from the broker through a `torch.cuda.MemPool`.

Owns which pool torch's allocations are routed to. It must never run Python under torch's allocator lock: a thread
that frees a tensor waits for that lock with the interpreter's lock in its hands, and two that wait for each other
stand still.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from membroker.adapters._torch import torch
from membroker.adapters._torch_lending import TorchLending
from membroker.adapters._torch_tensors import device_of
from membroker.closing import Closing
from membroker.errors import ClosedError, InvalidRequest, MembrokerError
from membroker.model import Model


class TorchMemory(Closing):
    """What torch allocates on the card, borrowed for `model`: a `torch.cuda.MemPool` without compiled code.

        with TorchMemory(model) as memory, memory.use():
            train()                            # forward, backward and optimizer, in every thread

    torch caches what it was lent, as always: an allocation from its cache costs the same as without a broker, and the
    broker sees segments of 2 MiB, of 20 MiB, or of large tensors. Where it lends no more, torch raises its own
    `torch.OutOfMemoryError`; `last_denial` is the broker's word for it, and a note on the exception.

    **A live MemPool gives nothing back.** `torch.cuda.empty_cache()` returns nothing of it, however much of it is
    free (3,000 of 3,000 MiB stayed, torch 2.11). `trim` exchanges the MemPool for a new one, and returns every segment
    in which no tensor lives; one small tensor keeps its whole segment. Nothing comes back by itself.

    What torch does while allocations are routed, as inside `torch.cuda.use_mem_pool`: it frees no cache and retries
    before it gives up, and a tensor that was used on a second stream (`record_stream`) is reused only after the
    block, or after a `trim`. Capture graphs with `capture`, not with `torch.cuda.graph`.

    The allocator runs with torch's setting `release_lock_on_cudamalloc`, which is set here for the whole process, and
    so it calls the broker with no lock of torch's held. What torch frees is noticed later, without a call back.
    Memory of torch cannot be shared by `torch.multiprocessing`: make a segment of it (`publish_module`).

    Raises `InvalidRequest` without a card, without torch's CUDA, and where torch's `expandable_segments` or its
    backend `cudaMallocAsync` are set; `DeviceFailure`.
    """

    def __init__(self, model: Model) -> None:
        self._device = _card_of(model)
        with torch.cuda.device(self._device):
            torch.cuda.init()
            _settle_allocator()
        self._lending = TorchLending(model, self._device.index, _segments_of_torch)
        self._allocator = _allocator_over(self._lending)
        self._users = 0
        self._routed = (0, 0)
        self._capturing = False
        self._closed = False
        self._pool = self._new_pool()
        self._graph_pools: list[Any] = []
        self._sentinel: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The card, as torch names it."""
        return self._device

    @property
    def lent(self) -> int:
        """Bytes that torch has from the broker now, its cache included."""
        return self._lending.lent

    @property
    def last_denial(self) -> MembrokerError | None:
        """Why torch was last refused memory, or None."""
        return self._lending.last_denial

    def owns(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor's bytes lie in memory of the broker."""
        storage = tensor.untyped_storage()
        return self._lending.owns(storage.data_ptr(), max(1, storage.nbytes()))

    @contextmanager
    def use(self) -> Iterator[TorchMemory]:
        """Let every thread's CUDA allocations come from the broker in this block, those of autograd's threads too.

        For the whole process: threads that know nothing of it are charged as well. It may be entered again, and by
        several threads. Raises `InvalidRequest` while another `TorchMemory` is in use, and `ClosedError`.
        """
        self._enter()
        try:
            yield self
        except torch.OutOfMemoryError as error:
            if self.last_denial is not None:
                error.add_note(f"membroker: {self.last_denial}")
            raise
        finally:
            with _routing:
                self._users -= 1
                if not self._users:
                    self._unroute()

    def _enter(self) -> None:
        global _in_use
        with _routing:
            self._check_open()
            if _in_use is not None and _in_use is not self:
                raise InvalidRequest("another TorchMemory is in use: torch routes to one pool at a time")
            if not self._users:
                self._route()
            self._users += 1

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
        """Capture a CUDA graph in this block, whose memory is the broker's too; `options` are `torch.cuda.graph`'s.

        Each graph has memory of its own, which `trim` returns once the graph is reset, or garbage, and its tensors
        are gone. What other threads allocate meanwhile is torch's own. Raises as `use`.
        """
        with _routing:
            self._check_open()
            self._graph_pools.append(self._new_pool())
            with self._unrouted():
                self._capturing = True
                try:
                    with torch.cuda.graph(graph, pool=self._graph_pools[-1].id, **options):
                        yield
                finally:
                    self._capturing = False

    def trim(self) -> int:
        """Give back all segments in which no tensor lives, and return how many bytes that was.

        Up to 4 MiB stay lent, and what cuBLAS keeps as its workspaces. Waits for the work on the device. A moment long
        the allocations of other threads are torch's own, so call it where they have none to make. Not for inside a
        `torch.cuda.use_mem_pool` or a capture of another's making: torch itself ends the process there. Raises
        `InvalidRequest` during a `capture`, and `ClosedError`.
        """
        with _routing:
            self._check_open()
            return self._exchange(self._new_pool())

    def close(self) -> None:
        """Give back what no tensor lives in, for good. Idempotent: call it again when the last tensors are gone.

        Memory under a tensor that lives stays lent until then, and the session with it. Raises `InvalidRequest` in a
        block of `use` or `capture`.
        """
        with _routing:
            if self._users or self._capturing:
                raise InvalidRequest("this memory is in use: close it outside of the block")
            self._closed = True
            self._exchange(None)

    def __repr__(self) -> str:
        return f"<membroker TorchMemory on {self._device}, {self.lent} bytes lent{', closed' * self._closed}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this memory is closed")
        if self._capturing:
            raise InvalidRequest("a graph is being captured: its memory stays as it is until the block ends")

    # The pools. `_routing` is held.

    def _exchange(self, pool: Any) -> int:
        """Put `pool` in the place of torch's pool, or nothing for good, and collect what torch lets go of."""
        sentinel = self._new_sentinel() if pool is not None else None
        with self._unrouted():
            # All that is in the old pool is seen to be there, so that it is missed afterwards.
            self._lending.collect()
            old, self._pool = [self._pool], pool
            if old[0] is not None:
                _drop(old.pop())
            self._sentinel = sentinel
            self._drop_graph_pools()
            if pool is None and not self._graph_pools:
                # torch keeps them for good. Not in `trim`: a graph, or another thread's kernel, may use them.
                torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        return self._lending.collect()

    def _new_sentinel(self) -> torch.Tensor | None:
        """Return a tensor in the pool that is about to go, so that torch keeps its table of the pool one trim longer.

        A thread that borrows just now has let go of torch's lock in the middle of an allocation, with that table in
        its hands. Where there is no room for a tensor there are others.
        """
        before = self._lending.last_denial
        try:
            with ExitStack() as stack:
                if not self._users:
                    stack.enter_context(torch.cuda.use_mem_pool(self._pool, self._device))
                return torch.empty(1, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            self._lending.last_denial = before
            return None

    def _drop_graph_pools(self) -> None:
        ended = [pool for pool in self._graph_pools if pool.use_count() <= 1]
        self._graph_pools = [pool for pool in self._graph_pools if pool not in ended]
        while ended:
            _drop(ended.pop())

    def _new_pool(self) -> Any:
        with torch.cuda.device(self._device):
            pool = torch.cuda.MemPool(self._allocator)
        # A pool that ends at a moment of the collector's, or the interpreter's, can end the process: see `_drop`.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        return pool

    @contextmanager
    def _unrouted(self) -> Iterator[None]:
        routed = self._users > 0
        if routed:
            self._unroute()
        try:
            yield
        finally:
            if routed:
                self._route()

    def _route(self) -> None:
        global _in_use
        # Not `use_mem_pool`, which routes the calling thread only: a backward pass allocates in threads of autograd's.
        torch._C._cuda_beginAllocateToPool(self._device.index, self._pool.id)
        self._routed = self._pool.id
        _in_use = self

    def _unroute(self) -> None:
        global _in_use
        torch._C._cuda_endAllocateToPool(self._device.index, self._routed)
        torch._C._cuda_releasePool(self._device.index, self._routed)
        _in_use = None


_routing = threading.RLock()
"""Held while allocations are routed anew: torch has one table of that for a card."""
_in_use: TorchMemory | None = None
_FOREVER: list[Any] = []
"""torch may call an allocator as long as the process lives."""


def _drop(pool: Any) -> None:
    """Let go of a MemPool. Nothing is routed: torch's destructor asserts that, and an assertion there ends the process.

    The caller keeps no reference, not even in a variable.
    """
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(pool))


def _card_of(model: Model) -> torch.device:
    info = model.driver.device
    if info.driver == "host":
        raise InvalidRequest(
            "torch's MemPool exists on a card only, and this broker lends the host twin's memory: "
            "make CPU tensors over it with tensor()"
        )
    if not torch.cuda.is_available():
        raise InvalidRequest("this PyTorch has no CUDA, or finds no card: the broker's is there")
    return device_of(info)


def _settle_allocator() -> None:
    """Let torch call its allocator with no lock held, or raise `InvalidRequest` where its settings forbid all this."""
    if torch.cuda.get_allocator_backend() != "native":
        raise InvalidRequest("torch runs with the backend cudaMallocAsync, which has no pools of others: leave it out")
    settings = _allocator_settings()
    if settings.get("expandable_segments"):
        raise InvalidRequest("torch runs with expandable_segments:True, which maps memory of its own: leave it out")
    if settings.get(_RELEASES_LOCK):
        return
    before = settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
    text = f"{before},{_RELEASES_LOCK}:True" if before else f"{_RELEASES_LOCK}:True"
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(text)
    else:
        torch.cuda.memory._set_allocator_settings(text)
    if not _allocator_settings().get(_RELEASES_LOCK):
        raise InvalidRequest(f"torch did not take {text}: set PYTORCH_CUDA_ALLOC_CONF={_RELEASES_LOCK}:True")


_RELEASES_LOCK = "release_lock_on_cudamalloc"


def _allocator_settings() -> dict[str, Any]:
    settings: dict[str, Any] = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return settings


def _segments_of_torch() -> set[int]:
    """Return the addresses of all segments that torch's allocator has now."""
    return {segment["address"] for segment in torch.cuda.memory_snapshot()}


def _allocator_over(lending: TorchLending) -> Any:
    allocator = torch._C._cuda_customAllocator(lending.allocate_address, lending.free_address)
    _FOREVER.append((lending, allocator))
    return allocator
