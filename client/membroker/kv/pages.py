"""`Pages`: where a KV cache has its memory, in the pages of one pool or of the pools of all ranks of an engine.

Owns the protocol through which a cache borrows and releases, and its implementation over one pool; `Ranks` is the other
one. It must never decide what is borrowed or released: an `ElasticCache` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from .. import InvalidRequest, VirtualMemoryPool
from ..types import SleepRequest, SleepStatus
from .engine import Fence

Range = tuple[int, int]
"""An offset and a size, in bytes."""


class Answering(Protocol):
    """What answers a broker and its operator: a `Model`, or the models of all ranks as one."""

    @property
    def resource_name(self) -> str:
        """The name of the model."""
        ...

    @property
    def recall_callback(self) -> Callable[[Any], object] | None:
        """What is called with each recall."""
        ...

    @property
    def sleep_callback(self) -> Callable[[SleepRequest], SleepStatus] | None:
        """What is called with each question of an operator."""
        ...

    def on_recall(self, callback: Callable[[Any], object] | None) -> None:
        """Call `callback` with each recall."""
        ...

    def on_sleep(self, callback: Callable[[SleepRequest], SleepStatus] | None) -> None:
        """Call `callback` with each question of an operator."""
        ...


class Pages(Protocol):
    """Addresses, and memory for some of their pages: a pool, or the pools of all ranks of an engine."""

    @property
    def base_address(self) -> int:
        """The address of offset 0."""
        ...

    @property
    def page_size(self) -> int:
        """The bytes of a page."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the pool is closed, or the connections to the ranks are."""
        ...

    @property
    def model(self) -> Answering | None:
        """What answers recalls of the memory, or None if no broker lends it."""
        ...

    def allocate_ranges(
        self, ranges: Sequence[Range], *, wait: float | None = None, ahead: bool = False, wanted_bytes: int = 0
    ) -> None:
        """Back those of the ranges that have no memory, all or none, as `VirtualMemoryPool.allocate_ranges` does."""
        ...

    def deallocate_ranges(self, ranges: Sequence[Range], *, after: Fence | None = None) -> None:
        """Release those of the ranges that have memory, as `VirtualMemoryPool.deallocate_ranges` does.

        A driver that failed may have unmapped some of them before.
        """
        ...

    def on_use(self, callback: Callable[[int], bool]) -> None:
        """Call `callback`, `Sleeper.keep_awake`, when another process of the engine begins or ends to use it."""
        ...


class PoolPages:
    """The pages of one pool. Raises `InvalidRequest` if the pool keeps spare pages, or borrows ahead by itself."""

    def __init__(self, pool: VirtualMemoryPool) -> None:
        if pool.spare_pages or pool.ahead:
            raise InvalidRequest("the pool of an elastic cache has no spare pages and borrows nothing ahead by itself")
        self.pool = pool
        self.page_size: int = pool.page_size

    @property
    def base_address(self) -> int:
        """The address of offset 0. Raises `ClosedError`."""
        return self.pool.base_address

    @property
    def closed(self) -> bool:
        """Whether the pool is closed."""
        return self.pool.closed

    @property
    def model(self) -> Answering | None:
        """The pool's model, or None if it has a source without a broker."""
        return cast("Answering", self.pool.lender) if hasattr(self.pool.lender, "on_recall") else None

    def allocate_ranges(
        self, ranges: Sequence[Range], *, timeout: float | None = None, ahead: bool = False, wanted_bytes: int = 0
    ) -> None:
        """Back those without memory, all or none. Raises what `VirtualMemoryPool.allocate_ranges` raises."""
        missing = [span for span in ranges if not self.pool.is_mapped(*span)]
        self.pool.allocate_ranges(missing, timeout=timeout, ahead=ahead, wanted_bytes=wanted_bytes)

    def free_ranges(self, ranges: Sequence[Range], *, after: Fence | None = None) -> None:
        """Release those with memory. Raises what `VirtualMemoryPool.free_ranges` raises."""
        self.pool.deallocate_ranges([span for span in ranges if self.pool.is_mapped(*span)], after=after)

    def on_use(self, callback: Callable[[int], bool]) -> None:
        """Do nothing: all of the engine is in this process, and its `Sleeper` is told directly."""


def pages_of(pool: VirtualMemoryPool | Pages) -> Pages:
    """Return a pool as `Pages`. Raises what `PoolPages` raises."""
    return PoolPages(pool) if isinstance(pool, VirtualMemoryPool) else pool
