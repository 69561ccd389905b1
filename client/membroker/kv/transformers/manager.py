"""`ElasticManager`: transformers' continuous batching whose KV cache is as large as its requests need.

Owns the moments at which transformers makes its cache, schedules, idles and ends. It changes no class and no module of
transformers: it is a subclass of the manager, and gives its own batch processor another scheduler.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, Self

from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from ...adapters.torch import device_of
from ...arguments import bytes_of
from ...errors import InvalidRequest
from ...model import Model
from ...pool.pool import VirtualMemoryPool
from ...session.messages import location_name
from ..cache import ElasticCache
from ..capture import Capture
from ..engine import Over
from ..layout import Layout
from ..sleeper import Sleeper
from . import seams
from .requests import Requests, Store
from .scheduler import elastic

RESULT_SECONDS: Final = 1.0
"""How often `generate_batch` looks whether the thread that generates is still there."""


class ElasticManager(ContinuousBatchingManager):  # type: ignore[misc]
    """Continuous batching of `model`, with a KV cache over `pool`. A context manager; use it in place of
    `model.init_continuous_batching`.

        with lender.pool(page_size="2MiB") as pool, ElasticManager(model, pool) as manager:
            outputs = manager.generate_batch(prompts, max_new_tokens=64)

    It has all methods of transformers' own manager: `add_request`, `get_result`, `request_id_iter`, `cancel_request`
    and the others. `generation_config`, `continuous_batching_config` and `workload_hints` are as for
    `model.init_continuous_batching`, and are copied. The cache has as many blocks as transformers would allocate
    (`num_blocks` sets them), so the pool needs addresses for all of these; they cost nothing. Sizes are in bytes, or
    text: `floor`, `ahead`, `keep` and `ceiling` are as for `membroker.kv.ElasticCache`. Without `ahead` one group of
    pages is kept mapped ahead.

    `start` makes the cache, and `stop` releases its memory. With `stop(keep_for_next_session=True)` the cache stays and
    rests: it shrinks and answers recalls until the next `start`. The pool stays open. Until `stop` an operator can put
    the pool's model to sleep: the manager then releases the cache until the next request.

    Raises `InvalidRequest` for a version of transformers whose classes differ from those that this was written for, for
    a model that is not on the pool's device or that uses tensor parallelism, and for a `safety_margin`. `start` and
    `warmup` also raise it for a cache that does not fit into the pool's pages, and raise what `ElasticCache` raises.
    """

    def __init__(
        self,
        model: Any,
        pool: VirtualMemoryPool,
        generation_config: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
        *,
        floor: int | str = 0,
        ahead: int | str | None = None,
        keep: int | str = "2GiB",
        ceiling: int | str | None = None,
    ) -> None:
        self._store_class = seams.check()
        config = copy.deepcopy(continuous_batching_config) or ContinuousBatchingConfig()
        if config.safety_margin:
            raise InvalidRequest("leave safety_margin out: it is a part of all blocks, those without memory included")
        if model.device != device_of(pool._lender.driver.device):
            raise InvalidRequest(f"the model is on {model.device}, and the pool on {pool._lender.driver.device}")
        generation = copy.deepcopy(model.generation_config if generation_config is None else generation_config)
        if generation.eos_token_id is None:
            generation.eos_token_id = -1  # as init_continuous_batching does
        self.batch_processor: Any = None
        self._pool = pool
        self._bounds = {"floor": floor, "ahead": ahead, "keep": keep, "ceiling": ceiling}
        self._cache: ElasticCache | None = None
        self._sleeper: Sleeper | None = None
        """None too if no operator can ask: the pool's memory is not a broker's."""
        self._most_tokens = 0
        self._ends = False
        super().__init__(model, generation, config, workload_hints)
        if self.distributed_helper.tp_size > 1:
            raise InvalidRequest(
                "membroker.kv.transformers runs on one GPU per model: tensor parallelism is not supported"
            )

    @property
    def cache(self) -> ElasticCache:
        """The cache, from `start` to `stop`; `cache.stats()` has its figures. Raises `InvalidRequest` without one."""
        if self._cache is None:
            raise InvalidRequest("the manager has no cache before start, and after stop")
        return self._cache

    def generate_batch(self, inputs: Sequence[Sequence[int]], max_new_tokens: int | None = None) -> dict[str, Any]:
        """Generate from prompts; return the outputs by request id, in the order of the prompts.

        Like `model.generate_batch`, on this manager: no other thread may take results from it meanwhile. A request that
        failed has its `error` set. Raises `InvalidRequest` if the manager was not started, and what `add_request`
        raises.
        """
        if not self.is_running():
            raise InvalidRequest("start the manager, or use it in a with block")
        for one in inputs:
            self._check_fits(len(one), max_new_tokens)
        asked = self.add_requests([list(one) for one in inputs], max_new_tokens=max_new_tokens)
        order = {name: number for number, name in enumerate(asked)}
        outputs = dict[str, Any]()
        while len(outputs) < len(asked) * self.num_return_sequences:
            result = self.get_result(timeout=RESULT_SECONDS)
            if result is None and not self.is_running():
                break
            if result is not None and result.is_finished() and _prompt_of(result.request_id) in order:
                outputs[result.request_id] = result
        return dict(sorted(outputs.items(), key=lambda one: order[_prompt_of(one[0])]))

    # What transformers' own manager does, and this one differently

    def start(self) -> None:
        """Make the cache if it does not exist yet, and start the thread that generates."""
        if not self.is_running():
            config = self.continuous_batching_config
            flash = [config.auto_switch_to_flash] if hasattr(config, "auto_switch_to_flash") else []
            self.switch_to_cb_friendly_attn(self.model, *flash)  # `stop` has switched back
            self.warmup()
            self._ends = False
        super().start()

    def warmup(self) -> None:
        """Make the cache. CUDA graphs are captured at their first use: most blocks have no memory yet."""
        if self.batch_processor is None:
            self.batch_processor = self._create_batch_processor()
        self.warmed_up = True

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop generating, as transformers does, and release the memory unless `keep_for_next_session` is true."""
        keeps = kwargs.get("keep_for_next_session", args[2] if len(args) > 2 else False)
        self._ends = not keeps
        super().stop(*args, **kwargs)
        if self._ends and not self.is_running():
            self._close()

    def destroy(self) -> None:
        """Stop, and release everything. Idempotent."""
        super().destroy()
        self._close()

    def add_request(self, input_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        """Add a request, as transformers does. Raises `InvalidRequest` if it can never get the memory that it needs."""
        self._check_fits(len(input_ids), args[1] if len(args) > 1 else kwargs.get("max_new_tokens"))
        return super().add_request(input_ids, *args, **kwargs)

    def _check_fits(self, tokens: int, max_new_tokens: int | None) -> None:
        tokens += (self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens) or 0
        if self._most_tokens and tokens > self._most_tokens:
            raise InvalidRequest(
                f"a request of {tokens} tokens, those to be generated included, can never run: the cache of this model "
                f"has {self._most_tokens} at most, by num_blocks, the limits and the ceiling"
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cache is not None:
            self.stop(hard_stop=kind is not None)
        self.destroy()
        if getattr(self.model, "_cached_continuous_batching_manager", None) is self:
            del self.model._cached_continuous_batching_manager  # by keep_for_next_session: there is no next one

    # In the thread that generates, but for the making of the cache

    def _create_batch_processor(self) -> Any:
        if self._cache is not None and self.batch_processor is not None:
            self._cache.wake()
            return super()._create_batch_processor()
        with Capture(self._pool, wanted=self._store_class.is_kv_tensor):
            processor = super()._create_batch_processor()
        plain = processor.scheduler
        wake_up = self._wake_up_loop if hasattr(self, "_wake_up_loop") else self._has_new_requests
        processor.scheduler = processor.offloading_manager.scheduler = elastic(plain, wake_up)
        self._open(processor, self._store_class(processor.cache))
        return processor

    def _open(self, processor: Any, store: Store) -> None:
        pool, bounds = self._pool, dict(self._bounds)
        parts = store.parts()
        if any(not 0 <= one.address - pool.base_address < pool.capacity for one in parts):
            raise InvalidRequest(
                f"a tensor of the cache is smaller than a page of {pool.page_size} bytes: raise num_blocks, or take "
                "smaller pages"
            )
        layout = Layout(pool.base_address, pool.page_size, store.count, parts, store.block_tokens)
        if bounds["ahead"] is None:
            bounds["ahead"] = layout.bytes_of(0)
        self._most_tokens = self._tokens_that_fit(layout, store)
        cache = ElasticCache(pool, layout, always=store.always, **bounds)  # type: ignore[arg-type]
        stream = processor.inputs_and_outputs.compute_stream
        requests = Requests(store, processor.scheduler, Over if stream is None else stream.record_event)
        processor.scheduler.cache_of_blocks, processor.scheduler.requests = cache, requests
        try:
            cache.attach(requests)
            if isinstance(pool._lender, Model):
                self._sleeper = Sleeper(cache, kept="they are torch's own memory")
        except BaseException:
            cache.close()
            raise
        processor.scheduler.sleeper = self._sleeper
        self._cache = cache

    def _tokens_that_fit(self, layout: Layout, store: Store) -> int:
        """Return the most tokens that one request can have."""
        lender, ceiling = self._pool._lender, self._bounds["ceiling"]
        limits = [] if ceiling is None else [bytes_of("the ceiling", ceiling)]
        if isinstance(lender, Model):
            capacities = lender._session.welcome.capacities
            limits += [one.limit_bytes for one in capacities if location_name(one.location) == "device"]
            available = lender.available()
            limits += [one for one in (available.limit_bytes, available.tenant_limit_bytes) if one is not None]
        most = min(limits, default=layout.bytes_of(0) * layout.groups)
        first = {group for block in store.always for group in layout.touched(block)}
        order = [*first, *(group for group in range(layout.groups) if group not in first)]
        has, size = set[int](), 0
        for group in order:
            size += layout.bytes_of(group)
            if size > most:
                break
            has.add(group)
        blocks = sum(has.issuperset(layout.touched(block)) for block in range(layout.blocks)) - len(store.always)
        low, high = 0, layout.blocks * layout.block_tokens
        while low < high:  # transformers says how many blocks a number of tokens takes
            middle = (low + high + 1) // 2
            low, high = (middle, high) if store.lacking([("", middle)]) <= blocks else (low, middle - 1)
        return low

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        goes_on: bool = super()._generation_loop_body(batch_processor, bootstrapping)
        if not (batch_processor.has_pending_requests() or self.cache.is_resting):
            self.cache.rest()
        return goes_on

    def _generation_step(self) -> None:
        config, tensors = self.continuous_batching_config, self.batch_processor.inputs_and_outputs
        with ExitStack() as undisturbed:
            if any(config.cuda_graph_booleans) and tensors.get_graph() is None:  # this step captures a CUDA graph
                undisturbed.enter_context(self.cache.capturing())
                if isinstance(self._pool._lender, Model):
                    undisturbed.enter_context(self._pool._lender._session.reconnecting.notices.held_up())
            super()._generation_step()

    def _run_generation_loop(self) -> None:
        try:
            super()._run_generation_loop()
        finally:
            if self._ends:
                self._close()
            elif self._cache is not None:
                self._cache.rest()

    def _close(self) -> None:
        """Release all memory. Idempotent. Nothing is computed any more."""
        cache, sleeper, self._cache, self._sleeper = self._cache, self._sleeper, None, None
        self.batch_processor = None
        self._most_tokens = 0
        self.warmed_up = False
        if sleeper is not None:
            sleeper.close()
        if cache is not None:
            cache.close()


def _prompt_of(request_id: str) -> str:
    """Return the id of the request whose prompt this one answers: `num_return_sequences` makes some more of each."""
    return request_id.partition("__child#")[0]
