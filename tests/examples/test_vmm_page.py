"""The page docs/vmm.md, run as its reader would run it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vmm.md").read_text()


def test_every_block_of_the_page_runs() -> None:
    """One after the other, in one process, which forgets nothing."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", "\n".join(blocks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "b'bytes'",
        "b'first' b'ov' 3",
        "b'first' 1",
        "b'one'",
        "EACCES",
        "b'over both' b'over'",
        "EACCES",
        "2 True Read",
    ]


def test_every_test_that_the_page_names_exists() -> None:
    """The table says which test is which of the seeds' own: a test that is renamed takes its line with it."""
    tests = set()
    for name in ("test_ranges", "test_manager"):
        tree = ast.parse((ROOT / "tests" / "client" / "vmm" / f"{name}.py").read_text())
        tests |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    table = PAGE.partition("| test of a seed | here |")[2]
    rows = [[re.findall(r"`(\w+)`", cell) for cell in row.split("|")[1:3]] for row in table.strip().splitlines()[1:]]
    named = [name for seeds, here in rows for name in here or [f"test_{seed}" for seed in seeds]]
    assert len([seed for seeds, _here in rows for seed in seeds]) == 24
    assert set(named) <= tests
