"""`TorchMemory`: torch's own allocations, borrowed from the broker through a `torch.cuda.MemPool`.

Owns the routing of torch's allocations to a pool. It must never run Python under torch's allocator lock: a thread that
frees a tensor waits for that lock while it holds the GIL, so the two would deadlock.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...closing import Closing
from ...deprecated import renamed
from ...errors import ClosedError, InvalidRequest, MembrokerError
from ...model import Model
from .lending import TorchLending
from .package import torch
from .tensors import device_of


@renamed("lent")
class TorchMemory(Closing):
    """Borrows what torch allocates on the GPU from `model`: a `torch.cuda.MemPool` without compiled code.

        with TorchMemory(model) as memory, memory.use():
            train()                            # forward, backward and optimizer, in every thread

    torch caches what it borrows, as always: an allocation from its cache costs the same as without a broker, and the
    broker sees segments of 2 MiB, of 20 MiB, or of large tensors. If the broker refuses, torch raises its own
    `torch.OutOfMemoryError`. The broker's error is in `last_denial`, and in a note on the exception.

    **A live MemPool releases nothing.** `torch.cuda.empty_cache()` does not release it, however much of it is free
    (3,000 of 3,000 MiB stayed, torch 2.11). `trim` replaces the MemPool by a new one, and releases every segment
    without a live tensor; one small tensor keeps its whole segment. Without a `trim`, nothing is released.

    While allocations are routed, torch behaves as inside `torch.cuda.use_mem_pool`: it does not free its cache and
    retry before it gives up, and a tensor that was used on a second stream (`record_stream`) is reused only after the
    block, or after a `trim`. Capture graphs with `capture`, not with `torch.cuda.graph`.

    This class enables torch's setting `release_lock_on_cudamalloc` for the whole process, so torch calls the broker
    without holding its lock. What torch frees is found later, without a callback. torch's memory cannot be shared by
    `torch.multiprocessing`: make a segment from it (`publish_module`).

    Raises `InvalidRequest` without a GPU, without torch's CUDA, and if torch's `expandable_segments` or its backend
    `cudaMallocAsync` are set; `DeviceFailure`.
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
        """The GPU, as a torch device."""
        return self._device

    @property
    def lent_bytes(self) -> int:
        """Bytes that torch has borrowed now, including its cache."""
        return self._lending.lent

    @property
    def last_denial(self) -> MembrokerError | None:
        """Why torch was last refused memory, or None."""
        return self._lending.last_denial

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's bytes lie in borrowed memory."""
        storage = tensor.untyped_storage()
        return self._lending.owns(storage.data_ptr(), max(1, storage.nbytes()))

    @contextmanager
    def use(self) -> Iterator[TorchMemory]:
        """Borrow every thread's CUDA allocations from the broker in this block, including those of autograd's threads.

        This holds for the whole process: allocations of unrelated threads are charged too. The block may be nested, and
        entered by several threads. Raises `InvalidRequest` while another `TorchMemory` is in use, and `ClosedError`.
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
        """Capture a CUDA graph in this block, with borrowed memory; `options` are those of `torch.cuda.graph`.

        Each graph has its own memory, which `trim` releases once the graph is reset or garbage, and its tensors are
        gone. Allocations of other threads during the block are not borrowed. Raises the errors of `use`.
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
        """Release all segments without a live tensor, and return how many bytes that was.

        Up to 4 MiB stay lent, and the workspaces of cuBLAS. Waits for the work on the device. For a moment, allocations
        of other threads are not borrowed, so call it while they make none. Do not call it inside
        `torch.cuda.use_mem_pool` or a graph capture that was not started by `capture`: torch aborts the process there.
        Raises `InvalidRequest` during a `capture`, and `ClosedError`.
        """
        with _routing:
            self._check_open()
            return self._exchange(self._new_pool())

    def close(self) -> None:
        """Release all memory without a live tensor, and end. Idempotent: call it again when the last tensors are gone.

        Memory under a live tensor stays lent until then, and keeps the session. Raises `InvalidRequest` inside a block
        of `use` or `capture`.
        """
        with _routing:
            if self._users or self._capturing:
                raise InvalidRequest("this memory is in use: close it outside of the block")
            self._closed = True
            self._exchange(None)

    def __repr__(self) -> str:
        return f"<membroker TorchMemory on {self._device}, {self.lent_bytes} bytes lent{', closed' * self._closed}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this memory is closed")
        if self._capturing:
            raise InvalidRequest("a graph is being captured: its memory stays as it is until the block ends")

    # The pools. `_routing` is held.

    def _exchange(self, pool: Any) -> int:
        """Replace torch's pool by `pool` (None: by nothing, at the end), and collect what torch frees."""
        sentinel = self._new_sentinel() if pool is not None else None
        with self._unrouted():
            # Mark everything in the old pool as seen, so that the last `collect` notices what is gone.
            self._lending.collect()
            old, self._pool = [self._pool], pool
            if old[0] is not None:
                _drop(old.pop())
            self._sentinel = sentinel
            self._drop_graph_pools()
            if pool is None and not self._graph_pools:
                # torch never frees them itself. Not in `trim`: a graph, or a kernel of another thread, may use them.
                torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        return self._lending.collect()

    def _new_sentinel(self) -> torch.Tensor | None:
        """Return a tensor in the old pool, so that torch keeps its table of that pool one trim longer.

        A thread that is borrowing has released torch's lock in the middle of an allocation, and still uses that table.
        If there is no room for this tensor, other tensors keep the table.
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
        # Destroying a pool in the garbage collector, or at interpreter exit, can abort the process: see `_drop`.
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
        # Not `use_mem_pool`, which routes the calling thread only: a backward pass allocates in autograd's threads.
        torch._C._cuda_beginAllocateToPool(self._device.index, self._pool.id)
        self._routed = self._pool.id
        _in_use = self

    def _unroute(self) -> None:
        global _in_use
        torch._C._cuda_endAllocateToPool(self._device.index, self._routed)
        torch._C._cuda_releasePool(self._device.index, self._routed)
        _in_use = None


_routing = threading.RLock()
"""Held while routing changes: torch has one routing table for each GPU."""
_in_use: TorchMemory | None = None
_FOREVER: list[Any] = []
"""torch may call an allocator until the process ends."""


def _drop(pool: Any) -> None:
    """Destroy a MemPool. It must not be routed to: torch's destructor asserts that, and aborts the process.

    The caller must keep no reference, not even in a variable.
    """
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(pool))


def _card_of(model: Model) -> torch.device:
    info = model.driver.device
    if info.driver == "host":
        raise InvalidRequest(
            "torch's MemPool needs a GPU, and this broker lends memory of the host driver: "
            "make CPU tensors over it with tensor()"
        )
    if not torch.cuda.is_available():
        raise InvalidRequest("this PyTorch has no CUDA, or finds no GPU, although the broker has one")
    return device_of(info)


def _settle_allocator() -> None:
    """Make torch call its allocator without a lock. Raises `InvalidRequest` if torch's settings prevent that."""
    if torch.cuda.get_allocator_backend() != "native":
        raise InvalidRequest(
            "torch uses the backend cudaMallocAsync, which supports no custom pools: remove that setting"
        )
    settings = _allocator_settings()
    if settings.get("expandable_segments"):
        raise InvalidRequest("torch uses expandable_segments:True, which maps its own memory: remove that setting")
    if settings.get(_RELEASES_LOCK):
        return
    before = settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
    text = f"{before},{_RELEASES_LOCK}:True" if before else f"{_RELEASES_LOCK}:True"
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(text)
    else:
        torch.cuda.memory._set_allocator_settings(text)
    if not _allocator_settings().get(_RELEASES_LOCK):
        raise InvalidRequest(f"torch did not accept {text}: set PYTORCH_CUDA_ALLOC_CONF={_RELEASES_LOCK}:True")


_RELEASES_LOCK = "release_lock_on_cudamalloc"


def _allocator_settings() -> dict[str, Any]:
    settings: dict[str, Any] = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return settings


def _segments_of_torch() -> set[int]:
    """Return the addresses of all current segments of torch's allocator."""
    return {segment["address"] for segment in torch.cuda.memory_snapshot()}


def _allocator_over(lending: TorchLending) -> Any:
    allocator = torch._C._cuda_customAllocator(lending.allocate_address, lending.free_address)
    _FOREVER.append((lending, allocator))
    return allocator
