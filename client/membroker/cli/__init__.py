"""The command `membroker`. Only the command line lives here; nothing else of the library imports it."""

from __future__ import annotations

from ..ext import standard


def run() -> int:
    """Run one command and return its exit status."""
    standard.open_standard_descriptors()
    status: int = standard.import_quietly("membroker.cli.main").main()
    return status
