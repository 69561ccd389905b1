"""`benchmarks.serving` without vLLM: the figures, targets and tables, from answers as a client tells them."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.child import Child
from benchmarks.harness.report import show, write_json
from benchmarks.serving import __main__ as serving
from benchmarks.serving import arms, plot, report, sleep, summary
from benchmarks.serving.figures import ModelFigures, Run, Sample, compare, of_model
from benchmarks.serving.shapes import weight_bytes
from benchmarks.serving.targets import goals
from tests.support.sizes import GIB, MIB

SETUP = arms.Setup("cuda", "qwen3-1.7b", 18 * GIB, 8192, 256)
FACTS = {"models": "3 x tiny", "KV cache in all": "1 GiB"}


def _answer(due: float, first: float, last: float, tokens: int = 101, name: str = "", total: int = 7) -> dict[str, Any]:
    times = {"due": due, "first": due + first, "last": due + last}
    return {"name": name or f"{due}", **times, "tokens": tokens, "is_finished": True, "gap": 0.02, "sum": total}


def _lost(due: float) -> dict[str, Any]:
    """One that got its first token, and was not finished in time."""
    return {**_answer(due, 0.1, 0.2), "is_finished": False}


def _figures(answers: Sequence[dict[str, Any]], samples: Sequence[Sample] = (), **more: Any) -> ModelFigures:
    told = {"answers": answers, "preemptions": 3}
    return of_model(
        **{"model": 0, "told": told, "samples": samples, "seconds": 10.0, "refusals": 2, "static_bytes": None} | more
    )


def _run(arm: str, first: float = 0.1, *, trace: str = "a2", load: float = 1.0, lost: int = 0, wrong: int = 0) -> Run:
    """A run in which all requests of all models had the same times."""
    answers = [_answer(i / 10, first, first + 1, name=f"{i}") for i in range(100)] + [_lost(9.9)] * lost
    samples = [
        Sample(moment - 1.0, {f"m{i}": (2 + (moment > 3)) * GIB for i in range(3)}, 9 * GIB) for moment in range(20)
    ]
    models = [_figures(answers, samples, model=model) for model in range(3)]
    tokens = [[[[1, 2], [3, 4 + wrong]], [[1, 2], [3, 4]]] for _ in models]
    told = [{"answers": answers, "preemptions": 0} for _ in models]
    return Run(arm, trace, load, 1, 10.0, [20.0] * 3, [7000] * 3, models, [0.02, 0.003], 9 * GIB, samples, told, tokens)


def _write(path: Path, facts: dict[str, str], runs: Sequence[Run]) -> None:
    write_json(path, machine=facts, targets=goals(runs), failures={"sleep": "failed"}, runs=runs)


def test_what_was_not_answered_counts_as_never_answered() -> None:
    """Two of a hundred were not: the p99 is never, and p50 and p90 are those of the others.

    Of three that were answered one has its first token late, and one has slow tokens: one is good.
    """
    answers = [_answer(i / 10, 0.5 + i / 1000, 1.5 + i / 1000) for i in range(98)] + [_lost(9.8), _lost(9.9)]
    found = _figures(answers)
    assert (found.requests, found.unfinished) == (100, 2)
    assert found.ttft == (pytest.approx(0.55), pytest.approx(0.59), math.inf)
    assert found.within == pytest.approx(0.98)
    assert found.tpot[0] == pytest.approx(0.01)
    assert found.good_per_second == pytest.approx(9.8)
    assert found.tokens_per_second == pytest.approx(98 * 101 / (9.7 + 1.597))
    assert (found.preemptions, found.refusals) == (3, 2)
    assert _figures([_answer(0, 0.5, 1.5), _answer(1, 1.2, 2.2), _answer(2, 0.5, 6.5)]).good_per_second == 0.1
    assert _figures([]).tokens_per_second == 0


def test_bytes_are_those_of_the_trace_and_of_the_second_after_it() -> None:
    samples = [
        Sample(moment, {"m0": size, "m1": GIB}, None) for moment, size in ((-1, 5), (4, 40), (8, 20), (11, 9), (13, 6))
    ]
    found = _figures([_answer(0, 1, 11.5)], samples)
    assert (found.rest_bytes, found.peak_bytes, found.mean_bytes, found.idle_bytes) == (5, 40, 30, 6)
    static = _figures([_answer(0, 1, 11.5)], samples, static_bytes=GIB)
    assert (static.rest_bytes, static.peak_bytes, static.mean_bytes, static.idle_bytes) == (GIB, GIB, GIB, GIB)


def test_a_model_is_starved_while_it_waits_within_its_guarantee() -> None:
    """It has 8 bytes of 24 guaranteed and waits for 4 more from second 1 to 3; beyond its guarantee it may wait."""
    history = [(0, 8, 0), (1, 8, 4), (2, 8, 4), (3, 24, 0), (4, 24, 4), (5, 24, 0)]
    samples = [Sample(moment, {"m0": size}, None, {"m0": (waiting, 0, 0)}) for moment, size, waiting in history]
    assert _figures([], samples, guarantee=24).starved_seconds == 2
    assert _figures([], samples).starved_seconds == 0


def test_answers_are_compared_with_those_of_plain_vllm() -> None:
    """One token of one answer of the sample before the load is wrong, of each model; 1 of 100 under load differs."""
    plain, run = _run("static"), _run("membroker", wrong=1)
    run.told[2] = {"answers": [_answer(0, 0, 1, name="0", total=8), *run.told[2]["answers"][1:]], "preemptions": 0}
    compare(run, plain)
    assert [one.wrong for one in run.models] == [1, 1, 1]
    assert [one.same for one in run.models] == [(100, 100), (100, 100), (99, 100)]
    compare(plain, plain)
    assert [one.wrong for one in plain.models] == [0, 0, 0]
    alone = _run("membroker")
    compare(alone, None)
    assert alone.models[0].wrong is None


def test_each_target_is_beside_its_figure() -> None:
    """A2: the first model must be 10 times faster than with a third, the others as fast; and what is always kept."""
    static, ours = _run("static", 2.0), _run("membroker", 1.0, lost=1)
    for run in (static, ours):
        compare(run, static)
    found = {goal.what: (round(goal.value, 3), goal.target, goal.reached) for goal in goals([static, ours])}
    assert found == {
        "A2: membroker: wrong answers of the sample": (0, 0, True),
        "A2: membroker: requests not answered": (3, 0, False),
        "A2: membroker: waited within its guarantee": (0, 1, True),
        "A2: membroker: kept 1 s after the last answer": (1024, 64, False),
        "A2: m0, TTFT p50 to static's": (0.5, 1, True),
        "A2: m0, TTFT p99 to static's": (0.5, 0.1, False),
        "A2: m1, TTFT p50 to static's": (0.5, 1, True),
        "A2: m1, TTFT p99 to static's": (0.5, 1, True),
        "A2: m2, TTFT p50 to static's": (0.5, 1, True),
        "A2: m2, TTFT p99 to static's": (0.5, 1, True),
    }


def test_arms_that_ran_one_by_one_are_shown_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was written is read again, and answers are compared over the files."""
    files = [tmp_path / f"{arm}.json" for arm in ("static", "membroker", "other")]
    runs = [_run("static"), _run("membroker", lost=3, wrong=1)]
    for run, file in zip(runs, files, strict=False):
        _write(file, FACTS, [run])
        assert report.read_json(file) == (FACTS, [run])
    assert serving.main(["--read", *map(str, files[:2])]) == 0
    told = capsys.readouterr().out
    assert "m2          103" in told
    assert re.search(r"A2: membroker: wrong answers of the sample +3.00 +at most 0 +NO", told)
    _write(files[2], {**FACTS, "models": "3 x large"}, runs[:1])
    (tmp_path / "no.json").write_text("{}")
    for wrong, said in ((files[2], "of another models than"), (tmp_path / "no.json", "is not what --json of this")):
        with pytest.raises(SystemExit):
            serving.main(["--read", str(files[0]), str(wrong)])
        assert said in capsys.readouterr().err


