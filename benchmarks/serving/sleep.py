"""`python -m benchmarks.serving.sleep`: `membroker sleep` and `wake` beside vLLM's own sleep mode, in one run.

Each arm is one vLLM in a process of its own. A round fills its KV cache, lets it sleep, wakes it and asks for a token;
then the same again, but the request comes to a sleeping engine. vLLM takes no request in its own sleep mode, so there
the caller wakes it first. Tokens of a sample are compared before and after.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from membroker.admin import Admin
from membroker.arguments import bytes_of
from membroker.vmm import Driver, Location, format_size, open_driver

from ..harness import command, machine
from ..harness.child import Child, ChildFailed
from ..harness.daemon import TENANT, configuration, running
from ..harness.report import Tell, progress, write_json
from . import arms, shapes
from .arms import ARMS, Arm, Setup

CHILD = "benchmarks.serving.sleep_child"
"""The program that has the engine. It answers each command with a line, and its start with one."""
START_SECONDS = 600.0
SLEEP_SECONDS = 120.0
LOOK_SECONDS = 0.002
SAMPLE = [[(7 * n + at) % 500 + 3 for at in range(length)] for n, length in enumerate((5, 60, 300))]


@dataclass(frozen=True, slots=True)
class SleepWay:
    """One way to sleep: the arm that it is based on, settings of the connector, and what is asked."""

    arm: Arm
    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    keep_weights: bool = False


_OVER_BROKER: Final = ARMS["alone-membroker"]
WAYS: Final = {
    "vllm": SleepWay(replace(ARMS["sleep"], models=(0,)), "vLLM's sleep mode, level 1"),
    "membroker": SleepWay(_OVER_BROKER, "membroker, weights borrowed", {"weights": "borrowed"}),
    "pinned": SleepWay(_OVER_BROKER, "the same, host memory kept pinned", {"weights": "borrowed", "keep_pinned": True}),
    "kept": SleepWay(_OVER_BROKER, "membroker, weights kept", {"weights": "borrowed"}, keep_weights=True),
}
PRESETS: Final[dict[str, dict[str, Any]]] = {
    "cuda": {"model": "llama-3.1-8b", "kv": "20GiB", "prompts": 128, "length": 1000},
    "host": {"model": "tiny", "kv": "64MiB", "prompts": 8, "length": 300},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = command.parser("benchmarks.serving.sleep", __doc__.splitlines()[0], outputs=["json"])
    parser.add_argument("--device", choices=tuple(PRESETS), default="cuda", help="a GPU, or vLLM's CPU build")
    parser.add_argument(
        "--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS), metavar="WAY", help=", ".join(WAYS)
    )
    parser.add_argument("--model", choices=tuple(shapes.SHAPES), help="the shape of the model; on a GPU llama-3.1-8b")
    parser.add_argument("--kv", metavar="SIZE", help="the KV cache; on a GPU 20GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the engines' logs there")
    options = command.parse(parser, arguments)
    if options.rounds < 1:
        parser.error("--rounds is at least 1")
    preset = PRESETS[options.device]
    size = bytes_of("--kv", options.kv or preset["kv"])
    setup = Setup(
        options.device, options.model or preset["model"], size, 2048 if options.device == "host" else 8192, 128
    )
    facts = machine.facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()), file=sys.stderr)
    ways = [name for name in options.ways if (name, options.device) != ("vllm", "host")]
    if ways != options.ways:
        print("vllm is left out: vLLM's CPU build has no sleep mode", file=sys.stderr)
    rows: dict[str, dict[str, list[float]]] = {}
    failures: dict[str, str] = {}
    with suppress(KeyboardInterrupt), progress(len(ways)) as (tell, done):
        for name in ways:
            tell(f"{name}: {WAYS[name].title}; the engine starts")
            try:
                with tempfile.TemporaryDirectory(prefix="mb-sleep-") as temporary:
                    logs = options.logs or Path(temporary)
                    logs.mkdir(parents=True, exist_ok=True)
                    log = logs / f"{name}.log"
                    rows[name] = _measure(WAYS[name], setup, options.rounds, preset, log, tell)
            except Exception as error:  # noqa: BLE001 - what the other ways show is worth having
                failures[name] = f"{type(error).__name__}: {error}"
            if options.json is not None:  # what is cut short loses its last way only
                write_json(options.json, facts=facts, model=setup.shape, kv=size, rows=rows)
            done(name)
    _show(rows, setup)
    for name, failure in failures.items():
        print(f"{name} FAILED: {failure}", file=sys.stderr)
    return 0 if len(rows) == len(ways) else 1


@contextmanager
def _engine(way: SleepWay, setup: Setup, driver: Driver, log: Path) -> Iterator[tuple[Child, Admin | None]]:
    """Start one engine, and its broker."""
    with ExitStack() as ending:
        endpoint, admin = None, None
        if way.arm.has_broker:
            daemon = ending.enter_context(running(_broker_config(setup, driver)))
            endpoint = daemon.endpoint(TENANT)
            admin = ending.enter_context(closing(Admin(endpoint.parents[1] / "admin" / "grpc.sock")))
        keywords = arms.keywords(way.arm, setup, 0, shapes.write(setup.shape))
        keywords["enable_prefix_caching"] = True  # so that the cache is full when the engine sleeps
        if way.arm.has_broker:
            settings = {"keep": setup.budget, **way.settings}
            keywords["kv_transfer_config"]["kv_connector_extra_config"] = settings
            keywords["worker_cls"] = "membroker.kv.vllm.Worker"  # it borrows the weights
        environment = arms.environment(way.arm, setup, 0, endpoint, log.parent)
        engine = ending.enter_context(closing(Child(CHILD, keywords, environment, log)))
        engine.hear(START_SECONDS)  # it has started
        yield engine, admin


def _broker_config(setup: Setup, driver: Driver) -> str:
    memory = driver.memory(Location.DEVICE)
    is_host = setup.device == "host" or memory is None
    capacity, host = (4 * setup.budget, 1 << 28) if is_host or memory is None else (memory.free * 9 // 10, 64 << 30)
    capacity -= capacity % (64 << 20)
    return configuration(setup.device, capacity=capacity, host_capacity=host)


def _measure(
    way: SleepWay, setup: Setup, rounds: int, preset: Mapping[str, Any], log: Path, tell: Tell
) -> dict[str, list[float]]:
    """Return the figures of each round, by name."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    with closing(open_driver(setup.device)) as driver, _engine(way, setup, driver, log) as (engine, admin):
        sleep, wake = _verbs(way, engine, admin)
        expected = _sample(engine)
        for number in range(rounds + 1):
            tell(f"{log.stem}: round {number} of {rounds}")
            for is_by_request in (False, True):
                _fill(engine, number, preset)
                before = _used(driver, admin)
                asleep = sleep()
                after = _used(driver, admin)
                awake = 0.0 if is_by_request and admin is not None else wake()
                first, _ = _generate(engine, [SAMPLE[2][::-1]], 1)
                if _sample(engine) != expected:
                    raise ChildFailed("the tokens differ after the wake")
                if not number:
                    continue  # the first round of each is for what is compiled and allocated at first use
                note("sleep_seconds", asleep)
                note("released_bytes", before - after)
                note("left_bytes", after)
                if is_by_request:
                    note("request_seconds", awake + first)
                else:
                    note("wake_seconds", awake)
                    note("first_token_seconds", first)
    return found


