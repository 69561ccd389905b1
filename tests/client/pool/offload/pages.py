"""What the tests of offloading fill and compare."""

from __future__ import annotations

import hashlib

from tests.support.fake_lender import Lender

from membroker.pool.pool import VirtualMemoryPool

PAGES = 64


def pinned_bytes(lender: Lender) -> int:
    """What the driver of the library has pinned."""
    return sum(lender.driver._pinned.values())


def digest(pool: VirtualMemoryPool, *offsets: int) -> str:
    """The checksum of whole pages at these offsets."""
    found = hashlib.sha256()
    for offset in offsets:
        found.update(pool.view(offset, pool.page_size))
    return found.hexdigest()


def fill(pool: VirtualMemoryPool, offset: int, data: bytes) -> None:
    pool.view(offset, len(data))[:] = data


def sizes(pool: VirtualMemoryPool) -> tuple[int, int]:
    """How many pages have memory, and how many are offloaded."""
    stats = pool.stats()
    return stats.mapped_pages, stats.offloaded_bytes // pool.page_size