def test_loads_and_seeds_are_summed_up() -> None:
    """The median and range of three seeds; and membroker, which is late at the higher load, loses there."""
    runs = []
    for seed in (1, 2, 3):
        for arm, load, first in (("static", 1, 0.5), ("membroker", 1, 0.1), ("static", 2, 0.9), ("membroker", 2, 1.2)):
            run = _run(arm, first + seed / 100, load=load)
            run.seed = seed
            runs.append(run)
    found = {(one.arm, one.load): one for one in summary.totals(runs)}
    assert found["static", 1].ttft_p99 == pytest.approx((0.51, 0.52, 0.53))
    assert found["static", 1].good == found["membroker", 1].good == (30, 30, 30)
    assert found["membroker", 2].good == (0, 0, 0)
    assert found["static", 1].good_relative == (0, 0, 0), "five times 20 ms are 0.1 s"
    assert found["membroker", 1].good_relative == (0, 0, 0)
    assert "than static at x2 (of x1, x2)" in (summary.break_even(runs, "a2") or "")
    assert "at every load" in (summary.break_even([run for run in runs if run.load == 1], "a2") or "")
    assert summary.break_even(runs, "t1") is None
    out = io.StringIO()
    show(FACTS, report.chapters(runs, []), as_markdown=False, stream=out)
    assert "0.52 (0.51-0.53)" in out.getvalue()


