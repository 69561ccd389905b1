"""The parts of the vLLM integration with vLLM's own classes: its block pool, its layouts, its signatures."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from tests.support.daemons import running
from tests.support.sizes import MIB

import membroker
from membroker import InvalidRequest, LocalSource, VirtualMemoryPool

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")

import torch
from tests.support.vllm_empty import Empty
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorMetadata
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from membroker.kv import Layout
from membroker.kv.capture import Capture
from membroker.kv.layout import Strided
from membroker.kv.seams import differences, load
from membroker.kv.vllm import connector, memory, plugin, seams
from membroker.kv.vllm.blocks import GroupNeed, VllmBlocks, needs_of
from membroker.kv.vllm.connector import Membroker, StepMetadata
from membroker.kv.vllm.settings import VllmSettings, settings_of
from membroker.kv.vllm.steps import Launched, Scheduled
from membroker.kv.vllm.swap import SwapSpace
from membroker.memory.lender import source_of

BLOCKS = 16


def a_request(name: str, tokens: int, **about: Any) -> Any:
    about = {"num_computed_tokens": 0, "status": RequestStatus.RUNNING, **about}
    return SimpleNamespace(request_id=name, num_tokens=tokens, **about)


def a_step(
    new: Mapping[str, Sequence[int]],
    more: Mapping[str, Sequence[int]] = MappingProxyType({}),
    *,
    tokens: Mapping[str, int] = MappingProxyType({}),
    resumed: Collection[str] = (),
    preempted: Collection[str] = (),
) -> Any:
    """What vLLM's scheduler tells of a step: the blocks of `new` requests, and those that others get besides."""
    others = SimpleNamespace(
        req_ids=list(more), new_block_ids=[(one,) for one in more.values()], resumed_req_ids=resumed
    )
    scheduled = {**dict.fromkeys([*more, *new], 0), **tokens}
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=(one,)) for name, one in new.items()],
        scheduled_cached_reqs=others,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        preempted_req_ids=preempted,
    )


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(BLOCKS, True, 16)


class Blocks(VllmBlocks):
    """With the tables of requests, as vLLM has them: of each request the blocks in each group."""

    def __init__(
        self,
        pool: BlockPool,
        needs: Sequence[GroupNeed] = (GroupNeed(16, 0, 8),),
        lookahead: int = 0,
        **options: Any,
    ) -> None:
        self.known: dict[str, list[list[int]]] = {}
        scheduler = {"watermark": 0.0, "max_num_seqs": 2, "max_num_batched_tokens": 8192, "policy": "fcfs", **options}
        config = SimpleNamespace(scheduler_config=SimpleNamespace(**scheduler), num_lookahead_tokens=lookahead)
        super().__init__(pool, config, needs, lambda name: self.known.get(name, []), Scheduled(lambda: 0).fence)

    def note(self, step: Any) -> None:
        for name in step.preempted_req_ids:
            self.known.pop(name, None)
        for new in step.scheduled_new_reqs:
            self.known[new.req_id] = [list(table) for table in new.block_ids]
        others = step.scheduled_cached_reqs
        for name, tables in zip(others.req_ids, others.new_block_ids, strict=True):
            old = self.known.get(name, [[] for _ in tables])
            self.known[name] = [table + list(more) for table, more in zip(old, tables, strict=True)]
        super().note(step)

    def admit(self, name: str, *table: int, **about: Any) -> Any:
        """Let a request run whose prompt fills these blocks, which are the pool's next ones."""
        assert [one.block_id for one in self._pool.get_new_blocks(len(table))] == [*table]
        request = a_request(name, 16 * len(table), **about)
        self.add(request)
        self.note(a_step({name: table}, tokens={name: 16 * len(table)}))
        return request


@pytest.fixture
def blocks(pool: BlockPool) -> Blocks:
    return Blocks(pool)


def free(pool: BlockPool, *numbers: int) -> None:
    """What vLLM does with the blocks of a request that it preempts, or that has ended."""
    pool.free_blocks([pool.blocks[number] for number in numbers])


