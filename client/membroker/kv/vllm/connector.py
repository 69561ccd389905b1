"""The KV connector `Membroker`: vLLM's scheduler tells it of requests and steps, and its worker of tensors.

Owns the calls of vLLM, and decides when the cache takes its turn. No hook waits for the broker, for the device or for a
rank, once the engine has started; they run in the scheduler's thread. The one pause is that of a step in which requests
wait and none runs: vLLM would step again at once, in every rank, and leave the broker no time to answer.

The role is `kv_producer`: with one that consumes, vLLM keeps the blocks of a preempted request until the steps in
flight have ended, so one preemption frees nothing at once, and vLLM preempts the next request, and the next. The fence
keeps that memory as long as those steps need it.

A cache takes its turn when a step has been scheduled. That is too late for the step to preempt, so a cache that is
asked for memory also takes a turn when a step has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.request import RequestStatus

from ...errors import InvalidRequest, MembrokerError
from ...ext import arguments
from ..cache import ElasticCache
from ..layout import Layout
from ..ranks import Ranks
from ..sleeper import Sleeper
from . import last_line, logger, memory, seams
from .blocks import VllmBlocks, needs_of
from .settings import check_cache, check_supported, is_shared, settings_of
from .steps import Scheduled
from .swap import Copies, Swap, slots_in

STARVED_SECONDS = 0.005
"""How long a step waits for blocks if no request runs. vLLM looks at new requests and aborts only between steps."""


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What each rank is to do with a step.

    The step's number, and that of the last one with a fence, tell when to record an event. Blocks are saved in slots of
    host memory, and then loaded from others.
    """

    number: int
    fenced: int
    saves: Copies
    loads: Copies


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where the scheduler's process finds a rank, and the arguments of the rank's `Layout`."""

    address: str
    layout: tuple[Any, ...]


class Membroker(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One side of the connector: vLLM makes one for its worker first, and later one for its scheduler."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        seams.check()
        check_supported(vllm_config)
        check_cache(kv_cache_config)
        self._settings = settings_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._has_ranks = vllm_config.parallel_config.distributed_executor_backend == "mp"
        """Whether the workers are in other processes than the scheduler."""
        self._memory: Any
        """In the scheduler's process only if that has the worker too: else None."""
        if role is KVConnectorRole.WORKER:
            self._memory = memory.begin(self._settings, vllm_config, kv_cache_config)
        else:
            seams.warn()
            self._memory = None if self._has_ranks else memory.current()
        self._steps: Scheduled
        self._cache: ElasticCache
        self._blocks: VllmBlocks
        self._swap: Swap
        self._sleeper: Sleeper
        self._rests = True
        """Whether the engine needs no step: its cache rests, or it does not serve yet."""
        self._ending = ExitStack()

    # At the start of vLLM, before its processes and with CUDA graphs alone

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Refuse settings before anything is loaded. No graph needs to be cut."""
        try:
            settings_of(extra_config)
        except InvalidRequest as error:
            last_line.tell(error)
            raise
        return False

    # The worker's side

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Ask for a layout with the bytes of all layers of a block side by side, if the attention backends take one."""
        found = get_supported_kv_cache_layouts(get_current_attn_backends(vllm_config))
        return next((layout.name for layout in found if layout.is_block_outermost), None)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is sent: vLLM need not drop what a preempted request was computing."""
        return False

    def get_mem_pool_context(self) -> AbstractContextManager[Any]:
        """Let vLLM allocate its KV cache as addresses of a pool."""
        index = torch.cuda.current_device() if current_platform.is_cuda() else None
        found: AbstractContextManager[Any] = self._memory.capture(torch.device(current_platform.device_type, index))
        return found

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Map what vLLM's warm-up uses, which comes next. Waits for the broker."""
        self._memory.open()

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Copies are in the order of the engine's own work: nothing is waited for."""

    wait_for_layer_load = save_kv_layer = wait_for_save = _nothing

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Save the KV cache of preempted requests, before this step writes to any of their blocks."""
        if self._memory.swap_space is not None:
            self._memory.swap_space.copy(kv_connector_metadata.saves, loads=False)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """Settle the fences. vLLM calls this at the start of every step, and of steps without tokens.

        The step uses none of the blocks that are to be released. All connectors have handled its preemptions now: one
        that still reads blocks of a preempted request waits for that there.
        """
        super().bind_connector_metadata(connector_metadata)
        self._memory.launched.begin(connector_metadata.number, connector_metadata.fenced)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the KV cache of resumed requests, before this step reads it.

        A step that resumes none may call this at its end.
        """
        if self.has_connector_metadata() and self._memory.swap_space is not None:
            self._memory.swap_space.copy(self._get_connector_metadata().loads, loads=True)

    def get_handshake_metadata(self) -> RankMetadata | None:
        """Tell the scheduler's process where this rank is. vLLM asks when the worker has warmed up."""
        return RankMetadata(*self._memory.serve()) if self._has_ranks else None

    # The scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take the blocks without memory out of the engine's free list, unless the ranks are to be heard before."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if not self._has_ranks:
            self._serve(self._memory.take_cache(), self._memory)
            self._memory.keeper = self._sleeper

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Make a cache over the pools of all ranks, before the first request. Waits for the null block's memory."""
        if not self._has_ranks:
            return
        ranks = [metadata[rank] for rank in sorted(metadata)]
        if not all(isinstance(rank, RankMetadata) for rank in ranks):
            raise InvalidRequest("another connector takes vLLM's only handshake: put Membroker first in MultiConnector")
        if len({rank.layout for rank in ranks}) != 1:
            raise InvalidRequest("the ranks of this engine have KV caches that differ: membroker cannot serve it")
        layout = Layout(*ranks[0].layout)
        pools = self._ending.enter_context(Ranks([rank.address for rank in ranks], layout.page_size))
        cache = self._ending.enter_context(self._settings.elastic(pools, layout))
        self._serve(cache, pools)
        self._ending.push(self._sleeper)

    def _serve(self, cache: ElasticCache, workers: memory.VllmMemory | Ranks) -> None:
        """Hold the blocks that have no memory, and answer an operator that wants this engine to sleep.

        `workers` know what the engine has besides its cache: steps, weights and PyTorch's own memory.
        """
        config, manager = self._vllm_config, self._kv_cache_manager
        pool, managers = manager.block_pool, manager.coordinator.single_type_managers
        if pool.num_gpu_blocks != cache.layout.blocks:
            raise InvalidRequest(
                f"vLLM's scheduler has {pool.num_gpu_blocks} blocks, and its worker {cache.layout.blocks}"
            )
        self._steps, self._cache = Scheduled(workers.passed), cache
        size, needs = self._settings.swap_space, needs_of(config, self._kv_cache_config.kv_cache_groups)
        self._swap = Swap(
            0 if size is None else slots_in(arguments.bytes_of("swap_space", size), cache.layout),
            [need.block_tokens for need in needs],
            lambda group, tokens: managers[group].get_num_skipped_tokens(tokens),
        )
        self._blocks = VllmBlocks(pool, config, needs, manager.get_block_ids, self._steps.fence)
        cache.attach(self._blocks)
        kept = 'they are vLLM\'s own memory (give "weights": "borrowed" to release them, too)'
        if is_shared(config):
            kept = "other engines may use the same ones (--load-format membroker)"
        pinned = self._settings.keep_pinned
        self._sleeper = Sleeper(cache, workers.weights, kept=kept, keep_pinned=pinned, also=workers.also)
        self._rests = False

    def on_new_request(self, request: Any) -> None:
        """Note a request, and ask for its memory before it is scheduled."""
        self._blocks.add(request)
        self._rests = False
        self._cache.grow()
        self._sleeper.wake()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Publish the blocks that have got memory. Nothing is held here: a prefix that was found is not referenced yet.

        The answer is how many tokens host memory has beyond those, and that they are there when the step begins. If
        free blocks are missing, vLLM keeps the request first in line.
        """
        if ready := self._cache.take():
            self._blocks.release(ready)
        if request.status is not RequestStatus.PREEMPTED:
            return 0, False
        if self._blocks.were_reset(request):
            self._swap.clear()
        return max(0, self._swap.tokens(request) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load what host memory has of a request that is scheduled now, if vLLM takes it."""
        if num_external_tokens:
            self._swap.load(request, blocks.get_block_ids(), num_external_tokens)
        else:
            self._swap.drop(request.request_id)

    def reset_cache(self) -> bool:
        """Forget what host memory has: vLLM wants all requests to be computed again."""
        self._swap.clear()
        return True

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """End the scheduling of a step: the cache takes its turn, or rests if there is no request."""
        cache, blocks, steps = self._cache, self._blocks, self._steps
        if self._rests:
            cache.wake()
        blocks.relax()
        self._kv_cache_manager.watermark_blocks = blocks.keep_free(is_short=cache.is_short)
        self._swap.note(scheduler_output, blocks.requests)
        blocks.note(scheduler_output)
        self._rests = blocks.is_empty
        if self._rests:
            cache.rest()
        else:
            # While requests wait and none runs, vLLM steps without a pause, in every rank: the broker would starve.
            if blocks.is_starved:
                cache.wait(STARVED_SECONDS)
            cache.turn()
        saves, loads = self._swap.step()
        if saves or loads:
            logger.debug(
                "membroker: preempted requests: %d blocks go to host memory, %d return", len(saves), len(loads)
            )
        step = StepMetadata(steps.number, steps.fenced, saves, loads)
        steps.number += 1
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """Take a turn for a recall when a step has ended: so the next step preempts, and not the one after it."""
        if self._cache.is_asked_back and not self._rests:
            self._cache.turn()

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. vLLM frees its blocks."""
        self._blocks.finish(request, block_ids)
        self._swap.forget(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Keep vLLM stepping after its last request until the cache rests, and shrinks and answers recalls by itself.

        With requests this says nothing: vLLM steps for them, unless it is paused, and then it waits to be idle.
        """
        return not (self._rests or self._blocks.requests)

    def shutdown(self) -> None:
        """Release all memory."""
        if self._memory is not None:
            self._memory.close()
        with suppress(MembrokerError):  # vLLM ends the ranks first, and their memory goes with them
            self._ending.close()
