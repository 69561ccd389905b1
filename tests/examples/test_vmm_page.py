"""The page docs/vmm.md, run as its reader would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.daemons import DEADLINE_SECONDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vmm.md").read_text()


def test_every_block_of_the_page_runs() -> None:
    """One after the other, in one process, which forgets nothing."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", "\n".join(blocks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
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
