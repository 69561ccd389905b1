"""Managed memory, which CUDA migrates automatically: buffers, hints and prefetches.

A broker does not lend it, so no module here may import a session, a model or a pool.
"""

from ..errors import ManagedMemoryUnavailable
from .buffer import UnifiedBuffer
from .hints import (
    AdvicePair,
    ManagedMemoryHints,
    MemAdvice,
    MigrationPolicy,
    PrefetchEntry,
    PrefetchFailed,
    PrefetchPlan,
    apply_migration_policy,
)

__all__ = [
    "AdvicePair",
    "ManagedMemoryHints",
    "ManagedMemoryUnavailable",
    "MemAdvice",
    "MigrationPolicy",
    "PrefetchEntry",
    "PrefetchFailed",
    "PrefetchPlan",
    "UnifiedBuffer",
    "apply_migration_policy",
]
