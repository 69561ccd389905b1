"""A daemon on a driver, and the sums and counts of its histograms, before and after."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

from .. import daemon
from ..daemon import TENANT
from .bare import TWIN_BYTES
from .figures import Counts, Labels

TWIN_STOCK = "1GiB"
"""The host driver keeps no stock by default. This is the default of a GPU."""
HOST_CAPACITY = "32GiB"
"""For offloaded pools: a limit that is never reached."""
_IGNORED = ("gpu_uuid", "location", "le")
_SERIES = re.compile(r"^(membroker_(?:\w+_seconds_(?:sum|count)|stock_extents_total))\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Daemon(daemon.Daemon):
    """A running membrokerd on a driver, with the default stock or without any."""

    module = "benchmarks.fresh_daemon"

    def __init__(self, directory: Path, driver: str, *, stock: bool) -> None:
        self.stock = stock
        super().__init__(directory, _config(driver, stock=stock))

    def counts(self) -> Counts:
        """Return the sums and counts of its histograms now."""
        return parsed(self.fresh_scrape().decode())


def _config(driver: str, *, stock: bool) -> str:
    lines = [f'driver = "{driver}"', f'host_capacity = "{HOST_CAPACITY}"']
    if not stock:
        lines.append("stock = 0")
    if driver == "host":
        lines += [f"capacity = {TWIN_BYTES}", f'stock = "{TWIN_STOCK}"' if stock else ""]
    return "\n".join([*lines, "[metrics]", "port = 0", "[tenants]", f"{TENANT} = {{}}", ""])


def parsed(text: str) -> Counts:
    """Return what /metrics says of times and of the stock, by name and the labels that matter."""
    found: dict[tuple[str, Labels], float] = {}
    for name, labels, value in _SERIES.findall(text):
        kept = tuple(sorted((key, word) for key, word in _LABEL.findall(labels) if key not in _IGNORED))
        found[name, kept] = found.get((name, kept), 0.0) + float(value)
    return found


def difference(before: Counts, after: Counts) -> Counts:
    """Return what came to `before`."""
    return {key: value - before.get(key, 0) for key, value in after.items()}


def running(driver: str, *, stock: bool) -> AbstractContextManager[Daemon]:
    """Run a daemon, which must stop cleanly at the end."""
    return daemon.running(lambda directory: Daemon(directory, driver, stock=stock))
