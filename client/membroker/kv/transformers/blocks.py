"""The free blocks of a `PagedAttentionCache`, as transformers 5.17 has them: two lists in a block manager.

Owns no block: it moves block numbers between these lists and the balloon. Every layer has a tensor for its keys and one
for its values, and the block `n` lies at the same place of each. Two blocks behind those of the block manager are for
padding, and are always in use. The first is only read, and zero.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..capture import strided
from ..layout import Strided
from .requests import Store


class Blocks(Store):
    """The blocks of `cache`."""

    def __init__(self, cache: Any) -> None:
        count = int(cache.num_blocks)
        super().__init__(count + 2, (count, count + 1), cache.block_size)
        self._cache, self._lists = cache, cache._block_manager

    @staticmethod
    def is_kv_tensor(shape: tuple[int, ...], dtype: Any) -> bool:
        """Return whether transformers makes such a tensor for keys or values, while it makes its batch processor."""
        return len(shape) == 3 and bool(dtype.is_floating_point)

    def parts(self) -> list[Strided]:
        """Return where the blocks are in memory."""
        cache = self._cache
        shape = (self.count, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        return [part for one in (*cache.key_cache, *cache.value_cache) for part in strided(one.view(shape), 0)]

    def look(self) -> None:
        """Note which blocks no request uses now."""
        now = time.monotonic()
        self._free = set(self._lists._uninit_block_ids)
        self._cached = {block: self._cached.get(block, now) for block in self._lists._init_block_ids}

    def lacking(self, wanted: Iterable[tuple[str, int]]) -> int:
        """Return how many blocks requests lack in all. Each is an id and the tokens for which it wants room."""
        tables = self._cache.group_cache_managers
        missing = 0
        for request_id, tokens in wanted:
            has = max(len(one.block_table.get(request_id, ())) for one in tables)
            missing += int(self._cache.blocks_needed(max(0, (tokens + 1) // self.block_tokens + 1 - has), has))
        return missing

    def users(self, blocks: Collection[int]) -> list[str]:
        """Return the ids of the requests that use any of these blocks."""
        asked, tables = set(blocks), self._cache.group_cache_managers
        return list({name for one in tables for name, table in one.block_table.items() if asked.intersection(table)})

    def make_room(self, wanted: int) -> None:
        """Do nothing: cached contents give way by themselves when a request needs a block."""

    def can_evict(self) -> bool:
        """Return False, as for `make_room`."""
        return False

    def hold(self, blocks: Sequence[int]) -> None:
        """Take unused blocks out of the lists, with what is cached in them."""
        lists, held = self._lists, set(blocks)
        for block in held.intersection(self._cached):
            del lists._init_block_ids[block], self._cached[block]
            known = lists._id_to_block.pop(block)
            if lists._hash_to_id.get(known.hash) == block:
                del lists._hash_to_id[known.hash]
        lists._uninit_block_ids = deque(block for block in lists._uninit_block_ids if block not in held)
        super().hold(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Put blocks into the free list."""
        self._lists._uninit_block_ids.extend(blocks)
        super().release(blocks)
