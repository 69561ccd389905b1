"""The benchmarks as a person runs them, and what they say about themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 280
"""Only a benchmark that hangs reaches it."""


def bench(which: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks.<which>`, as `make` does."""
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{which}", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
