"""The classes and methods of transformers that this package relies on, with the parameters that it gives them.

Owns the tables; `kv/seams.py` compares them with the transformers that is installed. A version that has all of them may
still behave otherwise: only those of `VERSIONS` were run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from .. import seams

logger = logging.getLogger("membroker")

_HOME: Final = "transformers.generation.continuous_batching"
_MANAGER: Final = f"{_HOME}.continuous_api:ContinuousBatchingManager"
_SCHEDULER: Final = f"{_HOME}.scheduler:Scheduler"
_CACHE: Final = f"{_HOME}.cache:PagedAttentionCache"
METHODS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (_MANAGER, "__init__", ("model", "generation_config", "continuous_batching_config", "workload_hints")),
    (_MANAGER, "start", ()),
    (_MANAGER, "warmup", ()),
    (_MANAGER, "switch_to_cb_friendly_attn", ("model",)),
    (_MANAGER, "stop", ("block", "timeout", "keep_for_next_session", "hard_stop")),
    (_MANAGER, "destroy", ()),
    (_MANAGER, "add_request", ("input_ids", "request_id", "max_new_tokens")),
    (_MANAGER, "_create_batch_processor", ()),
    (_MANAGER, "_generation_loop_body", ("batch_processor", "bootstrapping")),
    (_MANAGER, "_generation_step", ()),
    (_MANAGER, "_run_generation_loop", ()),
    (f"{_HOME}.continuous_api:ContinuousBatchProcessor", "has_pending_requests", ()),
    (_SCHEDULER, "__init__", ("cache", "safety_margin", "max_requests_per_batch")),
    (_SCHEDULER, "schedule_batch", ("token_budget", "cache_budget")),
    (_SCHEDULER, "finish_request", ("request_id",)),
    (_SCHEDULER, "add_waiting_request", ("state",)),
    (f"{_HOME}.requests:RequestState", "create_equivalent_initial_request", ()),
    (f"{_HOME}.offloading_manager:OffloadingManager", "offload_requests", ()),
)
ATTRIBUTES: Final = (
    (_MANAGER, ("batch_processor", "warmed_up", "distributed_helper", "continuous_batching_config")),
    (
        f"{_HOME}.continuous_api:ContinuousBatchProcessor",
        ("cache", "scheduler", "offloading_manager", "inputs_and_outputs"),
    ),
    (f"{_HOME}.input_outputs:ContinuousBatchingIOs", ("compute_stream", "get_graph")),
    (f"{_HOME}.input_outputs:ContinuousBatchingAsyncIOs", ("compute_stream", "get_graph")),
    (f"{_HOME}.offloading_manager:OffloadingManager", ("scheduler",)),
    (
        _SCHEDULER,
        (
            "active_requests",
            "waiting_requests",
            "starved_requests",
            "block_new_requests",
            "_requests_to_fork",
        ),
    ),
    (
        f"{_HOME}.requests:RequestState",
        ("request_id", "initial_tokens", "remaining_prefill_tokens", "position_offset", "max_new_tokens", "_status"),
    ),
)
_BLOCKS: Final = f"{_HOME}.cache_manager:BlockManager"
_SECTORS: Final = f"{_HOME}.cache_allocators:CachePool"
_ALLOCATOR: Final = f"{_HOME}.cache_allocators:CacheAllocator"
_LEDGER: Final = f"{_HOME}.cache_allocators.cache_allocator:BlockLedger"


class Version(NamedTuple):
    """What is relied on in the versions that keep their cache in one way, beside what is relied on in all."""

    tested: str
    """How the versions begin that were run."""
    store: str
    """The module and the class in this package that knows their lists."""
    methods: tuple[tuple[str, str, tuple[str, ...]], ...]
    attributes: tuple[tuple[str, tuple[str, ...]], ...]


VERSIONS: Final = (
    Version(
        "5.17.",
        f"{__package__}.blocks:Blocks",
        ((_CACHE, "blocks_needed", ("num_requested_blocks", "allocated_blocks")),),
        (
            (_MANAGER, ("_has_new_requests",)),
            (_CACHE, ("num_blocks", "block_size", "num_key_value_heads", "head_dim", "key_cache", "value_cache")),
            (_CACHE, ("group_cache_managers", "_block_manager")),
            (f"{_HOME}.cache_manager:CacheAllocator", ("block_table",)),
            (_BLOCKS, ("_uninit_block_ids", "_init_block_ids", "_id_to_block", "_hash_to_id")),
        ),
    ),
    Version(
        "5.23.",
        f"{__package__}.sectors:Sectors",
        (
            (_ALLOCATOR, "needs_new_blocks", ("request_id", "past_length", "query_length")),
            (_SECTORS, "try_to_free_sectors", ()),
            (_SECTORS, "free_blocks", ("index", "block_ids")),
            (_SECTORS, "count_free_blocks", ("index",)),
        ),
        (
            (_MANAGER, ("_wake_up_loop",)),
            ("transformers.generation.configuration_utils:ContinuousBatchingConfig", ("auto_switch_to_flash",)),
            (
                _CACHE,
                ("num_sectors", "bytes_per_sector", "tokens_per_sector", "cache_tensor", "cache_allocators", "pool"),
            ),
            (_ALLOCATOR, ("index", "blocks_per_sector", "block_table", "ledger")),
            (_SECTORS, ("free_sectors", "_free_blocks")),
            (f"{_HOME}.cache_allocators.cache_pool:RegularTrees", ("trees",)),
            (_LEDGER, ("cached_blocks", "block_to_hash", "hash_to_block")),
        ),
    ),
)


def version() -> Version:
    """Return the one of `VERSIONS` whose cache the installed transformers has: the later one, unless it has blocks."""
    before, after = VERSIONS
    return before if find_spec(_BLOCKS.partition(":")[0]) else after


def differences(found: Version) -> Iterator[str]:
    """Yield what the installed transformers lacks, one by one."""
    return seams.differences((*METHODS, *found.methods), (*ATTRIBUTES, *found.attributes))


def check() -> Any:
    """Return the `Store` for the installed transformers.

    Raises `InvalidRequest` if it differs from the ones that this package was written for.
    """
    import transformers

    found, installed = version(), f"transformers {transformers.__version__}"
    written_for = f"transformers {' and '.join(f'{one.tested}x' for one in VERSIONS)}"
    seams.check("membroker.kv.transformers", written_for, installed, differences(found))
    if not transformers.__version__.startswith(found.tested):
        logger.warning("membroker.kv.transformers was tested with %s, but not with %s", written_for, installed)
    return seams.load(found.store)