def _verbs(way: SleepWay, engine: Child, admin: Admin | None) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return what lets an engine sleep and wake, and takes the time."""

    def by_vllm(verb: str) -> float:
        engine.tell({"do": verb})
        return float(engine.hear(SLEEP_SECONDS)["seconds"])

    def by_broker(wake: bool) -> float:
        assert admin is not None
        name, begun = f"tenants/{TENANT}/models/m0", time.perf_counter()
        while time.perf_counter() < begun + SLEEP_SECONDS:
            answers = admin.sleep_model(name, wake=wake, keep_weights=way.keep_weights, within=5.0)
            states = [one.status for one in answers if one.status and one.status.state != "unsupported"]
            if states and all(one.state == ("awake" if wake else "asleep") for one in states):
                if "weights kept" in states[0].detail and not way.keep_weights:
                    raise ChildFailed(states[0].detail)
                return time.perf_counter() - begun
            time.sleep(LOOK_SECONDS)
        raise ChildFailed(f"it did not {'wake' if wake else 'sleep'}: {answers}")

    if admin is None:
        return lambda: by_vllm("sleep"), lambda: by_vllm("wake")
    return lambda: by_broker(wake=False), lambda: by_broker(wake=True)


def _generate(engine: Child, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, Any]:
    engine.tell({"do": "generate", "prompts": prompts, "tokens": tokens})
    told = engine.hear(SLEEP_SECONDS)
    return float(told["seconds"]), told["tokens"]


def _sample(engine: Child) -> list[Any]:
    """Return the tokens of a sample: one prompt at a time, since bfloat16 rounds as a batch is composed."""
    return [_generate(engine, [prompt], 16)[1] for prompt in SAMPLE]


def _fill(engine: Child, seed: int, preset: Mapping[str, Any]) -> None:
    """Leave as much in the KV cache as a busy model does."""
    rng = random.Random(seed)
    _generate(engine, [[rng.randrange(3, 500) for _ in range(preset["length"])] for _ in range(preset["prompts"])], 8)


def _used(driver: Driver, admin: Admin | None) -> int:
    """Return the device's memory in use. The host driver knows only what its broker lends."""
    memory = driver.memory(Location.DEVICE) if driver.device.driver == "cuda" else None
    if memory is not None:
        return memory.used
    assert admin is not None
    return admin.device().locations["device"].lent_bytes


def _show(rows: Mapping[str, Mapping[str, list[float]]], setup: Setup) -> None:
    """Print a table in Markdown: medians, and the range of each time."""

    def times(row: Mapping[str, list[float]], name: str) -> str:
        values = row[name]
        return f"{median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"

    print(f"{setup.shape}, {format_size(setup.budget)} of KV cache\n")
    print("| way | sleep | released | still in use | wake | then the first token | a request to a sleeping engine |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        sizes = [format_size(round(median(row[key]))) for key in ("released_bytes", "left_bytes")]
        seconds = [times(row, key) for key in ("wake_seconds", "first_token_seconds", "request_seconds")]
        print(f"| {WAYS[name].title} | {times(row, 'sleep_seconds')} | {' | '.join([*sizes, *seconds])} |")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
