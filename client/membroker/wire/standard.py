"""Descriptors 0 to 2, which a program may be started without; it must import nothing that is slow.

Else the next socket or file gets one of these numbers, and what a C library writes to its stderr goes into that.
"""

from __future__ import annotations

import os
import sys


def open_standard_descriptors() -> None:
    """Open those of the descriptors 0 to 2 that are closed on /dev/null. To be called before anything is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free: this one
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - until the process ends
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
