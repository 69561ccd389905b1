"""One `torch.cuda.MemPool`: how it is routed to, and how torch is made to release what it caches of it.

Owns torch's use count of the pool. It must never destroy a MemPool: torch's destructor aborts the process unless the
count is 1 and no pool is routed to, and the garbage collector or another thread can run it at any time.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from .package import torch


class Pool:
    """A MemPool, which the process keeps for good (some hundred bytes of host memory), and its use count.

    torch counts one use for the object and one for the routing. `torch.cuda.empty_cache` releases cached segments only
    of a pool whose count is 0, and torch refuses to raise the count from 0. So `open` takes back both uses: torch still
    routes to an open pool, and releases its cached segments, but the pool cannot be routed to a second time.
    """

    def __init__(self, device: torch.device, allocator: Any) -> None:
        self._device = device
        self._mutex = threading.Lock()
        self._routed = False
        self._is_open = False
        self._pin = 0
        with torch.cuda.device(device):
            mempool = torch.cuda.MemPool(allocator)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mempool))
        self._mempool = mempool

    @property
    def id(self) -> tuple[int, int]:
        """torch's name of the pool."""
        found: tuple[int, int] = self._mempool.id
        return found

    @property
    def is_open(self) -> bool:
        """Whether torch may release its cached segments, and it cannot be routed to again."""
        return self._is_open

    @property
    def in_a_graph(self) -> bool:
        """Whether a CUDA graph uses this pool."""
        return int(self._mempool.use_count()) > 1

    def route(self) -> bool:
        """Let all allocations of the process go to this pool; return False for an open pool."""
        with self._mutex:
            if self._is_open:
                return False
            # Not `use_mem_pool`, which routes the calling thread only: a backward pass allocates in autograd's threads.
            torch._C._cuda_beginAllocateToPool(self._device.index, self.id)
            self._routed = True
            return True

    def unroute(self) -> None:
        """Undo `route`. The segments stay cached, for the next `route`, unless the pool is open."""
        with self._mutex:
            torch._C._cuda_endAllocateToPool(self._device.index, self.id)
            self._routed = False
            if not self._is_open:
                torch._C._cuda_releasePool(self._device.index, self.id)

    def pin(self) -> bool:
        """Allocate a byte that keeps torch's table of this pool; return False if there is no room for it.

        torch deletes the table when it releases the last segment of an open pool. A thread that is borrowing has
        released torch's lock in the middle of an allocation, and still uses the table; so does the routing. Call this
        while the pool is routed to, and no other routing can begin.
        """
        if not self._pin:
            try:
                self._pin = torch.cuda.caching_allocator_alloc(1, self._device)
            except torch.OutOfMemoryError:
                return False
        return True

    def unpin(self) -> None:
        """Free that byte. No thread may be amid an allocation from this pool, and nothing may be routed to it."""
        if self._pin:
            torch.cuda.caching_allocator_delete(self._pin)
            self._pin = 0

    def open(self) -> bool:
        """Let torch release cached segments of this pool from now on; return False for a pool that is not pinned."""
        with self._mutex:
            if not self._is_open and self._pin:
                self._open()
            return self._is_open

    def retire(self) -> None:
        """`open`, for a pool that is not routed to, and never will be: it needs no pin."""
        with self._mutex:
            if not self._is_open:
                self._open()

    def _open(self) -> None:
        for _ in range(1 + self._routed):
            torch._C._cuda_releasePool(self._device.index, self.id)
        self._is_open = True
