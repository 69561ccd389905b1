"""`PoolPages`: where a KV cache has its memory, in the pages of one pool. `Ranks` has the pages of several.

It must never decide what is borrowed or released: an `ElasticCache` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from .. import InvalidRequest, Model, VirtualMemoryPool
from .engine import Over

Range = tuple[int, int]
"""An offset and a size, in bytes."""


class PoolPages:
    """The pages of one pool. Raises `InvalidRequest` if the pool keeps spare pages, or borrows ahead by itself."""

    def __init__(self, pool: VirtualMemoryPool) -> None:
        if pool.spare_pages or pool.ahead:
            raise InvalidRequest("the pool of an elastic cache has no spare pages and borrows nothing ahead by itself")
        self.pool = pool
        self.page_size: int = pool.page_size
        self.base_address: int = pool.base_address
        """The address of offset 0."""

    @property
    def closed(self) -> bool:
        """Whether the pool is closed."""
        return self.pool.closed

    @property
    def model(self) -> Model | None:
        """The pool's model, which answers recalls, or None if it has a source without a broker."""
        return cast("Model", self.pool.lender) if hasattr(self.pool.lender, "on_recall") else None

    def allocate_ranges(
        self, ranges: Sequence[Range], *, timeout: float | None = None, ahead: bool = False, wanted_bytes: int = 0
    ) -> None:
        """Back those without memory, all or none. Raises what `VirtualMemoryPool.allocate_ranges` raises."""
        missing = [span for span in ranges if not self.pool.is_mapped(*span)]
        self.pool.allocate_ranges(missing, timeout=timeout, ahead=ahead, wanted_bytes=wanted_bytes)

    def free_ranges(self, ranges: Sequence[Range], *, is_over: bool = False) -> None:
        """Release those with memory: a driver that failed may have unmapped some of them before.

        Waits for the device, unless all work that may use them is over. Raises what `VirtualMemoryPool.free_ranges`
        raises.
        """
        mapped = [span for span in ranges if self.pool.is_mapped(*span)]
        self.pool.free_ranges(mapped, after=Over() if is_over else None)
