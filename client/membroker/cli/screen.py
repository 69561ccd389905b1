"""The screen of `membroker top`: its lines, columns and keys, over `curses`.

Owns the terminal while it runs. `curses` leaves it as it was, at an exception too. It must never talk to a broker.
"""

from __future__ import annotations

import curses
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..ext import names
from ..vmm.sizes import format_size
from . import tables
from .readers import Row, Snapshot, rows_of

_POLL_MS = 100
_LONGEST_FILTER = 96


def show(snapshots: Callable[[], list[Snapshot]]) -> int:
    """Show what `snapshots` returns until a key or a signal ends it; return the exit status."""
    for variable in ("COLUMNS", "LINES"):  # curses would believe them, also after a change of size
        os.environ.pop(variable, None)
    try:
        curses.setupterm()
        if not curses.tigetstr("cup"):
            raise curses.error("it cannot move its cursor")
        curses.set_escdelay(25)  # ncurses would wait a second for what may follow Escape
        curses.wrapper(lambda screen: Screen(screen, snapshots).loop())
    except curses.error as error:
        print(
            f"membroker: this terminal cannot show it ({error}): set TERM, or use `membroker models`", file=sys.stderr
        )
        return 1
    return 0


_ORDERS: Mapping[str, tuple[str, Callable[[Row], Any]]] = {
    "u": ("used", lambda row: -row.used),
    "g": ("guarantee", lambda row: -row.guarantee),
    "s": ("share", lambda row: -(row.share or 0)),
    "w": ("waiting", lambda row: -row.waiting),
    "r": ("rate", lambda row: -row.rate),
    "d": ("refused", lambda row: -row.refused),
    "n": ("name", lambda row: ""),
}
"""By the key that chooses an order: its name, and what the rows are sorted by."""
_KEYS = (
    *(f"{key} {name}" for key, (name, _) in _ORDERS.items()),
    *("R reverse", "t tenants", "/ filter", "h help", "q quit"),
)
_HEADS = ("used", "guarantee", "limit", "share", "waiting", "recalled", "late", "rate", "refused")
_WIDTH, _DEVICE_WIDTH = 10, 15
_POD_WIDTH = 20
"""The least characters of the longest pod that are shown, if it has so many."""


