"""`python -m benchmarks.guests` in small: stand-ins that share too little memory answer as they do alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.guests.__main__ import IMAGES, TRAININGS
from tests.benchmarks.commands import bench

pytestmark = pytest.mark.deep


def played(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    done = bench("guests", *arguments, "--device", "host", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["faults"] == []
    return found


def test_the_story_compares_each_answer_and_line(tmp_path: Path) -> None:
    found = played(tmp_path, "story", "--slice-seconds", "0.1", "--until", "2")
    programs = found["programs"]
    assert sum(found["held"].values()) > found["total"]
    images = [programs[name] for name in IMAGES]
    assert [one["wrong"] for one in images] == [0] * len(IMAGES)
    assert all(one["seconds"] for one in images)
    sleeps = [(sleep["bytes"], name) for name in IMAGES + TRAININGS for sleep in programs[name]["sleeps"]]
    assert sleeps
    assert all(size in (0, found["held"][name]) for size, name in sleeps)


def test_small_guests_switch_as_often_as_asked(tmp_path: Path) -> None:
    assert len(played(tmp_path, "switches", "--slice-seconds", "0.1", "--until", "20")["wakes"]) >= 20
