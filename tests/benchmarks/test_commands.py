"""What each benchmark says before it measures anything."""

from __future__ import annotations

import pytest
from tests.benchmarks.commands import bench

pytestmark = [pytest.mark.deep, pytest.mark.parametrize("which", ["load", "gpu"])]


def test_a_place_that_is_not_there_is_told_at_once(which: str) -> None:
    """A file that cannot be written is refused at once, not after minutes of work."""
    done = bench(which, "--json", "/nowhere/bench.json")
    assert done.returncode == 2
    assert "there is no directory /nowhere" in done.stderr


def test_help_teaches(which: str) -> None:
    """`--help` says what is measured, and how to read the report."""
    done = bench(which, "--help")
    assert done.returncode == 0
    more = ["--only SCENE"] * (which == "gpu")
    for word in ("scenes:", "how to read it:", "examples:", "--quick", "--json FILE", *more):
        assert word in done.stdout
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
