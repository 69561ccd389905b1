"""`TorchMemory`: torch's own allocations, borrowed from the broker through a `torch.cuda.MemPool`.

Owns the routing of torch's allocations to a pool. It must never run Python under torch's allocator lock: a thread that
frees a tensor waits for that lock while it holds the GIL, so the two would deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ... import Model, Recall
from ...errors import ClosedError, InvalidRequest, MembrokerError
from ...ext import Closing
from .lending import TorchLending
from .mempool import Pool
from .package import torch
from .tensors import device_of


class TorchMemory(Closing):
    """Borrows what torch allocates on the GPU from `model`: a `torch.cuda.MemPool` without compiled code.

        with TorchMemory(model) as memory, memory.use():
            train()                            # forward, backward and optimizer, in every thread

    torch caches what it borrows, as always: an allocation from its cache costs the same as without a broker, and the
    broker sees segments of 2 MiB, of 20 MiB, or of large tensors. If the broker refuses, torch raises its own
    `torch.OutOfMemoryError`. The broker's error is in `last_denial`, and in a note on the exception.

    **On a refusal**, the segments that torch only caches are released, and the allocation is tried again, also while
    other threads allocate. `reclaimed_bytes` counts what refusals released, and `refusals` counts the allocations that
    failed even so. A refusal does not release a segment with a live tensor, however small the tensor is, nor a tensor
    that was used on a second stream (`record_stream`). During a graph capture it releases nothing. If not even 2 MiB
    were free at the beginning of the outermost block of `use`, a refusal releases nothing until `trim` is called.

    **Without a refusal, torch keeps its cache.** Until the first refusal or `trim` of a block,
    `torch.cuda.empty_cache()` releases none of it (3,000 of 3,000 MiB stayed, torch 2.11). `trim` releases every
    segment without a live tensor.

    **On a recall** (`Model.on_recall`), the segments that torch only caches are released as on a refusal, unless the
    program has a callback of its own for the model. It then calls `trim` between its steps.

    While allocations are routed, a tensor that was used on a second stream (`record_stream`) is reused only after the
    block, or after a `trim`. Capture graphs with `capture`, not with `torch.cuda.graph`.

    This class enables torch's setting `release_lock_on_cudamalloc` for the whole process, so torch calls the broker
    without holding its lock. What torch frees is found later, without a callback. torch's memory cannot be shared by
    `torch.multiprocessing`: make a segment from it (`publish_module`).

    Raises `InvalidRequest` without a GPU, without torch's CUDA, and if torch's `expandable_segments` or its backend
    `cudaMallocAsync` are set; `DeviceFailure`, and what `Model.on_recall` raises.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._device = _card_of(model)
        with torch.cuda.device(self._device):
            torch.cuda.init()
            _settle_allocator()
        self._lending = TorchLending(model, self._device.index, _segments_of_torch, self._empty)
        self._allocator = _allocator_over(self._lending)
        self._users = 0
        self._capturing = False
        self._closed = False
        self._pool: Pool | None = None
        self._retired: list[tuple[float, Pool]] = []
        self._graph_pools: list[Pool] = []
        callback = model.recall_callback
        if callback is None or isinstance(getattr(callback, "__self__", None), TorchMemory):
            model.on_recall(self._give_back)

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

    @property
    def refusals(self) -> int:
        """How often torch was refused memory even after everything that could be released was released."""
        return self._lending.refusals

    @property
    def reclaimed_bytes(self) -> int:
        """Bytes of torch's cache that refusals have released, in total."""
        return self._lending.reclaimed_bytes

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

        Each graph has its own memory. `trim` releases it once the graph is reset or garbage-collected and its tensors
        are gone. Allocations of other threads during the block are not borrowed, and recalls wait for its end
        (`Client.defer_recalls`). Raises the errors of `use`.
        """
        with self._model.defer_recalls(), _routing:
            self._check_open()
            self._graph_pools.append(Pool(self._device, self._allocator))
            with self._unrouted():
                self._capturing = True
                try:
                    with torch.cuda.graph(graph, pool=self._graph_pools[-1].id, **options):
                        yield
                finally:
                    self._capturing = False

    def trim(self) -> int:
        """Release all segments without a live tensor, and return how many bytes that was.

        Call it while no other thread allocates. If a tensor that was used on a second stream (`record_stream`) waits to
        be freed, allocations of other threads are not borrowed for a moment. The workspaces of cuBLAS and 2 MiB stay
        lent. After several blocks and trims within a second, 2 MiB stay lent for each. Waits for the work on the
        device, so do not call it during a graph capture. Raises `InvalidRequest` during a `capture`, and `ClosedError`.
        """
        with _routing:
            self._check_open()
            before = self._lending.released_bytes
            self._retire_graph_pools()
            done = False
            if self._users and self._pool is not None and self._pool.open():
                self._release()
                done = not _tensors_wait()
            if not done:
                with self._unrouted():
                    self._retire()
                    self._release()
            return self._lending.released_bytes - before

    def close(self) -> None:
        """Release all memory without a live tensor, and end. Idempotent: call it again when the last tensors are gone.

        Memory under a live tensor stays lent until then, and keeps the session. Raises `InvalidRequest` inside a block
        of `use` or `capture`.
        """
        with _routing:
            if self._users or self._capturing:
                raise InvalidRequest("this memory is in use: close it outside of the block")
            self._closed = True
            # Nothing is routed, so no allocation can begin. One that torch is finishing has all of `_release` for it.
            ended = self._lending.busy_since is None
            self._retire()
            self._retire_graph_pools()
            if not self._graph_pools:
                # torch never frees them itself. Not in `trim`: a graph, or a kernel of another thread, may use them.
                torch._C._cuda_clearCublasWorkspaces()
            self._release(ended)
        if self._model.recall_callback == self._give_back:
            with suppress(MembrokerError):
                self._model.on_recall(None)

    def _give_back(self, recall: Recall) -> None:
        """Release what torch only caches. It waits for the device, so it must not run during a `capture` of any memory.

        A capture holds `_routing`. If that takes half of the time for the answer, all is kept.
        """
        if recall.location != "device" or not _routing.acquire(timeout=max(0, recall.deadline - time.monotonic()) / 2):
            return
        try:
            self._lending.collect()
            if recall.remaining and self._empty():
                self._lending.collect()
        finally:
            _routing.release()

    def __repr__(self) -> str:
        return f"<membroker TorchMemory on {self._device}, {self.lent_bytes} bytes lent{', closed' * self._closed}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this memory is closed")
        if self._capturing:
            raise InvalidRequest("a graph is being captured: its memory stays as it is until the block ends")

    def _empty(self) -> bool:
        """Make torch free what it caches. Called in any thread, amid an allocation: it must not wait for `_routing`."""
        pool = self._pool
        if self._capturing:
            return False
        if pool is not None:
            pool.open()
        torch.cuda.empty_cache()
        return True

    # The pools. `_routing` is held.

    def _release(self, ended: bool = False) -> None:
        """Release the cached segments of all open pools. `ended`: no allocation is in progress."""
        quiet_since = self._lending.busy_since or time.monotonic()
        for entry in list(self._retired):
            if ended or entry[0] < quiet_since - _GRACE_SECONDS:
                entry[1].unpin()
                self._retired.remove(entry)
        self._lending.collect()
        torch.cuda.empty_cache()
        self._lending.collect(ended)

    def _retire(self) -> None:
        """Open the pool, which is not routed to, and forget it: the next routing gets a new one.

        A thread may still be amid an allocation from it, so it keeps its pin for a while: see `_GRACE_SECONDS`.
        """
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.retire()
            self._retired.append((time.monotonic(), pool))

    def _retire_graph_pools(self) -> None:
        ended = [pool for pool in self._graph_pools if not pool.in_a_graph]
        self._graph_pools = [pool for pool in self._graph_pools if pool not in ended]
        for pool in ended:
            pool.retire()

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
        if self._pool is None or not self._pool.route():
            self._retire()
            self._pool = Pool(self._device, self._allocator)
            self._pool.route()
        _in_use = self
        before = self._lending.last_denial
        if not self._pool.pin():
            self._lending.last_denial = before

    def _unroute(self) -> None:
        global _in_use
        assert self._pool is not None, "allocations are routed"
        self._pool.unroute()
        _in_use = None
        if self._pool.is_open:
            self._retire()
            self._release()


_routing = threading.RLock()
"""Held while routing changes: torch has one routing table for each GPU."""
_GRACE_SECONDS = 1.0
"""How long a retired pool is kept for a thread amid an allocation, which may wait for the interpreter's lock before and
for torch's lock after its call to us. The call itself is seen, and takes as long as it takes."""
_in_use: TorchMemory | None = None
_FOREVER: list[Any] = []
"""torch may call an allocator until the process ends."""


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


def _tensors_wait() -> bool:
    """Return whether torch has memory to free that it frees only while nothing is routed: see `record_stream`."""
    states = {block["state"] for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]}
    return not states <= {"active_allocated", "inactive"}


def _allocator_over(lending: TorchLending) -> Any:
    allocator = torch._C._cuda_customAllocator(lending.allocate_address, lending.free_address)
    _FOREVER.append((lending, allocator))
    return allocator
