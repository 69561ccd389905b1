"""What is asked of each model, and when: traces from a seed. Pure: equal arguments give equal traces.

Most traces are open loop: a request comes at its time, whether or not the ones before it are answered. T3 and T5 are
closed loop: a fixed number of callers, each of which asks again as soon as it is answered.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

MODELS: Final = 3


@dataclass(frozen=True, slots=True)
class Request:
    """`prompt` tokens come `at` seconds after the trace began, and are answered by `answer` tokens."""

    at: float
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Turn:
    """From `start` to `end`, `callers` ask again and again."""

    start: float
    end: float
    callers: int
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Work:
    """What one model gets: requests in the order of their times, or turns."""

    requests: tuple[Request, ...] = ()
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The work of each model. Nothing comes after `seconds`."""

    name: str
    seconds: float
    works: tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much smaller a trace is than in the protocol: its time, its rates (or callers), and its lengths in tokens."""

    time: float = 1.0
    load: float = 1.0
    tokens: float = 1.0
    longest: int = 8192
    """The most tokens of a prompt and its answer together."""

    def lengths(self, prompt: float, answer: float) -> tuple[int, int]:
        """Return scaled lengths that fit."""
        scaled = max(1, round(answer * self.tokens))
        return max(1, min(round(prompt * self.tokens), self.longest - scaled - 1)), min(scaled, self.longest // 2)


Rate = Callable[[float], float]
Length = Callable[[random.Random], tuple[int, int]]


def arrivals(rng: random.Random, rate: Rate, most: float, seconds: float) -> Iterator[float]:
    """Yield the times of a Poisson process whose rate changes, and is `most` at most (by thinning)."""
    time = 0.0
    while most > 0 and (time := time + rng.expovariate(most)) < seconds:
        if rng.random() * most < rate(time):
            yield time


def bursty(rng: random.Random, per_second: float, variation: float, seconds: float) -> Iterator[float]:
    """Yield times with Gamma inter-arrivals of a coefficient of variation; 1 is a Poisson process."""
    shape = 1 / variation**2
    time = 0.0
    while (time := time + rng.gammavariate(shape, 1 / (shape * per_second))) < seconds:
        yield time


def _requests(rng: random.Random, times: Iterator[float], length: Length, scale: Scale) -> tuple[Request, ...]:
    return tuple(Request(time, *scale.lengths(*length(rng))) for time in times)


def _fixed(prompt: int, answer: int) -> Length:
    return lambda _: (prompt, answer)


def ramps(
    name: str, seed: int, scale: Scale, *, peak: float, half: float, offset: float, lengths: tuple[int, int]
) -> Trace:
    """A model's rate rises to `peak` in `half` seconds and falls again; model i begins `i * offset` seconds later."""
    half, offset, peak = half * scale.time, offset * scale.time, peak * scale.load
    works = []
    for model in range(MODELS):
        rng = random.Random(f"{seed} {name} {model}")
        times = arrivals(rng, lambda time: peak * (1 - abs(time - half) / half), peak, 2 * half)
        begin = model * offset
        works.append(Work(_requests(rng, (begin + time for time in times), _fixed(*lengths), scale)))
    return Trace(name, (MODELS - 1) * offset + 2 * half, tuple(works))


def a2(seed: int, scale: Scale) -> Trace:
    """Three ramps to 36 requests a second that overlap: while one model falls the next one rises."""
    return ramps("a2", seed, scale, peak=36, half=14, offset=20, lengths=(1024, 384))


def t1(seed: int, scale: Scale) -> Trace:
    """kvcached's ramps at 20 requests a second: up and down by 1 a second, the next model 45 seconds later."""
    return ramps("t1", seed, scale, peak=20, half=20, offset=45, lengths=(1024, 512))


def t2(seed: int, scale: Scale) -> Trace:
    """Bursts: a model is on for 20 seconds and off for 40 on average, Gamma arrivals of CV 3, long-tailed lengths."""
    seconds, on, off = 180 * scale.time, 20 * scale.time, 40 * scale.time
    works = []
    for model in range(MODELS):
        rng = random.Random(f"{seed} t2 {model}")
        times: list[float] = []
        begin = model * on
        while begin < seconds:
            most = min(on, seconds - begin)
            times += [begin + time for time in bursty(rng, 4 * scale.load, 3, most)]
            begin += on + rng.expovariate(1 / off)
        works.append(Work(_requests(rng, iter(times), _long_tailed, scale)))
    return Trace("t2", seconds, tuple(works))


def _long_tailed(rng: random.Random) -> tuple[int, int]:
    prompt = min(8000.0, rng.lognormvariate(math.log(400), 1.0))
    return math.ceil(prompt), math.ceil(min(2000.0, rng.lognormvariate(math.log(250), 0.8)))


def t3(seed: int, scale: Scale) -> Trace:
    """One model is busy at a time, with 128 callers; the next one takes over every 15 seconds. It needs no seed."""
    del seed
    seconds, turn = 90 * scale.time, 15 * scale.time
    callers = max(1, round(128 * scale.load))
    turns: list[list[Turn]] = [[] for _ in range(MODELS)]
    for number in range(round(seconds / turn)):
        turns[number % MODELS].append(Turn(number * turn, (number + 1) * turn, callers, *scale.lengths(1024, 256)))
    return Trace("t3", seconds, tuple(Work(turns=tuple(each)) for each in turns))


def t4(seed: int, scale: Scale) -> Trace:
    """Long tail: one model has 10 requests a second and two have one every 2 seconds; 2 % of prompts are 16k long."""
    seconds = 120 * scale.time
    works = []
    for model, (rate, lengths) in enumerate(((10, (1000, 200)), (0.5, (1000, 200)), (0.5, (1500, 30)))):
        rng = random.Random(f"{seed} t4 {model}")
        times = bursty(rng, rate * scale.load, 1, seconds)
        works.append(Work(_requests(rng, times, _mixed(*lengths), scale)))
    return Trace("t4", seconds, tuple(works))


def _mixed(prompt: int, answer: int) -> Length:
    def length(rng: random.Random) -> tuple[int, int]:
        if rng.random() < 0.02:
            return 16_000, answer
        return math.ceil(rng.lognormvariate(math.log(prompt), 0.5)), math.ceil(
            rng.lognormvariate(math.log(answer), 0.5)
        )

    return length


def t5(seed: int, scale: Scale) -> Trace:
    """Nothing to win: each model has 128 callers all the time, which is more than its part of the memory holds.

    Closed loop, so that throughput is what differs; with open loop the length of the queue would. It needs no seed.
    """
    del seed
    seconds = 60 * scale.time
    turn = Turn(0.0, seconds, max(1, round(128 * scale.load)), *scale.lengths(512, 128))
    return Trace("t5", seconds, (Work(turns=(turn,)),) * MODELS)


TRACES: dict[str, Callable[[int, Scale], Trace]] = {"a2": a2, "t1": t1, "t2": t2, "t3": t3, "t4": t4, "t5": t5}
