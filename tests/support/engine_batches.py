"""What real engines are asked in the tests, and how their tokens are compared with those of the plain engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
