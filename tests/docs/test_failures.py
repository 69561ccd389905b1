"""The page on failures names the test that shows each row."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "failures.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    files = {path.relative_to(TESTS.parent): path.read_text() for path in TESTS.rglob("*.py")}
    named = set(re.findall(r"`([\w/]*test_\w+\.py)", PAGE))
    assert len(named) > 30
    assert [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in files)] == []
    tests = set(re.findall(r"\b(?:def|class) ([Tt]est_?\w+)", "\n".join(files.values())))
    assert sorted(set(re.findall(r"::([Tt]est_?\w+)", PAGE)) - tests) == []


def test_every_row_has_its_test() -> None:
    rows, tests = PAGE.split("## Which test shows it")
    first = [re.findall(r"^\| (.+?) \|", part, re.MULTILINE) for part in (rows, tests)]
    assert first[0] == first[1]
