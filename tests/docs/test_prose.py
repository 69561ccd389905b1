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
    """Each sentence is reported once, with what to write instead; and a line that is too long, but not of a table."""
    page, long = tmp_path / "page.md", "x" * 121
    page.write_text(f"A worker holds it.\nWho holds it gives it back.\nOn the card, it runs.\n| {long} |\n{long}\n")
    done = check(page)
    assert done.returncode == 1
    found = [line.removeprefix(f"{page}:").split(": ")[:2] for line in done.stdout.splitlines()]
    assert [number for number, _ in found] == ["2", "3", "5"]
    assert [words for _, words in found[:2]] == ["'Who holds'", "'card'"]
    assert "GPU" in done.stdout


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
