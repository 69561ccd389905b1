"""How a program starts: its descriptors 0 to 2, and Ctrl-C while it imports. It must import nothing that is slow."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from types import ModuleType


def import_quietly(name: str) -> ModuleType:
    """Return the module `name`. Ctrl-C during its import ends the process without a word: nothing was begun yet."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return import_module(name)
    finally:
        signal.signal(signal.SIGINT, before)


def open_standard_descriptors() -> None:
    """Open those of the descriptors 0 to 2 that are closed on /dev/null. To be called before anything is opened.

    Otherwise the next socket or file gets one of these numbers, and a C library's messages on stderr go into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - until the process ends
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
