"""The client of one model, in a process of its own: it asks vLLM's AsyncLLM as a trace says, and notes the times.

The engine's loop runs in yet another process, as under `vllm serve`, so that the client never delays a step. A line of
JSON in, a line of JSON out; all times are of `time.monotonic`. It ends when its input ends, also amid a trace.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import random
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, Final

from ..harness.child import answering

PROMPTS: Final = 8192
"""How many different prompts of a length there are: each begins at another place of one random text."""
STEP: Final = 7919
LOAD_SECONDS: Final = 0.5
"""How often the engine's queue is noted."""
LINE_BYTES: Final = 1 << 26
"""The longest line of a command: a trace."""


@dataclass(slots=True)
class Answer:
    """What became of a request: seconds since the trace began. `first` and `last` are when tokens came."""

    name: str
    due: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    is_finished: bool = False
    gap: float = 0.0
    """The longest time between two outputs."""
    sum: int = 0
    """A checksum of its tokens."""


@dataclass(slots=True)
class Counts:
    """What vLLM tells of its scheduler."""

    preemptions: int = 0
    load: list[tuple[float, int, int]] = field(default_factory=list)
    """Moments, each with the number of running and of waiting requests."""


class Client:
    """One engine, and its callers."""

    def __init__(self, engine: Any, counts: Counts, vocabulary: int, longest: int, awake: Any) -> None:
        self._engine, self._counts, self._awake = engine, counts, awake
        self._text = random.Random(1).choices(range(3, vocabulary), k=longest + PROMPTS)
        self._ids = count()
        self._begin = 0.0

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what a command says."""
        handlers: dict[str, Callable[..., Awaitable[dict[str, Any]]]]
        handlers = {"sample": self.sample, "burst": self.burst, "play": self.play}
        return await handlers[command.pop("do")](**command)

    async def sample(self, lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Ask one request at a time, and return the tokens and times: nothing else is in the batch."""
        self._begin = time.monotonic()
        found, tokens = [], []
        async with self._awake:
            for number, (prompt, answer) in enumerate(lengths):
                one, text = Answer(f"sample {number}", self._now()), list[int]()
                await self._ask(one, number, prompt, answer, text)
                found.append(asdict(one))
                tokens.append(text)
        return {"answers": found, "tokens": tokens}

    async def burst(self, requests: int, prompt: int, answer: int) -> dict[str, Any]:
        """Ask many requests at once, so that what vLLM compiles or allocates at first use is there."""
        async with self._awake:
            await asyncio.gather(*[self._ask(Answer("warm", 0.0), i, prompt, answer) for i in range(requests)])
        return {}

    async def play(
        self, begin: float, end: float, requests: Sequence[tuple[float, int, int]], turns: Sequence[Sequence[float]]
    ) -> dict[str, Any]:
        """Play a trace that begins at `begin`. What is not answered at `end` is aborted, and counts as failed."""
        self._begin, self._counts.load[:] = begin, []
        before, answers = self._counts.preemptions, list[Answer]()
        with suppress(TimeoutError):
            async with asyncio.timeout(end - time.monotonic()):
                await self._open(requests, answers)
                for turn in turns:
                    await self._turn(answers, turn[0], turn[1], *map(int, turn[2:]))
        return {
            "answers": [asdict(answer) for answer in answers],
            "preemptions": self._counts.preemptions - before,
            "load": [(moment - begin, running, waiting) for moment, running, waiting in self._counts.load],
        }

    async def _open(self, requests: Sequence[tuple[float, int, int]], answers: list[Answer]) -> None:
        async with asyncio.TaskGroup() as group:
            for number, (at, prompt, length) in enumerate(requests):
                await self._until(at)
                answers.append(Answer(f"{number}", at))
                group.create_task(self._ask(answers[-1], number, prompt, length))

    async def _turn(
        self, answers: list[Answer], start: float, end: float, callers: int, prompt: int, length: int
    ) -> None:
        await self._until(start)

        async def call(caller: int) -> None:
            due = start  # of the first request; further ones are due when the one before is answered
            for number in count():
                answers.append(Answer(f"{start:g} {caller} {number}", due))
                await self._ask(answers[-1], caller + callers * number, prompt, length)
                due = self._now()
                if due >= end:
                    return

        async with self._awake, asyncio.TaskGroup() as group:
            for caller in range(callers):
                group.create_task(call(caller))

    async def _ask(self, answer: Answer, number: int, prompt: int, length: int, text: list[int] | None = None) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        begin = number * STEP % PROMPTS
        params = SamplingParams(
            max_tokens=length, ignore_eos=True, detokenize=False, temperature=0, output_kind=RequestOutputKind.DELTA
        )
        tokens = {"prompt_token_ids": self._text[begin : begin + prompt]}
        async for output in self._engine.generate(tokens, params, str(next(self._ids))):
            now, came = self._now(), output.outputs[0].token_ids
            if not came:
                continue
            if answer.last is None:
                answer.first = now
            else:
                answer.gap = max(answer.gap, now - answer.last)
            answer.last = now
            answer.tokens += len(came)
            for token in came:  # the same sum however the tokens are divided into outputs
                answer.sum = zlib.crc32(token.to_bytes(4, "little"), answer.sum)
            if text is not None:
                text += came
        answer.is_finished = answer.tokens == length

    def _now(self) -> float:
        return time.monotonic() - self._begin

    async def _until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - self._now()))


