"""vLLM's own scheduler over an elastic cache, short of memory: it preempts no more than over memory of its own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, running
from tests.support.seeds import chosen_seed
from tests.support.sizes import MIB

import membroker

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")
from tests.support.toy_serving import Urgent
from tests.support.vllm_scheduling import BLOCK, BLOCK_TOKENS, PAGE, PAGES, Scheduling
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

LIMIT = 80 << 20
MakeScheduling = Callable[..., Scheduling]
WHOLE = PAGES * PAGE
"""With this limit every block can have memory."""
REQUESTS = 128, 1024, 256
"""About eight times as many as have room, of so many tokens each, with so long answers."""


@pytest.fixture
def elastic_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeScheduling]:
    """Return a function that makes a scheduler whose cache is elastic, over a broker of its own."""
    with ExitStack() as stack:

        def make(limit: int = LIMIT, **options: Any) -> Scheduling:
            daemon = stack.enter_context(running({"capacity": 2 * WHOLE}))
            client = stack.enter_context(membroker.connect(daemon.endpoint()))
            made = Scheduling(tmp_path, monkeypatch, model=client.model("chat", limit=limit), **options)
            stack.callback(made.cache.close)
            return made

        yield make


def test_a_full_cache_preempts_as_plain_vllm_does(
    elastic_with: MakeScheduling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps overlap on a GPU. A connector that consumes makes vLLM preempt until a whole step is over."""
    plain = Scheduling(tmp_path, monkeypatch, blocks=LIMIT // BLOCK)
    plain.serve(*REQUESTS)
    assert plain.preemptions > 10, "the requests fit: nothing is shown"
    elastic = elastic_with()
    _fill(elastic)
    elastic.serve(*REQUESTS)
    print(f"preemptions: {plain.preemptions} plain, {elastic.preemptions} elastic")
    assert elastic.preemptions < 2 * plain.preemptions
    assert elastic.tokens < 1.2 * plain.tokens


def test_what_is_preempted_is_computed_once(elastic_with: MakeScheduling) -> None:
    """With room in host memory a request goes on where it was, but for its last block or two."""
    tokens = []
    for swap_space in (None, 2 * LIMIT):
        elastic = elastic_with(swap_space=swap_space)
        _fill(elastic)
        elastic.serve(*REQUESTS)
        again = elastic.tokens - REQUESTS[0] * (REQUESTS[1] + REQUESTS[2] - 1)
        tokens.append(again / elastic.preemptions)
    print(f"a request that was preempted computed {tokens[0]:.0f} tokens again, and {tokens[1]:.0f} with swap space")
    assert tokens[0] > REQUESTS[1] / 2  # some were preempted before their whole prompt was computed
    assert tokens[1] <= 2 * BLOCK_TOKENS


@pytest.mark.parametrize("recalled", [False, True], ids=["", "during a recall"])
def test_new_weights_compute_all_requests_again(recalled: bool, elastic_with: MakeScheduling) -> None:
    """vLLM preempts all that run, and its engine ends if a block is still in use then. Most have no memory here.

    What was preempted before has old contents in host memory, and does not use them. Nor is any prefix found again.
    """
    elastic = elastic_with(caches_prefixes=True, swap_space=WHOLE)
    _fill(elastic)  # else a recall may find memory that has just come
    for number in range(100):
        elastic.ask(str(number), [1 + number % 3] * 1000, 256)
    connector = elastic.scheduler.connector
    while not connector._swap._kept:
        elastic.cache.wait(0.1)  # returns when there is more memory
        assert elastic.step()
    if recalled:
        Urgent(elastic.cache, LIMIT // 4)
        assert elastic.step()
    assert bool(connector._blocks._squeezed) == recalled
    assert elastic.change_weights()
    assert connector._swap._kept
    before = elastic.loaded
    while elastic.step():
        pass
    print(f"{elastic.loaded - before} blocks came back later")
    assert elastic.slots == list(range(WHOLE // BLOCK))


def test_a_session_that_is_preempted_in_its_last_step_keeps_no_slot(elastic_with: MakeScheduling) -> None:
    """vLLM 0.32 then leaves it in none of its queues, with the tokens of its next part alone, until it is aborted."""
    options = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False)
    elastic = elastic_with(swap_space=LIMIT)
    scheduler = elastic.scheduler
    for attempt in range(BLOCK_TOKENS):  # it is preempted when an older one wants a block, in one of so many steps
        old, name = f"old {attempt}", f"session {attempt}"
        elastic.ask(old, [2] * (500 + attempt), 400)
        while not scheduler.running:
            elastic.cache.wait(0.1)
            elastic.step()
        scheduler.add_request(Request(name, [1] * 1000, options, None, resumable=True))
        session = scheduler.requests[name]
        while session.num_output_tokens < 19:
            elastic.cache.wait(0.01)
            elastic.step()
        blocks = scheduler.connector._blocks
        blocks.preempt(blocks._table(name))
        elastic.step()
        if session.num_preemptions:
            break
        scheduler.finish_requests([old, name], RequestStatus.FINISHED_ABORTED)
        while elastic.step():
            pass
    assert scheduler.connector._swap._kept
    elastic.step()
    scheduler.add_request(Request(name, [3] * 50, options, None, resumable=True))
    elastic.forget(name)
    for _ in range(10):
        elastic.step()
    scheduler.finish_requests([old, name], RequestStatus.FINISHED_ABORTED)
    while elastic.step():
        pass
    assert elastic.slots == list(range(LIMIT // BLOCK))


def test_a_recall_during_a_step_is_answered_by_the_next_one(elastic_with: MakeScheduling) -> None:
    """One step is under way then. No request fills a block in the next one: it preempts all the same."""
    requests = 100
    elastic = elastic_with(WHOLE)
    blocks = elastic.cache.layout.blocks
    assert elastic.cache.prepare(blocks, DEADLINE_SECONDS)
    elastic.add(requests, 4 * BLOCK_TOKENS, 200)  # all in one batch, so that they fill blocks in the same steps
    running_now = elastic.scheduler.running
    while len(running_now) < requests or running_now[0].num_computed_tokens % BLOCK_TOKENS != 4:
        assert elastic.step()
    assert len({one.num_computed_tokens for one in running_now}) == 1
    elastic.before_end = lambda: Urgent(elastic.cache, WHOLE * 15 // 16)
    elastic.step()
    assert not elastic.preemptions, "this step was scheduled before the recall"
    elastic.step()
    print(f"{elastic.preemptions} requests were preempted")
    assert elastic.preemptions > requests / 2


@pytest.mark.parametrize("window", [0, 200], ids=["", "window"])
@pytest.mark.parametrize("swap_space", [None, 3 * MIB, LIMIT], ids=["no-swap", "little-swap", "swap"])
def test_no_block_is_lost_while_memory_comes_and_goes(
    swap_space: int | None, window: int, elastic_with: MakeScheduling
) -> None:
    """Requests with common prefixes come, end and are aborted, amid recalls. Each step every reference is counted."""
    seed = chosen_seed()
    dice, text = random.Random(seed), [7] * 400
    elastic = elastic_with(caches_prefixes=True, swap_space=swap_space, window=window)
    squeezed = 0
    for number in range(1500):
        if dice.random() < 0.15 and len(elastic.scheduler.requests) < 60:
            for part in range(dice.randint(1, 8)):
                prompt = [
                    *text[: dice.choice((0, 160, 320, 400))],
                    *dice.choices(range(1, 900), k=dice.randint(1, 500)),
                ]
                elastic.ask(f"{number} {part}", prompt, dice.randint(1, 250))
        elif dice.random() < 0.05 and elastic.scheduler.requests:
            name = dice.choice(list(elastic.scheduler.requests))
            elastic.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        elif dice.random() < 0.06:
            Urgent(elastic.cache, dice.randint(1, LIMIT // 2 // MIB) * MIB)
        if elastic.step():
            squeezed += _check_references(elastic.scheduler)
    while elastic.step():
        pass
    print(f"{squeezed} steps with a recall, {elastic.preemptions} preemptions, {elastic.loaded} blocks came back")
    assert squeezed
    assert elastic.preemptions
    assert (elastic.loaded > 0) == (swap_space is not None)
    assert elastic.slots == list(range((swap_space or 0) // BLOCK)), "a slot was lost, or is free twice"


def _fill(elastic: Scheduling) -> None:
    """Let all memory of the limit come. Steps without a model are over before it has, on a busy machine."""
    assert elastic.cache.prepare(LIMIT // BLOCK, DEADLINE_SECONDS)


def _check_references(scheduler: Any) -> bool:
    """Compare what membroker counts with vLLM's tables; return whether it keeps blocks, so that vLLM preempts."""
    pool, blocks = scheduler.kv_cache_manager.block_pool, scheduler.connector._blocks
    manager = scheduler.kv_cache_manager
    tables = {name: manager.get_block_ids(name) for name in scheduler.requests}
    used = Counter(block for table in tables.values() for group in table for block in group if block)
    kept = Counter(block.block_id for block in blocks._squeezed)
    held = [block for block in pool.blocks[1:] if block.ref_cnt - used[block.block_id] - kept[block.block_id]]
    assert all(block.ref_cnt - used[block.block_id] - kept[block.block_id] == 1 for block in held)
    assert len(held) + len(kept) + bool(kept) == len(pool.blocks) - pool.num_gpu_blocks
    free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
    assert free == {block.block_id for block in pool.blocks[1:] if not block.ref_cnt}
    assert set(blocks._running) == {name for name, table in tables.items() if any(table)}
    running = [name for name in blocks._running if blocks._can_preempt(name)]
    assert running == [one.request_id for one in scheduler.running], "in vLLM's order: the last is preempted first"
    return bool(kept)
