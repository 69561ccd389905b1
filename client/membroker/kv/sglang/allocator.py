"""SGLang's allocator of pages, whose free list has only pages with memory.

Owns which pages are free and which are held. SGLang's own allocator keeps its free list on the GPU; this one keeps it
on the host, and hands the lowest free pages to SGLang's kernels. So it is packed, and others can ask what is free
without waiting for the GPU. Only a free waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages


class Allocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """An allocator in place of `plain`. All of its pages are held, but page 0, which SGLang uses for padding."""

    def __init__(self, plain: PagedTokenToKVPoolAllocator) -> None:
        self.pages: int = plain.size // plain.page_size + 1
        """Page 0 included."""
        self._held = numpy.ones(self.pages, bool)
        self._held[0] = False
        self._free = numpy.zeros(self.pages, bool)
        self.held_count: int = self.pages - 1
        self.free_count: int = 0
        kvcache = plain.get_kvcache()
        super().__init__(plain.size, plain.page_size, plain.dtype, plain.device, kvcache, plain.need_sort)

    # What the cache asks and tells

    def is_free(self, pages: Any) -> Any:
        """Return an array that says for each page of an array whether it is free."""
        return self._free[pages]

    def lowest_free(self, count: int) -> Any:
        """Return the lowest free pages, at most so many: those that are used next."""
        return numpy.flatnonzero(self._free)[:count]

    def hold(self, pages: Sequence[int]) -> None:
        """Take pages that nothing uses out of the free list."""
        asked = numpy.asarray(pages, int)
        assert (self._free | self._held)[asked].all(), "a page that is in use cannot be held"
        self._free[asked], self._held[asked] = False, True
        self._count()

    def release(self, pages: Sequence[int]) -> None:
        """Put held pages into the free list."""
        asked = numpy.asarray(pages, int)
        assert self._held[asked].all(), "only a held page can be released"
        self._free[asked], self._held[asked] = True, False
        self._count()

    # What SGLang calls

    def available_size(self) -> int:
        """Return the number of free tokens."""
        return self.free_count * int(self.page_size)

    def alloc(self, need_size: int) -> Any:
        """Allocate whole pages for so many tokens."""
        return self._with_pages(need_size // self.page_size, super().alloc, need_size)

    def alloc_extend(
        self,
        prefix_lens: Any,
        prefix_lens_cpu: Any,
        seq_lens: Any,
        seq_lens_cpu: Any,
        last_loc: Any,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Any:
        """Allocate for the prompts of a batch."""
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        given = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
        return self._with_pages(num_new_pages, super().alloc_extend, *given)

    def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
        """Allocate for the next token of each request of a batch."""
        count = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        return self._with_pages(count, super().alloc_decode, seq_lens, seq_lens_cpu, last_loc)

    def get_all_free_pages(self) -> Any:
        """Return the numbers of all free pages, for SGLang's own checks."""
        return torch.from_numpy(self.lowest_free(self.pages)).to(self.device)

    def clear(self) -> None:
        """Free all pages that are not held."""
        super().clear()
        self._free = ~self._held
        self._free[0] = False
        self._count()

    def _release_page_ids(self, *page_ids: Any) -> None:
        """Put pages that were in use into the free list: every way to free leads here."""
        pages = torch.cat(page_ids).cpu().numpy()
        assert not self._held[pages].any(), "a page without memory was in use"
        self._free[pages] = True
        self._count()

    def _with_pages(self, count: int, method: Any, *args: Any) -> Any:
        """Call SGLang's own method with a free list of the lowest `count` pages, which it uses up."""
        if count > self.free_count:
            return None
        pages = self.lowest_free(count)
        self.free_pages: torch.Tensor = torch.from_numpy(pages).to(self.device, non_blocking=True)
        found = method(*args)
        if found is not None:
            self._free[pages] = False
            self._count()
        return found

    def _count(self) -> None:
        self.free_count, self.held_count = int(self._free.sum()), int(self._held.sum())