class Sleeper:
    """An engine in vLLM's sleep mode. Inside it is awake, and no other one is: all engines lock the same file."""

    def __init__(self, engine: Any, lock: str) -> None:
        self._engine, self._path = engine, lock
        self._lock: Any = None

    async def __aenter__(self) -> None:
        """Wait until the other engines sleep, and wake this one."""
        self._lock = open(self._path)  # noqa: SIM115 - closed at the end
        await asyncio.to_thread(fcntl.flock, self._lock, fcntl.LOCK_EX)
        await self._engine.wake_up()

    async def __aexit__(self, *error: object) -> None:
        """Let it sleep: its weights go to the host, and its KV cache is dropped."""
        await self._engine.sleep(level=1)
        self._lock.close()


def _counting(counts: Counts) -> Any:
    """Return what vLLM calls with the figures of each step."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            if iteration_stats is not None:
                counts.preemptions += iteration_stats.num_preempted_reqs
            now = time.monotonic()
            if scheduler_stats is not None and (not counts.load or now >= counts.load[-1][0] + LOAD_SECONDS):
                counts.load.append((now, scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs))

        def log_engine_initialized(self) -> None:
            pass

    return Counter


async def serve(tell: Any) -> None:
    """Start the engine that the first line asks for, and do what each further line says until the input ends."""
    lines = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    setup, counts, began = json.loads(await lines.readline()), Counts(), time.monotonic()
    engine = _engine(setup["keywords"], counts)
    try:
        awake: Any = nullcontext()
        if setup["lock"]:
            awake = Sleeper(engine, setup["lock"])
            await engine.sleep(level=1)
        client = Client(engine, counts, setup["vocabulary"], setup["keywords"]["max_model_len"], awake)
        gc.freeze()  # collections of what the start made would delay answers
        cache = engine.vllm_config.cache_config
        tokens = cache.num_gpu_blocks * cache.block_size
        tell({"seconds": time.monotonic() - began, "cache_tokens": tokens, "engine": _version()})
        line = asyncio.create_task(lines.readline())
        while command := await line:
            line = asyncio.create_task(lines.readline())
            work = asyncio.create_task(client.do(json.loads(command)))
            await asyncio.wait((work, line), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()  # the input has ended
                return
            tell(work.result())
    finally:
        engine.shutdown()


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def _engine(keywords: dict[str, Any], counts: Counts) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**keywords),
        usage_context=UsageContext.OPENAI_API_SERVER,  # for the batch sizes of `vllm serve`
        stat_loggers=[_counting(counts)],
    )


def main() -> None:
    """Serve one model."""
    tell = answering()  # vLLM logs to stdout: answers go where it cannot write
    try:
        asyncio.run(serve(tell))
    except BaseException as error:
        tell({"failed": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":  # the engine's process imports this file
    main()
