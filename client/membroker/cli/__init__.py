"""The command `membroker`. Only the command line lives here; nothing else of the library imports it."""

from __future__ import annotations

from ..wire.standard import import_quietly, open_standard_descriptors


def run() -> int:
    """Run one command and return its exit status."""
    open_standard_descriptors()
    status: int = import_quietly("membroker.cli.main").main()
    return status
