"""vLLM's own scheduler, two steps in flight as on a GPU, without a model: what it preempts is what is measured.

vLLM's CPU build cannot schedule asynchronously, so that a whole engine shows nothing of this on a CPU. In place of a
model each step writes to the blocks of its requests what it would compute, and looks at what is there from before.
The blocks of a step must have memory until it has ended.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from membroker import Model, VirtualMemoryPool
from membroker.kv import ElasticCache, Layout
from membroker.kv.engine import Over
from membroker.kv.layout import Strided
from membroker.kv.vllm import memory
from membroker.kv.vllm.steps import Launched
from tests.support.sizes import MIB
from tests.support.vllm_engine import CONFIG

BLOCK_TOKENS, BLOCK, PAGE = 16, 64 << 10, 2 * MIB
PAGES = 160
IN_FLIGHT = 2
"""How many steps are scheduled before the first of them has ended."""


class Scheduling:
    """A scheduler with `blocks` blocks; over a `model`, with an elastic cache in place of that.

    With a `window` every other layer of its model needs only so many of a request's last tokens.

    `tokens` were scheduled, `preemptions` counts requests that lost their blocks, and `loaded` blocks that came back.
    """

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        blocks: int = 0,
        model: Model | None = None,
        caches_prefixes: bool = False,
        swap_space: int | None = None,
        window: int = 0,
    ):
        (directory / "config.json").write_text(json.dumps(CONFIG))
        over: dict[str, Any] = {}
        self._launched = Launched()
        self._launched.record = lambda: _Ended(self, self._begun - 1)
        self._begun = self.ended = 0
        """How many steps were launched, and how many of them have ended."""
        self._pool: VirtualMemoryPool | None = None
        if model is not None:
            blocks = PAGES * PAGE // BLOCK
            self._pool = pool = VirtualMemoryPool(model, PAGES * PAGE, PAGE)
            layout = Layout(pool.base_address, PAGE, blocks, [Strided(pool.base_address, BLOCK, BLOCK)])
            self.cache = ElasticCache(pool, layout)
            started = SimpleNamespace(take_cache=lambda: self.cache, launched=self._launched)
            started.passed, started.weights, started.also = self._launched.passed, None, lambda: None
            monkeypatch.setattr(memory, "_current", started)
            over["kv_transfer_config"] = {
                "kv_connector": "Membroker",
                "kv_connector_module_path": "membroker.kv.vllm",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {} if swap_space is None else {"swap_space": swap_space},
            }
        config = EngineArgs(
            model=str(directory),
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=caches_prefixes,
            kv_cache_memory_bytes=1 << 30,
            dtype="float32",
            **over,
        ).create_engine_config()
        config.parallel_config.distributed_executor_backend = "uni"
        config.scheduler_config.async_scheduling = True  # the CPU build has turned it off
        config.cache_config.num_gpu_blocks = blocks
        shape: dict[str, Any] = {
            "block_size": BLOCK_TOKENS,
            "num_kv_heads": 4,
            "head_size": 128,
            "dtype": torch.float32,
        }
        specs: list[Any] = [FullAttentionSpec(**shape)]
        self._windows: list[int | None] = [None]
        """How many of its last tokens a group of layers needs, or None for all."""
        if window:
            specs.append(SlidingWindowSpec(**shape, sliding_window=window))
            self._windows.append(window)
        groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
        tensors = [KVCacheTensor(BLOCK * blocks, group.layer_names, BLOCK, BLOCK) for group in groups]
        cache_config = KVCacheConfig(blocks, tensors, groups)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256) if caches_prefixes else None
        self.scheduler = AsyncScheduler(config, cache_config, StructuredOutputManager(config), block_size=BLOCK_TOKENS)
        self._under_way = deque[tuple[Any, list[list[int]], set[int]]]()
        self.preemptions = self.tokens = self.loaded = 0
        self._written: dict[int, dict[int, int]] = {}
        """What is in each block: for each token a number that depends on all tokens before it, as in a KV cache."""
        self._swapped: dict[int, dict[int, int]] = {}
        """The same of each slot of host memory."""
        self._seen: dict[str, int] = {}
        """How many tokens of a request were computed."""
        self._numbers: dict[str, list[int]] = {}
        """What is to be computed for each token of a request."""
        self.before_end: Callable[[], object] | None = None
        """What happens once, while a step is under way."""
        self.weights = 0
        """Other weights compute other numbers."""

    @property
    def slots(self) -> list[int]:
        """Return all slots of host memory, those with something in them and those without."""
        swap = self.scheduler.connector._swap
        kept = [slot for _, groups in swap._kept.values() for slots in groups for slot in slots.values()]
        return sorted([*swap._free, *kept])

    def forget(self, name: str) -> None:
        """Compute a request whose tokens have changed from its beginning."""
        self._numbers.pop(name, None)
        self._seen.pop(name, None)

    def change_weights(self) -> bool:
        """Let all requests be computed again with other weights; return whether vLLM could."""
        while self._under_way:
            self._end(*self._under_way.popleft())
        done = bool(self.scheduler.reset_prefix_cache(reset_running_requests=True))
        self.weights += 1
        self._numbers.clear()
        self._seen.clear()
        return done

    def serve(self, requests: int, prompt: int, answer: int) -> None:
        """Schedule steps until so many requests have their answers."""
        self.add(requests, prompt, answer)
        while self.step():
            pass

    def add(self, requests: int, prompt: int, answer: int) -> None:
        for number in range(requests):
            self.ask(str(number), [1] * prompt, answer)

    def ask(self, name: str, prompt: list[int], answer: int) -> None:
        options = SamplingParams(max_tokens=answer, ignore_eos=True, detokenize=False)
        self.scheduler.add_request(Request(name, prompt, options, None, block_hasher=self._hasher))

    def step(self) -> bool:
        """Schedule a step, and end the oldest that is under way; return whether there is anything left to do."""
        scheduler, steps = self.scheduler, self._under_way
        if not (scheduler.has_unfinished_requests() or steps):
            return False
        step = scheduler.schedule()
        self._begun += 1
        self.preemptions += len(step.preempted_req_ids or ())
        self.tokens += step.total_num_scheduled_tokens
        if (told := step.kv_connector_metadata) is not None:
            self._swapped.update({slot: dict(self._written[block]) for block, slot in told.saves})
            self._written.update({block: dict(self._swapped[slot]) for block, slot in told.loads})
            self.loaded += len(told.loads)
            self._launched.begin(told.number, told.fenced)
        names = step.num_scheduled_tokens
        for name in step.preempted_req_ids or ():
            self._seen.pop(name, None)
        for name, tokens in names.items():
            self._compute(scheduler.requests[name], tokens)
        answers = [[] if scheduler.requests[name].is_prefill_chunk else [_answer(name)] for name in names]
        used = {block * BLOCK // PAGE for name in names for table in self._tables(name) for block in table}
        steps.append((step, answers, used))
        while len(steps) >= IN_FLIGHT or (steps and not step.total_num_scheduled_tokens):
            self._end(*steps.popleft())
        return True

    def _compute(self, request: Request, tokens: int) -> None:
        """Write the next tokens of a request to its blocks. What it had before must be there."""
        name, known = request.request_id, request.all_token_ids
        numbers = self._numbers.setdefault(name, [self.weights])
        begin, end = request.num_computed_tokens - tokens, request.num_computed_tokens
        for place in range(len(numbers) - 1, end):
            numbers.append(hash((numbers[-1], known[place] if place < len(known) else _answer(name))))
        resumed = self._seen.get(name) != begin
        for window, table in zip(self._windows, self._tables(name), strict=True):
            first = 0 if resumed else max(0, begin - BLOCK_TOKENS)
            for place in range(first if window is None else max(first, begin + 1 - window), end):
                block, number = table[place // BLOCK_TOKENS], numbers[place + 1]
                if place >= begin:
                    self._written.setdefault(block, {})[place % BLOCK_TOKENS] = number
                assert self._written[block].get(place % BLOCK_TOKENS) == number, f"token {place} of request {name}"
        self._seen[name] = end

    def _tables(self, name: str) -> tuple[list[int], ...]:
        found: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(name)
        return found

    def _end(self, step: Any, tokens: list[list[int]], used: set[int]) -> None:
        if self._pool is not None:
            lost = [page for page in used if not self._pool.is_mapped(page * PAGE, PAGE)]
            assert not lost, f"a step that is under way uses {len(lost)} pages without memory"
        if (happens := self.before_end) is not None:
            self.before_end = None
            happens()
        self.ended += 1
        names = list(step.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(
            step, ModelRunnerOutput(names, places, tokens, kv_connector_output=KVConnectorOutput())
        )


class _Ended(Over):
    """The fence of the end of a step."""

    def __init__(self, scheduling: Scheduling, step: int) -> None:
        self._scheduling, self._step = scheduling, step

    def query(self) -> bool:
        return self._scheduling.ended >= self._step


def _answer(name: str) -> int:
    """Return the token with which a request is answered again and again."""
    return 1 + zlib.crc32(name.encode()) % 500
