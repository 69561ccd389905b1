"""`make check` finds the banned words of tools/prose.py, and finds them only in text that people read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check(*arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.prose", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_banned_word_is_found_with_its_line(tmp_path: Path) -> None:
    """Somebody writes a page in the old style. Each sentence is reported once, with what to write instead."""
    page = tmp_path / "page.md"
    page.write_text(
        "A worker holds it.\nWho holds it gives it back.\nThat is none.\nOn the card, it runs.\nAsk whoever came.\n"
    )
    done = check(page)
    assert done.returncode == 1
    found = [line.removeprefix(f"{page}:").split(": ")[:2] for line in done.stdout.splitlines()]
    assert found == [["2", "'Who holds'"], ["3", "'is none'"], ["4", "'card'"], ["5", "'whoever'"]]
    assert "GPU" in done.stdout


def test_a_long_line_of_a_page_is_found(tmp_path: Path) -> None:
    """Not of a table, and not of code."""
    page, long = tmp_path / "page.md", "x" * 121
    page.write_text(f"{long[1:]}\n{long}\n| {long} |\n```\n{long}\n```\n- {long}\n")
    numbers = [line.removeprefix(f"{page}:").partition(":")[0] for line in check(page).stdout.splitlines()]
    assert numbers == ["2", "7"]


def test_of_a_program_only_the_text_is_checked(tmp_path: Path) -> None:
    """`is None` and a variable called `card` are code; a docstring, a comment and an f-string are text."""
    program = tmp_path / "program.py"
    program.write_text(
        '"""Borrow on the card."""\n\ncard = None\nif card is None:  # made anew\n    print(f"{card}: he died")\n'
    )
    done = check(program)
    assert [line.removeprefix(f"{program}:").split(": ")[:2] for line in done.stdout.splitlines()] == [
        ["1", "'card'"],
        ["4", "'anew'"],
        ["5", "'he'"],
    ]