class TestBlocks:
    def test_held_blocks_are_out_of_the_free_list(self, pool: BlockPool, blocks: Blocks) -> None:
        blocks.hold(range(1, BLOCKS))
        assert pool.get_num_free_blocks() == 0
        blocks.release([3, 4])
        assert [one.block_id for one in pool.get_new_blocks(2)] == [3, 4]
        assert blocks.need() == 3
        assert list(blocks.unused([0, 1, 3])) == []

    def test_a_block_that_is_held_is_no_prefix_any_more(self, pool: BlockPool, blocks: Blocks) -> None:
        """What was cached in it would be read without memory."""
        block_hash = make_block_hash_with_group_id(BlockHash(b"prefix"), 0)
        request = blocks.admit("a", 1)
        pool._insert_block_hash(block_hash, pool.blocks[1], 16)
        blocks.finish(request, [[1]])
        free(pool, 1)
        assert pool.cached_block_hash_to_block.get_one_block(block_hash) is pool.blocks[1]
        assert blocks.warmth([1, 5]) > blocks.warmth([5]) == 0
        assert list(blocks.unused([1])) == [1]
        blocks.hold([1])
        assert pool.cached_block_hash_to_block.get_one_block(block_hash) is None
        assert blocks.warmth([1]) == 0

    def test_the_need_is_what_waits_what_runs_and_one_block_ahead(self, pool: BlockPool, blocks: Blocks) -> None:
        assert blocks.need() == 1
        for name, tokens in {"a": 40, "b": 1000, "c": 40}.items():
            blocks.add(a_request(name, tokens))
        assert blocks.need() == 1 + 3 + 8, "b has at most the model's length, and a third request cannot run yet"
        pool.get_new_blocks(2)
        blocks.note(a_step({"a": [1, 2]}, tokens={"a": 32}))
        assert blocks.need() == 3 + 2 + 8, "the rest of its prompt, and a block"

    def test_the_need_is_summed_over_groups_and_bounded_where_vllm_bounds_it(self, pool: BlockPool) -> None:
        """Full attention, a window of three blocks at most, and a state with one more for drafts."""
        needs = [GroupNeed(16, 0, 8), GroupNeed(16, 0, 3), GroupNeed(128, 1, 2)]
        blocks = Blocks(pool, needs, lookahead=2)
        blocks.add(a_request("a", 79))
        assert blocks.need() == 1 + (5 + 3 + 2)
        pool.get_new_blocks(8)
        blocks.note(a_step({"a": [1, 2, 3, 4, 5]}, tokens={"a": 79}))
        assert blocks.need() == 9 + (1 + 1 + 0 + 0), "a block ahead, and one for drafts, where it is not full"

    def test_an_estimate_that_is_too_low_is_raised(self, pool: BlockPool) -> None:
        """vLLM admits a request only with all blocks that it counts. It would wait forever."""
        blocks = Blocks(pool)
        blocks.hold(range(4, BLOCKS))
        blocks.add(a_request("a", 40))
        before = blocks.need()
        for more in (1, 2):
            blocks.note(a_step({}))
            assert blocks.need() == before + more
        pool.get_new_blocks(3)
        blocks.note(a_step({"a": [1, 2, 3]}, tokens={"a": 40}))
        assert blocks.need() == 4 + 1
        blocks.hold([])
        blocks.add(a_request("b", 40))
        blocks.note(a_step({}, preempted={"a"}))
        assert blocks.need() == 4 + 6, "no block is free: the estimate may be right"

    def test_a_session_that_waits_for_its_next_part_is_not_preempted(self, pool: BlockPool, blocks: Blocks) -> None:
        """It keeps its blocks. vLLM preempts only what runs: others would go, and these would stay."""
        blocks.admit("a", 1, 2)
        session = blocks.admit("session", 3, 4)
        blocks.admit("b", 5)
        assert (blocks.cost([3]), blocks.cost([1])) == (2, 3)
        session.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        assert blocks.cost([3]) > blocks.cost([1]) == 3
        assert not blocks.preempt([3, 4])
        assert blocks.preempt([1, 3])
        free(pool, 5)
        assert pool.get_num_free_blocks() == -1
        free(pool, 2, 1)
        assert pool.get_num_free_blocks() == 0
        blocks.relax()

    def test_what_preempted_requests_lose_makes_no_room(self, pool: BlockPool, blocks: Blocks) -> None:
        """So vLLM goes on, until no request uses the blocks that are to go. The last one makes the room."""
        for name, table in {"a": (1, 2), "b": (3, 4, 5), "c": (6, 7)}.items():
            blocks.admit(name, *table)
        before, need = pool.get_num_free_blocks(), blocks.need()
        assert blocks.preempt([4])
        assert (pool.get_num_free_blocks(), blocks.need()) == (-1, need)
        free(pool, 6, 7)  # the youngest goes first
        assert pool.get_num_free_blocks() == -1
        free(pool, 3, 4, 5)
        assert pool.get_num_free_blocks() == 1
        taken = pool.get_new_blocks(1)[0].block_id
        assert taken in (3, 5)
        assert list(blocks.unused([4])) == []
        blocks.relax()
        assert set(blocks.unused([1, 2, 3, 4, 5, 6, 7])) == {3, 4, 5, 6, 7} - {taken}
        assert pool.get_num_free_blocks() == before + 4

    def test_with_priorities_the_requests_that_matter_least_go_first(self, pool: BlockPool) -> None:
        """vLLM then preempts those with the largest number, and of these the youngest."""
        blocks = Blocks(pool, max_num_seqs=4, policy="priority")
        for number, (name, priority) in enumerate({"a": 1, "b": 0, "c": 2, "d": 1}.items(), 1):
            blocks.admit(name, number, priority=priority, arrival_time=number)
        assert [blocks.cost([number]) for number in (1, 2, 3, 4)] == [3, 4, 1, 2]
        assert blocks.preempt([4])
        for number in (3, 4):
            assert pool.get_num_free_blocks() == -1
            free(pool, number)
        blocks.relax()
        assert list(blocks.unused([1, 2, 3, 4])) == [3, 4]

    def test_it_is_starved_while_requests_wait_and_none_runs(self, pool: BlockPool, blocks: Blocks) -> None:
        """It is empty when the last step has given its blocks back: with steps in flight vLLM frees them later."""
        assert (blocks.is_starved, blocks.is_empty) == (False, True)
        blocks.add(a_request("waits", 16))
        assert (blocks.is_starved, blocks.is_empty) == (True, False)
        request = blocks.admit("waits", 1)
        assert not blocks.is_starved
        blocks.note(a_step({}, preempted={"waits"}))
        assert blocks.is_starved
        blocks.finish(request, [[1]])
        assert (blocks.is_starved, blocks.is_empty) == (False, False)
        free(pool, 1)
        assert blocks.is_empty


