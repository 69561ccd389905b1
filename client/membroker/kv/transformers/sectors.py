"""The free sectors of a `PagedAttentionCache`, as transformers 5.23 has them: one tensor, cut into sectors.

Owns no sector: it moves their numbers between transformers' pool and the balloon, for which a sector is a block. A
sector has the bytes of all layers side by side, and one kind of layers at a time cuts it into blocks of its own. The
first two sectors are for padding, and are always in use. The first is only read, and zero.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..layout import Strided
from .requests import Store


class Sectors(Store):
    """The sectors of `cache`."""

    def __init__(self, cache: Any) -> None:
        super().__init__(int(cache.num_sectors) + 2, (0, 1), cache.tokens_per_sector)
        self._cache, self._pool = cache, cache.pool
        self._allocators = list(cache.cache_allocators.values())

    @staticmethod
    def is_kv_tensor(shape: tuple[int, ...], dtype: Any) -> bool:
        """Return whether transformers makes such a tensor for keys or values, while it makes its batch processor."""
        return len(shape) == 1 and str(dtype) == "torch.uint8"

    def parts(self) -> list[Strided]:
        """Return where the sectors are in memory."""
        size = self._cache.bytes_per_sector
        return [Strided(self._cache.cache_tensor.data_ptr(), size, size)]

    def look(self) -> None:
        """Note which sectors no request uses now."""
        now, before = time.monotonic(), self._cached
        self._pool.try_to_free_sectors()
        self._free = set(self._pool.free_sectors)
        self._cached = {}
        for one in self._allocators:
            free = self._pool._free_blocks[one.index].trees
            for sector, cached in Counter(block // one.blocks_per_sector for block in one.ledger.cached_blocks).items():
                if cached + len(free.get(sector, ())) == one.blocks_per_sector:
                    self._cached[sector] = before.get(sector, now)

    def lacking(self, wanted: Iterable[tuple[str, int]]) -> int:
        """Return how many sectors requests lack in all. Each is an id and the tokens for which it wants room."""
        asked, missing = list(wanted), 0
        for one in self._allocators:
            blocks = sum(one.needs_new_blocks(request_id, 0, tokens) for request_id, tokens in asked)
            missing += -(-max(0, blocks - self._pool.count_free_blocks(one.index)) // one.blocks_per_sector)
        return missing

    def users(self, blocks: Collection[int]) -> list[str]:
        """Return the ids of the requests that use any of these sectors."""
        asked = set(blocks)
        return list(
            {
                name
                for one in self._allocators
                for name, table in one.block_table.items()
                if any(block // one.blocks_per_sector in asked for block in table)
            }
        )

    def can_evict(self) -> bool:
        """Return whether anything is cached: transformers evicts all of it at a time."""
        return any(one.ledger.cached_blocks for one in self._allocators)

    def hold(self, blocks: Sequence[int]) -> None:
        """Take unused sectors out of the free ones, with what is cached in them."""
        held = set(blocks)
        self._evict(held.intersection(self._cached))
        self._pool.free_sectors = [sector for sector in self._pool.free_sectors if sector not in held]
        super().hold(blocks)

    def make_room(self, wanted: int) -> None:
        """Evict cached contents until so many sectors are free: the coldest, and of a prompt its end first.

        transformers by itself evicts all of them at a time.
        """
        missing = wanted - len(self._free)
        if missing > 0:
            order = {sector: (since, -number) for number, (sector, since) in enumerate(self._cached.items())}
            self._evict(sorted(order, key=order.__getitem__)[:missing])

    def _evict(self, sectors: Collection[int]) -> None:
        """Forget what is cached in these unused sectors, which are free then."""
        for one in self._allocators:
            per, ledger = one.blocks_per_sector, one.ledger
            among = (block for sector in sectors for block in range(sector * per, (sector + 1) * per))
            gone = [block for block in among if block in ledger.cached_blocks]
            for block in gone:
                del ledger.cached_blocks[block]
                del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
            self._pool.free_blocks(one.index, gone)
        self._pool.try_to_free_sectors()
        for sector in sectors:
            del self._cached[sector]
        self._free.update(sectors)

    def release(self, blocks: Sequence[int]) -> None:
        """Put sectors among the free ones. transformers takes the last one of the list first: the lowest."""
        self._pool.free_sectors.extend(blocks)
        self._pool.free_sectors.sort(reverse=True)
        super().release(blocks)
