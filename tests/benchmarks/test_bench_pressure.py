"""`python -m benchmarks.pressure` in small: three tenants want more than there is, and no promise is broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.pressure import __main__ as pressure
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
