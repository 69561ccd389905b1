"""`make bench` in small: every row is there, with a plausible number. No time is tested."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks.harness.stage import Stage
from benchmarks.load import recalls, targets
from tests.benchmarks.commands import ROOT, bench

pytestmark = pytest.mark.deep

TIMINGS = {
    *(f"bare.{work}" for work in ("echo.one_core", "echo", "lend.one_core", "lend", "grpc")),
    *(f"raw{work}" for work in ("", ".allocate", ".release")),
    *(f"{transport}{work}" for transport in ("handoff", "grpc") for work in ("", ".allocate", ".close")),
    *(f"many.{work}" for work in ("bare", "allocate", "close", "both")),
    *(f"models.scrape{which}" for which in ("", "_one", "_quiet")),
    *(f"{scene}.{where}" for scene in ("idle", "extents", "models", "refused") for where in ("alone", "among")),
    *("extents.scrape", "extents.get_device", "refused.granted"),
    *(f"floods.{flood}" for flood in ("alone", "one", "sixteen", "most")),
    *(f"recalled.{within}" for within in ("spare", "guaranteed", "share")),
    *("core.extent", "core.guaranteed", "core.schedule"),
}
FIGURES = {
    *(f"idle.{what}" for what in ("before.rss", "before.pss", "sessions", "cpu", "busy_cpu", "with.rss", "with.pss")),
    *(f"extents.{what}{each}" for what in ("fill", "rss", "release") for each in ("", "_each")),
    *("extents.count", "extents.left", "core.divisions"),
    *(f"many.{what}" for what in ("cpu", "workers_cpu", "rss", "pss", "rate")),
    *(f"models.{what}" for what in ("count", "body", "rss", "pss")),
}
MAY_BE_ZERO = {"idle.cpu", "idle.busy_cpu", "many.cpu", "many.workers_cpu", "core.divisions"}
MAY_BE_ZERO |= {"extents.left", "extents.rss_each"}
"""The kernel tells processor time in steps of 10 ms, and a daemon's memory can shrink."""


def rows(document: Any, kind: str) -> dict[str, Any]:
    """Return the rows of all sections by their keys, which are unique."""
    found = [row for section in document["sections"] for row in section[kind]]
    by_key = {row["key"]: row for row in found}
    assert len(by_key) == len(found)
    return by_key


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """One quick run: the document that it wrote, and what it printed."""
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    done = bench("load", "--quick", "--json", str(path))
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def test_every_row_is_there(quick: tuple[Any, str]) -> None:
    """In the file and in the table. A ratio is that of the medians of two rows."""
    document, printed = quick
    assert "\x1b" not in printed
    timings, figures = rows(document, "timings"), rows(document, "figures")
    assert timings.keys() == TIMINGS
    assert figures.keys() == FIGURES
    for row in timings.values():
        assert row["count"] > 0, row
        assert 0 < row["p50_ns"] <= row["p99_ns"], row
        assert f"\n{row['name']}  " in printed, row
    for key, row in figures.items():
        assert row["value"] > 0 or key in MAY_BE_ZERO, row
        assert f"\n{row['name']}  " in printed, row
    for section in document["sections"]:
        medians = {row["name"]: row["p50_ns"] for row in section["timings"]}
        for row in section["timings"]:
            if row["beside"]:
                assert row["ratio"] == pytest.approx(row["p50_ns"] / medians[row["beside"]]), row


def test_the_numbers_are_what_the_scenes_say(quick: tuple[Any, str]) -> None:
    """The daemon counted every request: nothing was refused silently, and nothing is still lent.

    And borrowers answer a recall after 30 ms, so no request can have been granted before that.
    """
    figures = {key: row["value"] for key, row in rows(quick[0], "figures").items()}
    assert figures["idle.sessions"] == 20
    assert figures["extents.count"] == 2_000
    assert figures["extents.left"] == 0
    assert figures["models.count"] == 41
    timings = rows(quick[0], "timings")
    assert min(timings["recalled.guaranteed"]["p50_ns"], timings["recalled.share"]["p50_ns"]) >= 30_000_000


def test_what_has_a_target_is_told_beside_it(quick: tuple[Any, str]) -> None:
    """Refusals, waits for recalled memory, and the core: each with its target, and whether it was reached."""
    document, printed = quick
    goals = {goal["what"]: goal for goal in document["goals"]}
    assert {what: goal["target"] for what, goal in goals.items()} == {
        "a refusal beside neighbours: p99": 3,
        "spare pages, within the guarantee: p50": 5,
        "used pages, within the guarantee: p99": 100,
        "used pages, within the share: p99": 100,
        "one look at all that wait: p50": 1,
        "shares computed for 1,000 extents, nobody waits": 0,
    }
    timings = rows(document, "timings")
    assert goals["used pages, within the share: p99"]["value"] == timings["recalled.share"]["p99_ns"] / 1e6
    for what, goal in goals.items():
        assert goal["reached"] == (goal["value"] <= goal["target"])
        *_, line = (line for line in printed.splitlines() if line.startswith(f"{what}  "))
        assert line.rstrip().endswith("yes" if goal["reached"] else "NO")


@pytest.mark.parametrize("which", ["load", "gpu"])
def test_a_place_that_is_not_there_is_told_at_once(which: str) -> None:
    """A file that cannot be written is refused at once, not after minutes of work."""
    done = bench(which, "--json", "/nowhere/bench.json")
    assert done.returncode == 2
    assert "there is no directory /nowhere" in done.stderr


def test_another_tree_is_measured_beside_this_one() -> None:
    """`--before TREE`, with this tree as the other: its core, and its daemon's time with a target for the ratio."""
    stage = Stage(quick=True, tell=lambda _: None)
    (section,) = recalls.the_core(stage, ROOT)
    by_key = {row.key: row for row in section.timings}
    assert by_key["core.extent"].beside == by_key["core.before"].name
    (section,) = recalls.beside(stage, ROOT)
    figures = {row.key: row.value for row in section.figures}
    (goal,) = targets.goals([section])
    assert goal.value == figures["beside.ratio"] == figures["beside.new"] / figures["beside.old"]
    assert (goal.target, goal.unit) == (1.03, "x")


def test_the_walk_of_a_page_is_measured() -> None:
    """`python -m benchmarks.load.walk` in small: one daemon, with a stock, and its line."""
    done = bench("load.walk", "--turns", "2")
    assert done.returncode == 0, done.stderr
    tree, *figures = done.stdout.splitlines()[-1].split()
    assert tree == "new"
    cpu, p50, p99 = map(float, figures)
    assert cpu > 0
    assert 0 < p50 <= p99