class Screen:
    """The screen of one terminal, its order, its filter, and where it is scrolled to."""

    def __init__(self, screen: curses.window, snapshots: Callable[[], list[Snapshot]]) -> None:
        self._screen = screen
        self._snapshots = snapshots
        self._order, self._reverse, self._by_tenant, self._help = "u", False, False, False
        self._filter = ""
        self._typing: str | None = None
        self._top = 0
        self._pod_room = 0
        """The width of the column with the pods; 0 if no row has one."""
        self._late, self._refused = curses.A_BOLD, curses.A_NORMAL
        """A row that keeps what was recalled, or a broker that is gone; and a row that was just refused."""

    def loop(self) -> None:
        """Draw and take keys until one ends it."""
        with suppress(curses.error):
            curses.curs_set(0)
        with suppress(curses.error):
            curses.use_default_colors()
            for pair, colour in ((1, curses.COLOR_RED), (2, curses.COLOR_YELLOW)):
                curses.init_pair(pair, colour, -1)
            self._late, self._refused = curses.color_pair(1), curses.color_pair(2)
        self._screen.timeout(_POLL_MS)
        drawn: object = None
        pressed = True
        while True:
            found = self._snapshots()
            shown = (found, int(time.time()))  # the clock goes on, whether a broker answers or not
            if pressed or shown != drawn:
                self._draw(found)
                drawn = shown
            try:
                key = self._screen.get_wch()
            except curses.error as error:  # no key in this time
                if not sys.stdin.isatty():  # the terminal is gone: every look for a key would fail at once
                    raise SystemExit(128 + signal.SIGHUP) from error
                pressed = False
                continue
            pressed = True
            if key == curses.KEY_RESIZE:
                curses.update_lines_cols()
                self._screen.clear()  # draw everything again
            elif self._typing is not None:
                self._type(key)
            elif not self._press(key):
                return

    def _press(self, key: int | str) -> bool:
        """Do what a key says; False to end."""
        if key == "q":
            return False
        if isinstance(key, str) and key in _ORDERS:
            self._order, self._reverse = key, False
        elif key == "R":
            self._reverse = not self._reverse
        elif key == "t":
            self._by_tenant = not self._by_tenant
        elif key == "h":
            self._help = not self._help
        elif key == "/":
            self._typing = ""
        elif key in (curses.KEY_DOWN, "j", curses.KEY_NPAGE):
            self._top += 1 if key != curses.KEY_NPAGE else 10
        elif key in (curses.KEY_UP, "k", curses.KEY_PPAGE):
            self._top = max(0, self._top - (1 if key != curses.KEY_PPAGE else 10))
        return True

    def _type(self, key: int | str) -> None:
        """Take a key of the filter's text."""
        assert self._typing is not None
        if key in ("\n", "\r", curses.KEY_ENTER):
            self._filter, self._typing, self._top = self._typing, None, 0
        elif key == "\x1b":
            self._typing = None
        elif key in (curses.KEY_BACKSPACE, "\x7f", "\b"):
            self._typing = self._typing[:-1]
        elif isinstance(key, str) and key.isprintable() and len(self._typing) < _LONGEST_FILTER:
            self._typing += key

    def _draw(self, snapshots: Sequence[Snapshot]) -> None:
        height, width = self._screen.getmaxyx()
        rows = self._rows(snapshots)
        self._pod_room = _pod_room(rows, width, len(snapshots) > 1)
        lines = list(self._lines(snapshots, width, len(rows)))
        head = len(lines)
        self._top = max(0, min(self._top, len(rows) - max(1, height - head)))
        lines += [
            (
                self._line(row, width, len(snapshots) > 1),
                self._late if row.late else self._refused if row.is_refused else curses.A_NORMAL,
            )
            for row in rows[self._top :][:height]
        ]
        if not rows and all(snapshot.device for snapshot in snapshots):
            lines.append(("no models" + (f" that match {self._filter!r}" if self._filter else ""), curses.A_DIM))
        self._screen.erase()
        for number, (line, attribute) in enumerate(lines[:height]):
            with suppress(curses.error):  # the last cell of the last line, and a terminal that shrinks meanwhile
                self._screen.addnstr(number, 0, tables.printable(line), max(0, width - 1), attribute)
        self._screen.refresh()

    def _rows(self, snapshots: Sequence[Snapshot]) -> list[Row]:
        rows = [
            row
            for row in rows_of(snapshots, by_tenant=self._by_tenant)
            if any(self._filter.lower() in name.lower() for name in (row.name, *row.pods))
        ]
        _, figure = _ORDERS[self._order]
        rows.sort(key=lambda row: (figure(row), row.name, row.device), reverse=self._reverse)
        return rows

    def _lines(self, snapshots: Sequence[Snapshot], width: int, count: int) -> Iterator[tuple[str, int]]:
        """Yield the lines above `count` rows: the devices, the keys, the heads of the columns."""
        what = "tenant" if self._by_tenant else "model"
        for snapshot in snapshots:
            yield from _device_lines(snapshot, width, self._late)
        if self._typing is not None:
            yield f"names that contain: {self._typing}_", curses.A_BOLD
        elif self._help:
            for line in _filled(_KEYS, "  ", width):
                yield line, curses.A_DIM
        else:
            known = f"{count} {what}{'s' * (count != 1)} " if all(snapshot.device for snapshot in snapshots) else ""
            order = f"{known}by {_ORDERS[self._order][0]}{', reversed' * self._reverse}"
            order += f", filter {self._filter!r}" if self._filter else ""
            host = os.environ.get(names.NODE_VARIABLE) or socket.gethostname()
            clock = f"{host}, {time.strftime('%H:%M:%SZ', time.gmtime())}"
            for line in _filled((order, "(h help, q quit)", clock), "   ", width):
                yield line, curses.A_DIM
        heads = "".join(f"{head:>{_WIDTH}}" for head in self._shown(_HEADS, width, len(snapshots) > 1))
        heads += self._pod("pod") + "  device" * (len(snapshots) > 1)
        yield f"{what:<{_name_width(width)}}{heads}", curses.A_REVERSE

    def _line(self, row: Row, width: int, with_device: bool) -> str:
        sizes = (row.used, row.guarantee or None, row.limit, row.share, row.waiting or None)
        cells = [_size(size) for size in (*sizes, row.recalled or None, row.late or None)]
        cells += [f"{row.rate:.0f}/s" if row.rate else "-", str(row.refused)]
        room = _name_width(width)
        name = row.name if row.location == "device" else f"{row.name} ({row.location})"
        name += " (asleep)" * row.is_asleep
        name = cut(name, room - 1)
        numbers = "".join(f"{cell:>{_WIDTH}}" for cell in self._shown(cells, width, with_device))
        pod = self._pod(tables.first_of(row.pods))
        return f"{name:<{room}}{numbers}{pod}" + (f"  {row.device}" if with_device else "")

    def _pod(self, text: str) -> str:
        """Return a cell of the column with the pods, if there is one."""
        return f"  {cut(text, self._pod_room):<{self._pod_room}}" if self._pod_room else ""

    def _shown(self, cells: Sequence[str], width: int, with_device: bool) -> Sequence[str]:
        """Return as many of the columns as fit."""
        beside = len(self._pod("")) + _DEVICE_WIDTH * with_device
        return cells[: max(1, (width - 1 - _name_width(width) - beside) // _WIDTH)]


def _device_lines(snapshot: Snapshot, width: int, bad: int) -> Iterator[tuple[str, int]]:
    if snapshot.device is None:
        trouble = f"{snapshot.name}: {snapshot.trouble or 'waiting for its broker'}"
        for line in textwrap.wrap(trouble, max(20, width - 1), subsequent_indent="  "):
            yield line, bad
        return
    for books in snapshot.device.locations.values():
        if not books.capacity_bytes:
            continue
        lent = f"lent {format_size(books.lent_bytes)} of {format_size(books.capacity_bytes)}"
        parts = [f"{snapshot.name} {books.location}: {lent}"]
        parts += [f"free {format_size(books.free_bytes)}"]
        for what, size in (
            ("releasing", books.releasing_bytes),
            ("unaccounted", books.unaccounted_bytes),
            ("waiting", books.waiting_bytes),
            ("guarantees short by", books.guarantee_shortfall_bytes),
        ):
            if size:
                parts.append(f"{what} {format_size(size)}")
        sessions = snapshot.device.sessions
        parts.append(f"{sessions} session{'s' * (sessions != 1)}")
        parts += ["DRAINED"] * snapshot.device.draining + ["JOURNAL FULL"] * snapshot.device.journal_full
        parts += ["DEVICE LOST"] * snapshot.device.device_lost
        for line in _filled(parts, ", ", width):
            yield line, curses.A_BOLD
    if snapshot.silent_seconds:
        at = time.strftime("%H:%M:%SZ", time.gmtime(snapshot.read_at))
        warning = f"{snapshot.name}: no answer for {snapshot.silent_seconds} s, these numbers are from {at}"
        yield warning, curses.A_STANDOUT


def cut(name: str, room: int) -> str:
    """Return a name in so many characters: names of models differ at their ends, so its middle is left out."""
    first = (room - 1) // 2
    return name if len(name) <= room else f"{name[:first]}…{name[len(name) - (room - 1 - first) :]}"


def _filled(parts: Iterable[str], separator: str, width: int) -> Iterator[str]:
    """Yield the parts in as few lines as they fit in, without dividing one."""
    line = ""
    for part in parts:
        longer = f"{line}{separator}{part}" if line else part
        if line and len(longer + separator.rstrip()) >= width:
            yield line + separator.rstrip()
            line = f"  {part}"
        else:
            line = longer
    yield line


def _name_width(width: int) -> int:
    return max(12, min(34, width // 3))


def _pod_room(rows: Iterable[Row], width: int, with_device: bool) -> int:
    """Return the width of the column with the pods: what all other columns leave, but enough to know a pod by."""
    longest = max((len(tables.first_of(row.pods)) for row in rows if row.pods), default=0)
    left = width - 3 - _name_width(width) - _WIDTH * len(_HEADS) - _DEVICE_WIDTH * with_device
    return min(longest, max(_POD_WIDTH, left))


def _size(size: int | None) -> str:
    return tables.NONE if size is None else format_size(size).replace(" ", "")
