"""Managed memory, which CUDA migrates automatically: buffers, hints and prefetches.

A broker does not lend it, so no module here may import a session, a model or a pool.
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
