"""What was measured of each model, from the answers of its client and the books of the broker. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..harness.samples import quantile

SLO_TTFT_SECONDS = 1.0
SLO_TPOT_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment, in seconds since the trace began: what each model has borrowed, and what the device has in use."""

    moment: float
    borrowed: Mapping[str, int]
    in_use: int | None
    pressure: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Bytes of each model that wait, that the broker has asked for, and that were not released in time."""


@dataclass(slots=True)
class ModelFigures:
    """One model in one run. Times in seconds; infinite where requests that were not answered count."""

    model: int
    requests: int
    unfinished: int
    ttft: tuple[float, float, float]
    """p50, p90, p99, from the time at which a request was due."""
    within: float
    """The part of the requests with their first token within `SLO_TTFT_SECONDS`."""
    tpot: tuple[float, float]
    """p50, p99: of each request, the mean time of a token after the first."""
    gap: float
    """p99 over the requests of the longest time between two outputs."""
    good_per_second: float
    """Requests a second that met both objectives."""
    tokens_per_second: float
    preemptions: int
    peak_bytes: int
    mean_bytes: float
    rest_bytes: int
    """Borrowed just before the trace."""
    idle_bytes: int | None
    """Borrowed one second after the last answer; None if that was not seen."""
    refusals: int
    starved_seconds: float = 0.0
    """How long it waited for memory while it had less than its guarantee."""
    wrong: int | None = None
    """Answers of the sample that differ from plain vLLM's."""
    same: tuple[int, int] | None = None
    """How many answers under load are plain vLLM's, and of how many: all are with batch-invariant kernels only."""


@dataclass(slots=True)
class Run:
    """One arm through one trace: the figures of its models, and what they were made of."""

    arm: str
    trace: str
    load: float
    seed: int
    seconds: float
    start_seconds: list[float]
    cache_tokens: list[int]
    """How many tokens the KV cache of each model can have, as vLLM says."""
    models: list[ModelFigures]
    unloaded: list[float]
    """TTFT and TPOT of one request at a time, of the first model."""
    peak_in_use: int | None
    samples: list[Sample] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[list[list[list[int]]]] = field(default_factory=list)
    """Of each model, the tokens of the sample before the trace, and after it."""
    engine: str = ""
    """The version of vLLM, as the engine of the first model says."""


def ttft(answer: Mapping[str, Any]) -> float:
    """Return the time to the first token. A request that was not answered in full has none."""
    return answer["first"] - answer["due"] if answer["is_finished"] else math.inf


def tpot(answer: Mapping[str, Any]) -> float:
    """Return the mean time of a token after the first."""
    return (answer["last"] - answer["first"]) / max(1, answer["tokens"] - 1) if answer["is_finished"] else math.inf


def is_good(answer: Mapping[str, Any]) -> bool:
    """Return whether a request met both objectives."""
    return ttft(answer) <= SLO_TTFT_SECONDS and tpot(answer) <= SLO_TPOT_SECONDS


def of_model(
    model: int,
    told: Mapping[str, Any],
    samples: Sequence[Sample],
    seconds: float,
    refusals: int,
    static_bytes: int | None,
    guarantee: int = 0,
) -> ModelFigures:
    """Return the figures of a model. `static_bytes` is what it has all the time, if it borrows nothing."""
    answers = told["answers"]
    firsts = [ttft(answer) for answer in answers]
    finished = [answer for answer in answers if answer["is_finished"]]
    each = [tpot(answer) for answer in finished]
    last = max((answer["last"] for answer in finished), default=seconds)
    busy = last - min((answer["due"] for answer in answers), default=0.0)
    borrowed = [(one.moment, one.borrowed.get(f"m{model}", 0)) for one in samples]
    if static_bytes is not None:
        borrowed = [(moment, static_bytes) for moment, _ in borrowed]
    within = [size for moment, size in borrowed if 0 <= moment <= seconds]
    return ModelFigures(
        model=model,
        requests=len(answers),
        unfinished=len(answers) - len(finished),
        ttft=(quantile(firsts, 0.5), quantile(firsts, 0.9), quantile(firsts, 0.99)),
        within=sum(first <= SLO_TTFT_SECONDS for first in firsts) / max(1, len(firsts)),
        tpot=(quantile(each, 0.5), quantile(each, 0.99)),
        gap=quantile([answer["gap"] for answer in finished], 0.99),
        good_per_second=sum(map(is_good, answers)) / seconds,
        tokens_per_second=sum(answer["tokens"] for answer in finished) / busy if busy > 0 else 0.0,
        preemptions=told["preemptions"],
        peak_bytes=max(within, default=0),
        mean_bytes=sum(within) / max(1, len(within)),
        rest_bytes=next((size for moment, size in reversed(borrowed) if moment <= 0), 0),
        idle_bytes=next((size for moment, size in borrowed if moment >= last + 1), None),
        refusals=refusals,
        starved_seconds=_starved(f"m{model}", samples, guarantee),
    )


def _starved(name: str, samples: Sequence[Sample], guarantee: int) -> float:
    """Return for how long a model waited for memory within its guarantee: what it waits for would not exceed it."""
    seconds = 0.0
    for before, after in pairwise(samples):
        waiting = before.pressure.get(name, (0, 0, 0))[0]
        if waiting and before.borrowed.get(name, 0) + waiting <= guarantee:
            seconds += after.moment - before.moment
    return seconds


def compare(run: Run, plain: Run | None) -> None:
    """Fill in how many answers differ from plain vLLM's: of the sample, and of the load."""
    if plain is None or not plain.tokens:
        return
    expected = plain.tokens[0][0]  # all models have the same weights, so one stands for all
    sums = {
        (figures.model, answer["name"]): answer["sum"]
        for figures, told in zip(plain.models, plain.told, strict=True)
        for answer in told["answers"]
        if answer["is_finished"]
    }
    for figures, told, samples in zip(run.models, run.told, run.tokens, strict=True):
        figures.wrong = sum(text != wanted for sample in samples for text, wanted in zip(sample, expected, strict=True))
        both = [
            (answer["sum"], sums[figures.model, answer["name"]])
            for answer in told["answers"]
            if answer["is_finished"] and (figures.model, answer["name"]) in sums
        ]
        figures.same = sum(one == other for one, other in both), len(both)
