"""The parts of the SGLang integration with SGLang's own classes: its allocator, its prefix cache, its signatures."""

from __future__ import annotations

from array import array
from contextlib import closing
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.daemons import until
from tests.support.toy_serving import Recalled, an_engine, serving

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry

from membroker import ClosedError, InvalidRequest, SessionLost
from membroker.kv.seams import differences
from membroker.kv.sglang import hooks, seams
from membroker.kv.sglang.allocator import Allocator
from membroker.kv.sglang.blocks import SglangBlocks
from membroker.kv.sglang.memory import SglangMemory
from membroker.kv.sglang.settings import VARIABLE, SglangSettings

PAGE, PAGES = 4, 16


@pytest.fixture
def allocator() -> Allocator:
    plain = PagedTokenToKVPoolAllocator((PAGES - 1) * PAGE, PAGE, torch.float32, "cpu", None, False)
    return Allocator(plain)


@pytest.fixture
def tree(allocator: Allocator) -> UnifiedRadixCache:
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="python",
        )
    )


@pytest.fixture
def scheduler(tree: UnifiedRadixCache) -> Any:
    running = SimpleNamespace(reqs=[], is_empty=lambda: not running.reqs, batch_is_full=False)
    return SimpleNamespace(
        tree_cache=tree,
        running_batch=running,
        chunked_req=None,
        waiting_queue=[],
        max_running_requests=4,
        new_token_ratio_tracker=SimpleNamespace(current=0.5),
    )


@pytest.fixture
def blocks(scheduler: Any, allocator: Allocator) -> SglangBlocks:
    return SglangBlocks(scheduler, allocator, lambda: SimpleNamespace())  # type: ignore[arg-type, return-value]


def a_request(prompt: int, answer: int = 0, most: int = 8, allocated: int = 0, ignore_eos: bool = False) -> Any:
    return SimpleNamespace(
        origin_input_ids=[1] * prompt,
        output_ids=[1] * answer,
        sampling_params=SimpleNamespace(max_new_tokens=most, ignore_eos=ignore_eos),
        kv=SimpleNamespace(kv_allocated_len=allocated, kv_committed_len=allocated, req_pool_idx=None),
        finished=lambda: False,
        to_finish=None,
        beam_group=None,
        rid="one",
    )


def key(*tokens: int) -> RadixKey:
    return RadixKey(array("q", tokens))