def test_a_fence_passes_when_its_step_was_launched_and_is_over() -> None:
    """A step that is scheduled may be launched later than the fence is asked for."""
    events: list[Any] = []

    def record() -> Any:
        events.append(SimpleNamespace(is_over=False, query=lambda: events[-1].is_over))
        return events[-1]

    launched = Launched()
    launched.record = record
    scheduled = Scheduled(launched.passed)
    scheduled.number += 1
    scheduled.number += 1
    fence = scheduled.fence()
    assert (scheduled.number, scheduled.fenced) == (2, 2)
    launched.begin(0, 0)
    events[-1].is_over = True
    launched.begin(1, 0)
    assert (fence.query(), len(events)) == (False, 1)
    launched.begin(2, scheduled.fenced)
    assert (fence.query(), len(events)) == (False, 2)
    events[-1].is_over = True
    assert fence.query()
    scheduled.number += 1
    later = scheduled.fence()
    launched.begin(3, scheduled.fenced)
    assert (len(events), later.query()) == (3, False)


def test_a_fence_of_a_step_that_was_never_launched_passes_with_the_next_step() -> None:
    launched = Launched()
    scheduled = Scheduled(launched.passed)
    scheduled.number += 1
    fence = scheduled.fence()
    scheduled.number += 1
    assert not fence.query()
    launched.begin(scheduled.number, scheduled.fenced)
    assert fence.query()


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_fence_is_behind_what_other_connectors_read(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own offloading connector may still read what a preempted request had, and waits for that in its turn."""
    order: list[str] = []
    mine, other = object.__new__(Membroker), object.__new__(Empty)
    mine._vllm_config = VllmConfig()
    mine._memory = SimpleNamespace(
        swap_space=SimpleNamespace(copy=lambda copies, loads: order.append("load" if loads else "save")),
        launched=SimpleNamespace(begin=lambda number, fenced: order.append(f"event of step {number}")),
        open=lambda: None,
    )
    monkeypatch.setattr(Empty, "handle_preemptions", lambda self, kv_connector_metadata: order.append("other waits"))
    both = object.__new__(MultiConnector)
    both._connectors, both._extra_async_saves = [mine, other], {}
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", both)
    step = SchedulerOutput.make_empty()
    step.kv_connector_metadata = MultiKVConnectorMetadata((StepMetadata(3, 3, [], []), KVConnectorMetadata()))
    if runner == "V1":
        both.handle_preemptions(step.kv_connector_metadata)  # as the first thing of `execute_model`
        KVConnectorModelRunnerMixin.kv_connector_no_forward(step, mine._vllm_config)
    else:
        ActiveKVConnector(mine._vllm_config, {}).no_forward(step)
    assert order == ["save", "other waits", "event of step 3", "load"]


SHAPE: Any = {"block_size": 16, "num_kv_heads": 2, "head_size": 64}
FULL, FP8 = (FullAttentionSpec(**SHAPE, dtype=dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn))
WINDOW = SlidingWindowSpec(**SHAPE, dtype=torch.bfloat16, sliding_window=64)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
STATE = MambaSpec(block_size=256, shapes=((16, 128),), dtypes=(torch.bfloat16,), page_size_padded=FULL.page_size_bytes)
MODELS: Mapping[str, list[Any]] = {
    "full": [FULL] * 4,
    "FP8": [FP8] * 4,
    "window": [WINDOW, WINDOW, FULL] * 2,
    "MLA": [LATENT] * 4,
    "hybrid": [STATE, STATE, STATE, FULL] * 2,
    "mixed types": [FULL, FP8],
}
"""The layers of small models, by the kind of model."""


def a_vllm_config(layout: str, **other: Any) -> Any:
    """The parts of a `VllmConfig` that vLLM plans a cache by."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=2048, served_model_name="m", **other)
    config.cache_config.kv_cache_layout = layout
    return config


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layout", ["BLNHC", "BLHNC", "LBNHC"])
def test_a_block_is_where_vllm_puts_it(layout: str, kind: str) -> None:
    """vLLM's own plan and views, over a pool. With blocks outermost a block is one range in one page or two, whatever
    the kinds of layers are, and otherwise a range in the region of each layer.
    """
    config = a_vllm_config(layout)
    specs = {f"model.layers.{number}.attn": spec for number, spec in enumerate(MODELS[kind])}
    groups = get_kv_cache_groups(config, specs)
    most = {"window": 3 * (2048 // 16 + 1), "hybrid": 128 + 3}.get(kind, 128)
    assert sum(need.most for need in needs_of(config, groups)) <= most
    cache = get_kv_cache_config_from_groups(config, groups, 64 * MIB)
    one = memory.VllmMemory(VllmSettings(model="m"), config, cache)
    source = LocalSource("host", limit="2GiB")
    with source, VirtualMemoryPool(source, 64 * MIB, 2 * MIB) as pool:
        with Capture(pool) as capture:
            views = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout])
        (kept,) = capture.ranges
        assert kept == (0, cache.kv_cache_tensors[0].size)
        parts = Layout(pool.base_address, pool.page_size, cache.num_blocks, one.parts(pool.base_address)).tensors
        assert (len(parts) == 1) == layout.startswith("B")
        for view in views.values():
            for block in (0, 1, cache.num_blocks - 1):
                begin = view[block].data_ptr()
                spans = zip(view[block].shape, view[block].stride(), strict=True)
                end = begin + view.element_size() * (1 + sum((length - 1) * stride for length, stride in spans))
                starts = [(part.address + block * part.stride, part.size) for part in parts]
                assert any(start <= begin and end <= start + size for start, size in starts)
        del views, view


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ([FlashAttentionBackend], "BLNHC"),
        ([CPUAttentionBackend], None),
        ([FlashAttentionBackend, CPUAttentionBackend], None),
    ],
)
def test_blocks_come_outermost_where_the_backends_take_that(
    backends: list[Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "get_current_attn_backends", lambda config: backends)
    assert Membroker.get_required_kvcache_layout(None) == expected


def test_on_blackwell_the_layout_is_one_that_flashinfer_takes() -> None:
    """By vLLM's own choice, in a process in which the GPU says that it is one, and FlashInfer looks installed."""
    code = """
import importlib.machinery, pathlib, re, sys
from types import SimpleNamespace
from unittest.mock import MagicMock, patch
import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

backends = pathlib.Path(vllm.__file__).parent / "v1/attention/backends"
for name in re.findall(r"(?:from|import) (flashinfer[\\w.]*)", (backends / "flashinfer.py").read_text()):
    sys.modules[name] = MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))
from vllm.v1.attention.backends.flashinfer import FlashInferBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from membroker.kv.vllm import connector

connector.get_current_attn_backends = lambda config: [FlashInferBackend]
found = []
for major in (9, 10):
    type(current_platform).get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(major, 0))
    config = VllmConfig()
    config.kv_transfer_config = SimpleNamespace(
        kv_connector="Membroker", kv_connector_module_path="membroker.kv.vllm", kv_connector_extra_config={}
    )
    supported = [layout.name for layout in get_supported_kv_cache_layouts([FlashInferBackend])]
    found.append(resolve_kv_cache_layout(config, [supported]).name)
print(*found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["BLNHC BLHNC"], done.stdout + done.stderr


def test_settings_are_refused_when_vllm_looks_for_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is before it starts a process. The sentence goes to the process that the user has started."""
    told: list[str] = []
    monkeypatch.setattr("membroker.kv.vllm.last_line.tell", lambda error: told.append(str(error)))
    assert not Membroker.requires_piecewise_for_cudagraph({"floor": "1GiB"})
    with pytest.raises(InvalidRequest, match="kv_connector_extra_config has 'limits', and membroker knows: model"):
        Membroker.requires_piecewise_for_cudagraph({"limits": "1GiB"})
    assert len(told) == 1


def test_whatever_touches_weights_keeps_the_engine_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that vLLM's worker does with them. The end of a transfer writes those that no step before has written."""
    from vllm.v1.worker import gpu_worker

    from membroker.kv.vllm import worker

    about = {name for name in vars(gpu_worker.Worker) if "weight" in name and not name.startswith("_")}
    about -= set(worker.USE_WEIGHTS)
    assert about == {"init_weight_transfer_engine", "shutdown_weight_transfer_engine", "supports_draft_weight_updates"}
    done: list[str] = []

    @contextmanager
    def awake() -> Iterator[None]:
        done.append("awake")
        yield
        done.append("it may sleep")

    monkeypatch.setattr(memory, "awake", awake)
    monkeypatch.setattr(gpu_worker.Worker, "finish_weight_update", lambda self: done.append("finish"))
    worker.Worker.finish_weight_update(object.__new__(worker.Worker))
    assert done == ["awake", "finish", "it may sleep"]


class TestSeams:
    def test_this_vllm_has_all_that_is_used(self) -> None:
        assert list(differences(seams.MEMBERS)) == []
        seams.check()

    @pytest.mark.parametrize(
        ("place", "method"), [(one.place, one.name) for one in seams.MEMBERS if one.parameters is not None]
    )
    def test_a_method_with_other_parameters_is_found(
        self, place: str, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The start of the engine then says so, with the version and the method."""
        monkeypatch.setattr(load(place), method, lambda self, other, *rest: None)
        assert len([one for one in differences(seams.MEMBERS) if f"{method} takes (other, rest), not (" in one]) == 1
        with pytest.raises(InvalidRequest, match=rf"written for vLLM 0\.31 to 0\.33, and vLLM .* differs: .*{method}"):
            seams.check()


def test_the_commands_of_the_page_are_vllms() -> None:
    """vLLM's own parser takes the flags of docs/vllm.md, and finds the connector by its name."""
    plugin.register()
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    arrays = re.findall(r"^(?:elastic|ranks)=\((.*?)\)$", page, re.MULTILINE | re.DOTALL)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(shlex.split(" ".join(arrays)))
    assert (given.kv_cache_memory_bytes, given.tensor_parallel_size) == (60 << 30, 2)
    assert len(settings_of(given.kv_transfer_config.kv_connector_extra_config).endpoint) == 2
    assert KVConnectorFactory.get_connector_class(given.kv_transfer_config) is Membroker


def test_what_is_swapped_comes_back_byte_for_byte() -> None:
    """K and V apart, with gaps between blocks."""
    with running({"host_capacity": 2 * MIB}) as daemon, membroker.connect(daemon.endpoint()) as client:
        model = client.model("chat")
        pool = VirtualMemoryPool(model, 4 * MIB, 2 * MIB)
        pool.allocate(0, 4 * MIB)
        keys, values = (Strided(pool.base_address + half * 2 * MIB, 4096, 3000) for half in (0, 1))
        layout, driver = Layout(pool.base_address, 2 * MIB, 16, [keys, values]), model.driver

        def contents(block: int) -> bytes:
            return b"".join(driver.read(one.address + block * one.stride, 4096) for one in (keys, values))

        def fill(block: int, byte: int) -> None:
            for one, more in ((keys, 0), (values, 100)):
                driver.write(one.address + block * one.stride, bytes([byte + more]) * 4096)

        for block in range(8):
            fill(block, block)
        space = SwapSpace(source_of(model), layout, 100_000, on_gpu=False)
        assert model.stats().books["host"].declared_bytes == 16 * 6000
        space.copy([(1, 0), (2, 15)], loads=False)
        fill(1, 91)
        space.copy([(3, 7)], loads=False)
        space.copy([(3, 0), (4, 15)], loads=True)
        space.copy([(5, 7)], loads=True)
        space.copy([], loads=True)
        expected = {1: (91, 91), 2: (2, 2), 3: (1, 3), 4: (2, 4), 5: (3, 5), 6: (6, 6)}  # of the block, and of its gap
        for block, (byte, gap) in expected.items():
            halves = [bytes([byte + more]) * 3000 + bytes([gap + more]) * 1096 for more in (0, 100)]
            assert contents(block) == b"".join(halves), f"block {block}"
        space.close()
        assert model.stats().books["host"].declared_bytes == 0
