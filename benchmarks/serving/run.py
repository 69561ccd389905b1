"""Runs one arm: its broker and its engines, the traces, and a watch on the memory meanwhile. Owns all processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from membroker.vmm import Driver, Location, open_driver

from ..harness.child import ANSWER_SECONDS, Child
from ..harness.daemon import Daemon, running
from ..harness.report import Tell
from . import arms, kvcached, shapes
from .arms import Arm, Setup
from .figures import Run, Sample, of_model, tpot, ttft
from .traces import Trace

START_SECONDS = 300.0
BEGIN_SECONDS = 1.5
"""From the command to the begin of a trace: clients prepare, and engines come to rest."""
WATCH_SECONDS = 0.1
IDLE_SECONDS = 1.5
"""How long is watched after the last answer: what is not needed should go within a second."""
SAMPLE = (48, 300, 700, 1000)
"""Prompts of the sample, in tokens, before they are scaled; the first three end within a block."""
SAMPLE_ANSWER = 64
FILL_BYTES = 64 << 20


class Watch:
    """Notes ten times a second what each model has borrowed, and what the device has in use."""

    def __init__(self, arm: Arm, device: str, daemon: Daemon | None) -> None:
        self._driver = open_driver(device) if device == "cuda" else None  # the host driver knows of its own alone
        self._arm, self._daemon = arm, daemon
        self._samples: list[Sample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            moment, books = time.monotonic(), {}
            if self._daemon is not None:
                with suppress(grpc.RpcError):
                    books = {one.name.split("/")[3]: one.books[0] for one in self._daemon.models()}
            borrowed = {name: one.used_bytes for name, one in books.items()}
            if self._arm.needs is not None:
                borrowed = {f"m{model}": kvcached.mapped(model) for model in self._arm.models}
            pressure = {name: (one.waiting_bytes, one.recalled_bytes, one.late_bytes) for name, one in books.items()}
            memory = None if self._driver is None else self._driver.memory(Location.DEVICE)
            self._samples.append(Sample(moment, borrowed, None if memory is None else memory.used, pressure))

    def since(self, begin: float, from_moment: float) -> list[Sample]:
        """Return the samples since a moment before the trace, with times relative to its begin."""
        return [replace(one, moment=one.moment - begin) for one in self._samples if one.moment > from_moment]

    def close(self) -> None:
        """End it."""
        self._ended.set()
        self._thread.join()
        if self._driver is not None:
            self._driver.close()


@contextmanager
def filled(driver: Driver, left: int) -> Iterator[None]:
    """Take the device's free memory but for `left` bytes: without a broker nothing else bounds all engines together."""
    with ExitStack() as ending:
        memory = driver.memory(Location.DEVICE)
        rest = 0 if memory is None else memory.free - left
        while rest >= FILL_BYTES:
            ending.callback(driver.release, driver.create(FILL_BYTES))
            rest -= FILL_BYTES
        yield


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace to play, and how it was made."""

    trace: Trace
    load: float
    seed: int
    drain_seconds: float
    token_scale: float


class RunningArm:
    """An arm whose engines run."""

    def __init__(
        self,
        arm: Arm,
        setup: Setup,
        daemon: Daemon | None,
        engines: Sequence[Child],
        starts: Sequence[Mapping[str, Any]],
        watch: Watch,
    ) -> None:
        self._arm, self._setup, self._daemon, self._engines, self._watch = arm, setup, daemon, engines, watch
        self._starts = starts

    def warm(self, scale: float) -> None:
        """Let each engine serve a burst: what it compiles and allocates at first use is then there."""
        prompt, answer = max(1, round(1000 * scale)), max(1, round(16 * scale))
        for engine in self._engines:
            engine.tell(
                {"do": "burst", "requests": min(32, self._setup.max_num_seqs), "prompt": prompt, "answer": answer}
            )
        for engine in self._engines:
            engine.hear(2 * ANSWER_SECONDS)

    def play(self, job: Workload) -> Run:
        """Play a trace between two samples, and return what was measured."""
        before = [self._sample(engine, job.token_scale) for engine in self._engines]
        refused = self._refusals()
        now = time.monotonic()
        begin, end = now + BEGIN_SECONDS, now + BEGIN_SECONDS + job.trace.seconds + job.drain_seconds
        for model, engine in zip(self._arm.models, self._engines, strict=True):
            work = job.trace.works[model]
            requests = [[one.at, one.prompt, one.answer] for one in work.requests]
            turns = [[one.start, one.end, one.callers, one.prompt, one.answer] for one in work.turns]
            engine.tell({"do": "play", "begin": begin, "end": end, "requests": requests, "turns": turns})
        told = [engine.hear(end - now + ANSWER_SECONDS) for engine in self._engines]
        time.sleep(IDLE_SECONDS)
        samples = self._watch.since(begin, now)
        denied = {name: count - refused.get(name, 0) for name, count in self._refusals().items()}
        after = [self._sample(engine, job.token_scale) for engine in self._engines]
        guarantee = self._arm.third(self._setup) if self._daemon is not None else 0
        varies = self._daemon is not None or self._arm.needs or self._arm.sleeps
        static = None if varies else self._arm.cache_bytes(self._setup)
        seconds = job.trace.seconds
        return Run(
            arm=self._arm.name,
            trace=job.trace.name,
            load=job.load,
            seed=job.seed,
            seconds=seconds,
            start_seconds=[one["seconds"] for one in self._starts],
            cache_tokens=[one["cache_tokens"] for one in self._starts],
            engine=self._starts[0]["engine"],
            models=[
                of_model(model, each, samples, seconds, denied.get(f"m{model}", 0), static, guarantee)
                for model, each in zip(self._arm.models, told, strict=True)
            ],
            unloaded=[min(map(time_of, before[0]["answers"])) for time_of in (ttft, tpot)],
            peak_in_use=max((one.in_use for one in samples if one.in_use is not None), default=None),
            samples=samples,
            told=told,
            tokens=[[one["tokens"], other["tokens"]] for one, other in zip(before, after, strict=True)],
        )

    def _sample(self, engine: Child, scale: float) -> dict[str, Any]:
        answer = max(2, round(SAMPLE_ANSWER * scale))
        engine.tell({"do": "sample", "lengths": [[max(1, round(prompt * scale)), answer] for prompt in SAMPLE]})
        return engine.hear()

    def _refusals(self) -> dict[str, int]:
        models = [] if self._daemon is None else self._daemon.models()
        return {one.name.split("/")[3]: sum(one.denials_total.values()) for one in models}


@contextmanager
def started(arm: Arm, setup: Setup, directory: Path, tell: Tell, *, is_first: bool) -> Iterator[RunningArm]:
    """Start an arm. In the first one the first engine starts before the others, and fills vLLM's caches for them."""
    with ExitStack() as ending:
        daemon = None
        if arm.has_broker:
            daemon = ending.enter_context(running(arms.broker_config(arm, setup)))
            ending.callback(lambda: (directory / f"{arm.name}-broker.log").write_text(daemon.log()))
        endpoint = None if daemon is None else daemon.endpoint()
        lock = directory / "lock"
        lock.touch()
        engines: list[Child] = []
        starts: list[dict[str, Any]] = []
        for model in arm.models:
            about = {
                "keywords": arms.keywords(arm, setup, model, shapes.write(setup.shape)),
                "vocabulary": shapes.SHAPES[setup.shape]["vocab_size"],
                "lock": str(lock) if arm.sleeps else None,
            }
            log = directory / f"{arm.name}-m{model}.log"
            environment = arms.environment(arm, setup, model, endpoint, directory)
            python = arms.interpreter(arm, setup)
            engines.append(Child("benchmarks.serving.client", about, environment, log, python))
            ending.callback(engines[-1].close)
            if arm.sleeps or (is_first and not starts):  # an engine in sleep mode has all the memory until it sleeps
                starts.append(engines[-1].hear(START_SECONDS))
                tell(f"{arm.name}: the engine of m{model} is up after {starts[-1]['seconds']:.0f} s")
        starts += [engine.hear(START_SECONDS) for engine in engines[len(starts) :]]
        seconds = ", ".join(f"{one['seconds']:.0f}" for one in starts)
        tell(f"{arm.name}: all engines are up, after {seconds} s")
        watch = Watch(arm, setup.device, daemon)
        ending.callback(watch.close)
        yield RunningArm(arm, setup, daemon, engines, starts, watch)