def cache(tree: UnifiedRadixCache, allocator: Allocator, *tokens: int) -> list[int]:
    slots = allocator.alloc(len(tokens))
    tree.insert(InsertParams(key=key(*tokens), value=slots))
    return [int(slot) // PAGE for slot in slots[::PAGE]]


def matched(tree: UnifiedRadixCache, *tokens: int) -> Any:
    found = tree.match_prefix(MatchPrefixParams(key=key(*tokens)))
    is_old = hasattr(found, "device_indices")  # 0.5.21
    return found.device_indices if is_old else tree.path_device_indices(found.last_device_node)


def pages_of(slots: Any) -> list[int]:
    return sorted({int(slot) // PAGE for slot in slots})


class TestAllocator:
    def test_it_has_no_page_before_it_is_given_one(self, allocator: Allocator) -> None:
        assert (allocator.available_size(), allocator.alloc(PAGE)) == (0, None)
        allocator.release([3, 5, 4])
        assert allocator.available_size() == 3 * PAGE
        assert pages_of(allocator.alloc(2 * PAGE)) == [3, 4]
        assert allocator.alloc(2 * PAGE) is None
        assert allocator.available_size() == PAGE
        assert allocator.get_all_free_pages().tolist() == [5]

    def test_a_page_in_use_is_never_held(self, allocator: Allocator) -> None:
        allocator.release([1, 2])
        allocator.alloc(PAGE)
        with pytest.raises(AssertionError, match="in use"):
            allocator.hold([1])
        allocator.hold([2])
        with pytest.raises(AssertionError, match="only a held page"):
            allocator.release([1])
        with pytest.raises(AssertionError, match="without memory"):
            allocator.free(torch.arange(2 * PAGE, 3 * PAGE))


def test_an_engine_ends_that_can_borrow_no_more(blocks: SglangBlocks, scheduler: Any) -> None:
    """The broker has forgotten its session. What runs goes on, and the first request that finds nothing ends it."""

    def unknown() -> None:
        raise SessionLost("the broker does not know this session")

    scheduler.running_batch.reqs.append(a_request(8, allocated=8))
    scheduler.waiting_queue.append(a_request(40))
    lender = Recalled()
    with closing(lender.device), closing(lender.driver), serving(lender, an_engine()) as cache:
        memory: Any = SglangMemory.__new__(SglangMemory)
        memory.blocks, memory._cache, memory._sleeper = blocks, cache, SimpleNamespace(wake=lambda: None)
        lender.before_borrow = unknown
        cache.want(20)
        until(lambda: not cache._threads[0].is_alive())
        memory.turn(scheduler, scheduler.running_batch, None)
        scheduler.running_batch.reqs.clear()
        with pytest.raises(ClosedError):
            memory.turn(scheduler, scheduler.running_batch, None)


class TestPrefixes:
    def test_a_cached_page_is_unused_until_a_request_locks_it(
        self, tree: UnifiedRadixCache, allocator: Allocator, blocks: SglangBlocks
    ) -> None:
        allocator.release(range(1, 9))
        pages = cache(tree, allocator, *range(2 * PAGE))
        assert list(blocks.unused(range(1, 9))) == list(range(1, 9))
        assert blocks.warmth(pages) > 0 == blocks.warmth([3])
        found = tree.match_prefix(MatchPrefixParams(key=key(*range(2 * PAGE))))
        tree.inc_lock_ref(found.last_device_node)
        blocks.begin(blocks._running, None)
        assert list(blocks.unused(range(1, 9))) == list(range(3, 9))
        assert blocks.warmth(pages) == 0

    def test_what_is_held_is_forgotten_with_what_continues_it(
        self, tree: UnifiedRadixCache, allocator: Allocator, blocks: SglangBlocks
    ) -> None:
        """A request would read it without memory. Pages that were not asked for are free then."""
        allocator.release(range(1, 9))
        trunk = cache(tree, allocator, *range(2 * PAGE))
        value = matched(tree, *range(2 * PAGE))
        for branch in (100, 200):
            more = allocator.alloc(PAGE)
            longer = key(*range(2 * PAGE), *[branch] * PAGE)
            tree.insert(InsertParams(key=longer, value=torch.cat([value, more]), prev_prefix_len=2 * PAGE))
        other = cache(tree, allocator, *[300] * PAGE)
        assert tree.evictable_size() == 5 * PAGE
        blocks.hold(trunk[:1])
        assert tree.evictable_size() == PAGE
        assert len(matched(tree, *range(2 * PAGE))) == 0
        assert len(matched(tree, *[300] * PAGE)) == PAGE
        assert allocator.available_size() == (8 - 1 - 1) * PAGE
        assert not allocator.is_free([trunk[0], other[0]]).any()

    def test_a_part_that_was_split_is_known(
        self, tree: UnifiedRadixCache, allocator: Allocator, blocks: SglangBlocks
    ) -> None:
        allocator.release(range(1, 9))
        pages = cache(tree, allocator, *range(3 * PAGE))
        assert set(pages) <= set(blocks.unused(range(1, 9)))
        found = tree.match_prefix(MatchPrefixParams(key=key(*range(PAGE))))
        tree.inc_lock_ref(found.last_device_node)
        blocks.begin(blocks._running, None)
        assert set(blocks.unused(pages)) == set(pages[1:])
        blocks.hold(pages[2:])
        assert tree.evictable_size() == 0


class TestNeed:
    def test_it_is_what_runs_and_a_page_ahead(self, scheduler: Any, allocator: Allocator, blocks: SglangBlocks) -> None:
        assert blocks.need() == 1, "page 0"
        allocator.release(range(1, 9))
        allocator.alloc(3 * PAGE)
        scheduler.running_batch.reqs.append(a_request(10, most=100, allocated=12))
        assert blocks.need() == 1 + 3 + 1
        scheduler.running_batch.reqs.append(a_request(10, answer=7, most=8, allocated=17))
        assert blocks.need() == 1 + 3 + 2, "a token is left of the answer"

    def test_requests_that_wait_are_admitted_with_it(
        self, scheduler: Any, tree: UnifiedRadixCache, allocator: Allocator, blocks: SglangBlocks
    ) -> None:
        """SGLang's own rule: prompt, answer and a page must fit beside what the running ones may generate."""
        from sglang.srt.managers.schedule_policy import PrefillAdder

        allocator.release(range(1, 3))
        allocator.alloc(2 * PAGE)
        running = a_request(7, answer=1, most=17, allocated=8)
        scheduler.running_batch.reqs.append(running)
        waiting = a_request(9, most=10)
        scheduler.waiting_queue.append(waiting)
        need = blocks.need()
        allocator.release(range(3, need))
        offset = (17 - 1) * 0.5
        total = 9 + 10 + PAGE
        assert total < allocator.available_size() - offset
        assert allocator.available_size() - offset - 3 * PAGE <= total, "and not with much less"
        assert PrefillAdder._get_running_request_total_token_offset(
            SimpleNamespace(new_token_ratio=0.5), running
        ) == pytest.approx(offset)

    def test_the_rest_of_a_prompt_is_kept_from_a_recall(
        self, scheduler: Any, tree: UnifiedRadixCache, allocator: Allocator, blocks: SglangBlocks
    ) -> None:
        """SGLang computes long prompts in parts, and ends with an error if the next part has no room."""
        allocator.release(range(1, 9))
        pages = cache(tree, allocator, *range(PAGE))
        allocator.alloc(PAGE)
        scheduler.chunked_req = a_request(3 * PAGE, allocated=PAGE)
        assert list(blocks.unused(range(1, 9))) == [*pages, 7, 8], "2 pages of the prompt and 2 more are kept"
        allocator.alloc(3 * PAGE)
        assert list(blocks.unused(range(1, 9))) == [], "what is cached may have to give way"
        assert blocks.need() >= 1 + 4 + 2


class TestPools:
    """SGLang's own pools over addresses: each page of tokens is in as many pages of memory as a layout says."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2], ids=str)
    @pytest.mark.parametrize(
        ("kind", "shape", "row"),
        [
            (MHATokenToKVPool, {"head_num": 8, "head_dim": 64, "v_head_dim": 64}, 8 * 128),
            (MHATokenToKVPool, {"head_num": 8, "head_dim": 64, "v_head_dim": 32}, 8 * 96),
            (MLATokenToKVPool, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 576),
        ],
        ids=["keys and values", "narrow values", "MLA"],
    )
    def test_a_block_has_the_bytes_of_its_tokens_in_all_layers(
        self, kind: Any, shape: dict[str, int], row: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory: Any = SglangMemory.__new__(SglangMemory)
        opened: list[Any] = []
        memory.settings, memory._open = SglangSettings(), lambda *found: opened.extend(found)
        create = kind._create_buffers
        monkeypatch.setattr(kind, "_create_buffers", lambda kvcache: memory.create_buffers(create, kvcache))
        lender = memory._model = Recalled()
        with closing(lender.device), closing(lender.driver):
            kind(16384, 32, dtype, layer_num=3, device="cpu", enable_memory_saver=False, **shape)
            pool, layout, tokens = opened
            with closing(pool):
                assert (layout.blocks, tokens) == (513, 32)
                assert layout.block_bytes == 32 * row * dtype.itemsize * 3
                assert sum(map(layout.bytes_of, range(layout.groups))) <= pool.capacity


def test_the_installed_sglang_has_what_is_relied_on() -> None:
    assert list(differences(seams.MEMBERS)) == []


def test_a_missing_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(UnifiedRadixCache, "_evict_device_leaf")
    with pytest.raises(InvalidRequest, match=r"written for SGLang 0\.5\.21 to 0\.5\.\d+, and .* has no _evict_device"):
        seams.check()


def test_an_engine_without_one_of_the_hooks_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs a hook that it cannot apply, and goes on without it."""
    monkeypatch.setenv(VARIABLE, "{}")
    monkeypatch.setattr(HookRegistry, "_patched", set(list(hooks.HOOKS)[1:]))
    with pytest.raises(InvalidRequest, match=r"did not apply membroker's hook on .*load_model"):
        hooks._load_model(SimpleNamespace())


def test_all_hooks_find_their_targets() -> None:
    import pkgutil

    for target in hooks.HOOKS:
        assert callable(pkgutil.resolve_name(target))