def test_runs_are_drawn(tmp_path: Path) -> None:
    """Two arms, at two loads."""
    pytest.importorskip("matplotlib")
    runs = [_run(arm, load=load) for load in (1.0, 0.5) for arm in ("static", "membroker")]
    plot.draw(FACTS, runs, tmp_path / "serving.png")
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")


def test_one_copy_of_the_weights_leaves_more_for_the_caches() -> None:
    """8,030,261,248 parameters are 240 pages of 64 MiB: two of three copies are cache."""
    assert weight_bytes("llama-3.1-8b") == 2 * 8_030_261_248
    setup = arms.Setup("cuda", "llama-3.1-8b", 24 * GIB, 8192, 256)
    plain, shared = arms.ARMS["membroker"], arms.ARMS["membroker-shared"]
    assert (plain.budget(setup), shared.budget(setup)) == (24 * GIB, 54 * GIB)
    assert tomllib.loads(arms.broker_config(plain, setup))["capacity"] == 24 * GIB
    config = tomllib.loads(arms.broker_config(shared, setup))
    assert config["capacity"] == (54 + 15) * GIB + 64 * MIB
    assert {one["guarantee"] for one in config["tenants"]["bench"]["models"].values()} == {18 * GIB}
    found = arms.keywords(shared, setup, 1, Path("shape"))
    assert found["num_gpu_blocks_override"] * 16 * (128 << 10) == 54 * GIB
    assert (
        found["model_loader_extra_config"]["load_format"]
        == arms.keywords(plain, setup, 1, Path("shape"))["load_format"]
    )


@pytest.mark.parametrize(
    ("arm", "trace", "changes", "said"),
    [
        ("kvcached", "a2", {"sites": {"kvcached": Path("/tmp")}}, "nor from a --site of its own"),
        ("kvcached", "a2", {}, "cannot be imported"),
        ("sleep", "a2", {}, "only T3"),
        ("sleep", "t3", {}, None),
        ("membroker-shared", "a2", {"device": "host"}, "repacks weights"),
    ],
)
def test_what_cannot_run_says_why(arm: str, trace: str, changes: dict[str, Any], said: str | None) -> None:
    why = arms.why_not(arms.ARMS[arm], trace, dataclasses.replace(SETUP, **changes))
    assert (why is None) == (said is None)
    assert (said or "") in (why or "")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_that_does_not_start_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the measurement of sleep, which says so and fails."""
    children: list[Any] = []

    class Watched(Child):
        def __init__(self, *arguments: Any) -> None:
            children.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(sleep, "CHILD", "benchmarks.serving.nothing")
    monkeypatch.setattr(sleep, "Child", Watched)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sleep.main(["--device", "host", "--ways", "kept", "--rounds", "1"]) == 1
    assert "kept FAILED: ChildFailed: no answer; the end of its log:" in capsys.readouterr().err
    assert [child.process.returncode for child in children] == [1]
    with pytest.raises(SystemExit):
        sleep.main(["--rounds", "0"])
    assert "--rounds is at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--site", "kvcached=/nowhere"], "--site takes ARM=PLACE"),
        ([], "needs vLLM (for --device host its CPU build)"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.main(["--device", "host", *arguments])
    assert said in capsys.readouterr().err
