"""Which build this is: the version, and the commit if the installation has it (`hatch_build.py` wrote it)."""

from __future__ import annotations

from pathlib import Path

_FILE = Path(__file__).parents[1] / "commit.txt"


def commit() -> str:
    """Return the commit from which this was built, or nothing: an editable installation has none."""
    try:
        return _FILE.read_text().strip()
    except OSError:
        return ""


def version_text(version: str) -> str:
    """Return a version as people read it: `0.1.0`, or `0.1.0 (1a2b3c4d5e6f)` where the commit is known."""
    known = commit()
    return f"{version} ({known})" if known else version
