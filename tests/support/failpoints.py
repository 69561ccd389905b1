"""Puts a function at the daemon's failpoints, which do nothing outside tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from membrokerd.system import failpoints


def put(reach: Callable[[str], None]) -> None:
    """Call `reach` with the name of each point that this process comes to. Every module has its own `reach`."""
    importlib.import_module("membrokerd.daemon")
    taken = failpoints.reach
    for module in list(sys.modules.values()):
        if vars(module).get("reach") is taken:
            vars(module)["reach"] = reach
