"""Managed memory, which CUDA migrates by itself: buffers, hints and prefetches.

No broker lends it, so nothing here may import a session, a model or a pool.
"""

from .hints import (
    AdvicePair,
    ManagedMemoryHints,
    ManagedMemoryUnavailable,
    MemAdvice,
    MigrationPolicy,
    PrefetchEntry,
    PrefetchFailed,
    PrefetchPlan,
    UnifiedBuffer,
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
