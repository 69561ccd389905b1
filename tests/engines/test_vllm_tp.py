"""Real vLLM with tensor parallelism over two brokers, one for each rank: the tokens are those of plain vLLM.

On a CPU and the host driver, or on two GPUs, where plain vLLM has two ranks as well. A block that is used without
memory in one rank ends that rank, and so its engine.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import Daemon, until
from tests.support.engine_batches import Story, batch_of, batches_of, story_of
from tests.support.sleeping import command, done
from tests.support.vllm_engine import Build, Engine, write_model
from tests.support.workers import children, proc_of

import membroker
from membroker.kv.state import ASK_GROUPS

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it")
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, slots=True)
class Ranks:
    """An engine whose two ranks have a broker each, with the story that it plays. Sizes in bytes are of one rank."""

    story: Story
    engine: Engine
    daemons: list[Daemon]

    def check(self, name: str) -> None:
        self.story.check(self.engine, name)

    @property
    def left(self) -> int:
        """What the engine has when the other tenant has its guarantee."""
        return 16 * self.story.unit

    @property
    def burst(self) -> int:
        return self.story.burst // 2

    def fill(self) -> None:
        """Let bursts come until the cache has what one needs: on a busy machine the first can end before that."""

        def is_filled() -> bool:
            self.check("burst")
            return min(self.peaks()) >= self.burst and min(self.used()) >= self.burst - self.story.group

        until(is_filled)

    def used(self) -> list[int]:
        return [one.books[0].used_bytes for daemon in self.daemons for one in daemon.models() if "/chat" in one.name]

    def peaks(self) -> list[int]:
        """The most bytes that it has had of each."""
        return [one.books[0].peak_bytes for daemon in self.daemons for one in daemon.models() if "/chat" in one.name]

    def take_guarantee(self, stack: ExitStack) -> None:
        """Let another tenant of the second broker have what it is guaranteed, until the stack is closed."""
        owner = stack.enter_context(membroker.connect(self.daemons[1].endpoint("blue"))).model("owner")
        stack.enter_context(owner.allocate(48 * self.story.unit, timeout=600.0))


@pytest.fixture(scope="module")
def ranks(build: Build, in_place: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    batches, model = batches_of(build.times), write_model(tmp_path_factory.mktemp("model"), build.config)
    if not build.on_gpu:  # its ranks take all of two cores, so a recall is answered slowly
        batches["long"] = batch_of(5, 32, 100, 600)
    options: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "environment": {**in_place, "VLLM_LOGGING_LEVEL": "DEBUG"},
    }
    tenants = {"red": {}, "blue": {"guarantee": 48 * build.unit}}
    lent = {"capacity": 64 * build.unit, "host_capacity": 32 * build.unit}
    config = {**lent, "tenants": tenants, "recall_seconds": 600.0}
    with ExitStack() as stack:
        daemons = [stack.enter_context(build.running(config, device)) for device in range(2)]
        endpoints = {"endpoint": [str(one.endpoint()) for one in daemons]}
        settings = {"model": "chat", "keep": 1 << 40, "swap_space": 32 * build.unit, **endpoints}
        shared = {"load_format": "membroker", "model_loader_extra_config": endpoints}
        # Two more ranks would look for work all the time, with a core each: on a CPU, plain vLLM has one process.
        plain = stack.enter_context(
            Engine(build, model, enable_prefix_caching=False, **(options if build.on_gpu else {}))
        )
        engine = stack.enter_context(Engine(build, model, Path("/nowhere"), settings, fresh=True, **shared, **options))
        asked = {name: batches[name] for name in ("one", "burst", "long")}
        story = story_of(Engine, build, model, asked, plain.ready())
        yield Ranks(story, engine.ready(), daemons)


def test_each_rank_has_its_weights_at_its_own_broker(ranks: Ranks) -> None:
    """With `--load-format membroker` beside it."""
    for daemon in ranks.daemons:
        with membroker.connect(daemon.endpoint(), observer=True) as client:
            assert len([one for one in client.segments() if "/weights-" in one.name]) == 1


def test_an_operator_puts_all_ranks_to_sleep(ranks: Ranks) -> None:
    """At the broker of either rank. The shared weights stay, and the answer says so."""
    ranks.check("one")
    for daemon in ranks.daemons:
        said = done(command(daemon, "sleep", "red/chat"))
        assert "weights kept: other engines may use the same ones (--load-format membroker)" in said
        assert ranks.used() == [0, 0]
        ranks.check("one")
        assert min(ranks.used()) > 0


def test_the_ranks_grow_and_shrink_together_with_the_same_tokens(ranks: Ranks) -> None:
    """A burst, and then a recall by the second broker while the engine is idle and makes no step: its prefixes go."""
    ranks.check("one")
    ranks.fill()
    with ExitStack() as stack:
        ranks.take_guarantee(stack)
        until(lambda: max(ranks.used()) <= ranks.left)


def test_a_rank_that_is_refused_keeps_the_other_from_using_the_group(ranks: Ranks) -> None:
    """The second broker has little left. The burst waits inside vLLM, and the first broker lends hardly more."""
    with ExitStack() as stack:
        ranks.take_guarantee(stack)
        until(lambda: max(ranks.used()) <= ranks.left)
        ranks.engine.ask(*ranks.story.batches["burst"])
        while ranks.engine.is_busy:
            first, second = ranks.used()
            assert second <= ranks.left
            asked = ASK_GROUPS * ranks.story.group
            assert first <= ranks.left + asked, "more than what is borrowed at the moment"
        ranks.story.compare(ranks.engine.answer(), "burst")
    ranks.fill()


def test_a_recall_by_the_second_broker_amid_a_burst(ranks: Ranks) -> None:
    """vLLM preempts, and each rank has its part of the KV cache back from host memory."""
    ranks.engine.ask(*ranks.story.batches["long"])
    until(lambda: min(ranks.used()) > ranks.left)
    with ExitStack() as stack:
        ranks.take_guarantee(stack)
        assert max(ranks.used()) <= ranks.left + ASK_GROUPS * ranks.story.group
        assert ranks.engine.is_busy, "the memory came when the requests had ended"
    ranks.story.compare(ranks.engine.answer(), "long")
    assert re.search(r"[1-9]\d* return", ranks.engine.log()), "preempted requests were computed again"


def test_a_broker_is_killed_in_a_burst(ranks: Ranks) -> None:
    """Nothing happens but that growth waits: the next burst, or one soon after, has all of its memory again."""
    ranks.engine.ask(*ranks.story.batches["long"])
    until(lambda: min(ranks.used()) > ranks.left)
    ranks.daemons[1].kill()
    ranks.daemons[1].start_again()
    ranks.story.compare(ranks.engine.answer(), "long")
    ranks.fill()


def test_a_rank_is_killed(ranks: Ranks) -> None:
    """The engine ends, as plain vLLM does, and both brokers have their memory back. This is the last test."""
    (rank,) = [pid for pid in _below(ranks.engine.process.pid) if "VLLM::Worker_TP1" in _title(pid)]
    ranks.engine.ask(*ranks.story.batches["long"])
    until(lambda: min(ranks.used()) > ranks.story.group)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(AssertionError, match="the engine ended"):
        ranks.engine.answer()
    until(lambda: sum(ranks.used()) == 0)


def _below(pid: int) -> list[int]:
    """Return the children of a process, and those below these."""
    found: list[int] = []
    for child in children(pid):
        found += [child, *_below(child)]
    return found


def _title(pid: int) -> str:
    return proc_of(pid, "cmdline").replace("\0", " ")
