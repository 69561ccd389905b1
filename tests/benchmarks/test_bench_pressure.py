"""`python -m benchmarks.pressure` in small: three tenants want more than there is, and no promise is broken."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from benchmarks.pressure import __main__ as pressure
from benchmarks.pressure import plot
from tests.support.devices import Device
from tests.support.sizes import MIB

pytestmark = pytest.mark.deep

NUMBERS = {
    "host": pressure.Numbers("host", 384 * MIB, 2 * MIB, 7.5, 1),
    "cuda": pressure.Numbers("cuda", 3 << 30, 2 * MIB, 12.0, 1),
}


def test_guaranteed_requests_are_never_refused(device: Device, tmp_path: Path) -> None:
    """Amid recalls, the death of an engine, and that of the daemon. All pages keep their contents."""
    variant = pressure.Variant("guarantees and recalls", True, None)
    run = pressure.PressureRun(tmp_path, NUMBERS[device.kind], variant)
    try:
        told = run.play()
    finally:
        run.close()
    row = pressure.summary(variant, told, run.lent)
    print(row)
    assert row["refused: guaranteed"] == "0"
    assert row["wrong"] == "0"
    assert sum(one["refused"]["beyond"] for one in told), "there was memory enough for everybody"
    assert sum(one["recalls"] for one in told) or sum(one["preempted"] for one in told)
    assert any(time < pressure.READY_NS for one in told for time in one["grown"]), "nothing was borrowed ahead"


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each number, and a column for each way."""
    assert pressure.main(["--seconds", "1.5", "--capacity", "256MiB"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert lines[0] == "|  | guarantees and recalls | memory for everybody | first come, first served |"
    assert {line.count("|") for line in lines} == {5}
    assert any(line.startswith("| refused: guaranteed |") for line in lines)


TOLD = {
    "finished": 1,
    "preempted": 0,
    "recalls": 1,
    "wrong": 0,
    "spare": 2 * MIB,
    "refused": {"guaranteed": 1, "share": 0, "beyond": 0},
    "grown": [4_000] * 98 + [3_000_000] * 2,
    "waited": {"guaranteed": [4_000] * 98, "share": [3_000_000] * 2, "beyond": []},
}
"""What an engine tells that was refused a page of its guarantee, and found 98 of 100 ready."""


def test_each_target_is_beside_its_figure() -> None:
    """A refusal within the guarantee misses its target; a part of pages that are ready is to be reached."""
    found = {goal.what: goal for goal in pressure.goals(pressure.Variant("crowded", True, None), [TOLD])}
    assert {what: (goal.value, goal.target, goal.reached) for what, goal in found.items()} == {
        "crowded: refused within the guarantee": (1, 0, False),
        "crowded: waited >2 ms within the share, p99": (3, 100, True),
        "crowded: pages that were ready": (98, 98, True),
        "crowded: grow p99": (3_000, 500, False),
        "crowded: most spare of an engine": (2, 1024, True),
    }
    roomy = {goal.what: goal.reached for goal in pressure.goals(pressure.Variant("roomy", True, None, 3), [TOLD])}
    assert not roomy["roomy: pages that were ready"]
    assert roomy["roomy: grow p50"]
    assert not pressure.goals(pressure.Variant("first come, first served", False, None), [TOLD])


def test_a_run_is_drawn(tmp_path: Path) -> None:
    """A picture of a few moments, one of them before the trace began."""
    pytest.importorskip("matplotlib")
    used = [(moment - 0.5, {"t0": 100 * MIB, "t2": moment * 50 * MIB}) for moment in range(8)]
    plot.draw(NUMBERS["host"], used, tmp_path / "pressure.png")
    assert (tmp_path / "pressure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_without_matplotlib_no_picture_is_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told at once, and not after a minute of work."""
    with pytest.raises(SystemExit):
        pressure.main(["--plot", str(tmp_path / "pressure.png")])
    assert "pip install matplotlib" in capsys.readouterr().err
