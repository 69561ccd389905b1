"""What real engines are asked in the tests, and how their tokens are compared with those of the plain engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.support.daemons import Daemon

ROUNDING = {"bfloat16": 0.25, "float32": 0.001}
"""How much less likely than the likeliest a token may be, as a difference of logarithms. A wrong one is far off.

In float32, a product of one to three rows differs from the same rows of a larger product by 2e-5 (torch 2.11 on a CPU).
"""
Batch = tuple[list[list[int]], int]
"""Prompts, and the number of tokens that follow each."""


class Plain(Protocol):
    """An engine without membroker, which judges tokens. `rounding` is that of its numbers."""

    rounding: float

    def gaps(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Any:
        """Return for each answer by how much a token of it is less likely than the likeliest, as logarithms."""


def batch_of(seed: int, count: int, length: int, tokens: int, shared: int = 0) -> Batch:
    """`count` prompts of `length` tokens, the first `shared` of which are the same."""
    rng = random.Random(seed)
    prefix = [rng.randrange(3, 512) for _ in range(shared)]
    return [prefix + [rng.randrange(3, 512) for _ in range(length - shared)] for _ in range(count)], tokens


def batches_of(times: int) -> dict[str, Batch]:
    """The batches by name: `burst` is to fill a cache, and is `times` as large on a GPU."""
    return {
        "one": batch_of(1, 1, 200, 16),
        "burst": batch_of(2, 16 * times, 500, 48),
        "shared": batch_of(3, 8 * times, 400, 16, shared=320),
        "few": batch_of(4, 2 * times, 500, 32),
        "long": batch_of(5, 16, 100, 600 if times == 1 else 4800),
    }


def compare(
    name: str,
    answer: Any,
    expected: Any,
    plain: Plain,
    prompts: Sequence[Sequence[int]],
    tell: Callable[[str, str], object] = print,
) -> None:
    """Fail if an answer has a wrong token.

    Kernels round by how a batch is composed, so tokens that are nearly alike swap. Of an answer that differs, `plain`
    says how much less likely than the likeliest its tokens are.
    """
    wrong = [at for at, pair in enumerate(zip(answer, expected, strict=True)) if pair[0] != pair[1]]
    assert [len(one) for one in answer] == [len(one) for one in expected]
    if wrong:
        gaps = plain.gaps([prompts[at] for at in wrong], [answer[at] for at in wrong])
        tell(f"{name}: {len(wrong)} of {len(answer)} answers differ, by rounding", f"{max(gaps):.6f} at most")
        wrong = [at for at, gap in zip(wrong, gaps, strict=True) if gap > plain.rounding]
    assert not wrong, f"{len(wrong)} of {len(answer)} answers to {name!r} differ, the first of them {wrong[:5]}"


@dataclass(frozen=True, slots=True)
class Story:
    """A build with its model, and what the plain engine answers to each batch. `start` makes an engine."""

    start: Callable[..., Any]
    build: Any
    model: Path
    batches: Mapping[str, Batch]
    expected: Mapping[str, Any]
    plain: Any
    seconds: Mapping[str, float]
    """How long the plain engine took for each batch."""
    state: Callable[[str, str], object] = print

    def engine(self, *args: Any, **options: Any) -> Any:
        return self.start(self.build, self.model, *args, **options)

    def check(self, engine: Any, name: str) -> float:
        """Let an engine answer a batch, and compare the tokens; return how many seconds it took."""
        began = time.monotonic()
        answer = engine.generate(*self.batches[name])
        seconds = time.monotonic() - began
        self.compare(answer, name)
        return seconds

    def fill(self, engine: Any, is_filled: Callable[[], bool]) -> float:
        """Let bursts come until memory for a whole one has come, too; return how many seconds the first one took.

        A burst ends with less if memory comes slowly: on a busy machine its first requests end before the last ones
        begin.
        """
        seconds = self.check(engine, "burst")
        while not is_filled():
            self.check(engine, "burst")
        return seconds

    def compare(self, answer: Any, name: str) -> None:
        """Compare answers with the plain engine's. It composes other batches of them, and kernels round by that."""
        compare(name, answer, self.expected[name], self.plain, self.batches[name][0], self.state)

    @property
    def unit(self) -> int:
        return int(self.build.unit)

    @property
    def group(self) -> int:
        return int(self.build.group)

    @property
    def burst(self) -> int:
        """Bytes of KV cache that the burst fills."""
        return 16 * 548 * int(self.build.times * self.build.token_bytes)


def story_of(start: Callable[..., Any], build: Any, model: Path, batches: Mapping[str, Batch], plain: Any) -> Story:
    """Let the plain engine answer all batches. The caller ends it."""
    expected, seconds = dict[str, Any](), dict[str, float]()
    for name, batch in batches.items():
        began = time.monotonic()
        expected[name] = plain.generate(*batch)
        seconds[name] = time.monotonic() - began
    assert len({tuple(one) for one in expected["burst"]}) > len(expected["burst"]) / 2, "the answers are all alike"
    return Story(start, build, model, batches, expected, plain, seconds)


def used(daemon: Daemon, model: str) -> int:
    return sum(one.books[0].used_bytes for one in daemon.models() if one.name.endswith(f"/{model}"))


def peak(daemon: Daemon, model: str) -> int:
    """The most bytes that a model has borrowed: a burst fills its cache for a moment only."""
    return max(one.books[0].peak_bytes for one in daemon.models() if one.name.endswith(f"/{model}"))
