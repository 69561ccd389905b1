"""Descriptors 0 to 2, with which a program may be started closed. It must import nothing slow.

If they stay closed, the next socket or file gets one of these numbers, and a C library writes its stderr into it.
"""

from __future__ import annotations

import os
import sys


def open_standard_descriptors() -> None:
    """Open /dev/null at each of the descriptors 0 to 2 that is closed. Call this before anything else is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - until the process ends
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
