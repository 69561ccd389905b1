"""Views: memoryviews of mapped bytes, spans of bytes that other code addresses, and which of them are still alive.

Owns a weak reference to each span, and to the array behind each view. Python 3.11 has no buffer protocol for classes
(PEP 688), so a view is a memoryview of a ctypes array, and every slice, cast or NumPy array made from it keeps that
array alive. It must never take a lock: the garbage collector may free an array in any thread, at any point.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from .vmm.driver import DeviceInfo

_T = TypeVar("_T")


_PACKAGE = os.path.dirname(__file__) + os.sep
_WRAPPER = _PACKAGE + "tracebacks.py"
"""The module whose function stands in front of every public call."""
_MOST_NAMED = 2


class Maker(NamedTuple):
    """What made a view or a span: the call of the library, and the line of the program that called it."""

    call: str
    file: str
    line: int

    def __str__(self) -> str:
        place = f" at {os.path.basename(self.file)}:{self.line}" if self.file else ""
        return f"{self.call.strip('_')}(){place}"


def _maker() -> Maker:
    """Return what makes a view now. It keeps no frame: that would keep the program's variables alive."""
    frame, call = sys._getframe(2), ""
    while frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_filename != _WRAPPER:
            call = frame.f_code.co_name
        if frame.f_back is None:  # a thread of the library's own
            return Maker(call, "", 0)
        frame = frame.f_back
    return Maker(call, frame.f_code.co_filename, frame.f_lineno)


def described(makers: Sequence[Maker]) -> str:
    """Return the makers as words of an error: `3 views (tensor() at train.py:31, view() at train.py:40, …)`."""
    if not makers:
        return ""
    named = ", ".join(dict.fromkeys(map(str, makers[:_MOST_NAMED])))
    more = ", …" if len(makers) > _MOST_NAMED else ""
    return f"{len(makers)} view{'s' * (len(makers) > 1)} ({named}{more})"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Span:
    """`size` bytes at `address` that stay mapped while this object lives. It gives no access to the bytes themselves.

    A span of addresses (`VirtualMemoryPool.addresses`) keeps only the addresses: their memory comes and goes.

    `device` has the memory, and `writable` says whether it is mapped writable. `keeper` is the memory's owner.
    """

    keeper: object
    address: int
    size: int
    device: DeviceInfo
    writable: bool


class Views:
    """The living views and spans of one holding. After each one's end `lost_one(holding)` is called, in any thread.

    The reference to the holding is weak: a cycle would delay the end of a dropped client until a garbage collection.
    """

    def __init__(self, holding: _T, lost_one: Callable[[_T], None]) -> None:
        # A `weakref.WeakMethod` takes 0.7 us more, and each allocation makes a holding.
        self._holding = weakref.ref(holding)
        self._lost_one: Callable[[Any], None] = lost_one
        self._living: dict[int, tuple[weakref.ref[Any], int, int, bool, Maker]] = {}

    def make(self, keeper: object, address: int, size: int) -> memoryview:
        """Return the bytes [address, address + size), writable. It keeps `keeper` alive."""
        array: Any = (ctypes.c_ubyte * size).from_address(address)
        array.keeper = keeper
        self._watch(array, address, size, keeps_memory=True)
        return memoryview(array).cast("B")

    def count(self, span: Span, *, keeps_memory: bool = True) -> Span:
        """Add a span to the living ones, and return it."""
        self._watch(span, span.address, span.size, keeps_memory=keeps_memory)
        return span

    def _watch(self, living: Any, address: int, size: int, *, keeps_memory: bool) -> None:
        reference = weakref.ref(living, self._forget)
        self._living[id(reference)] = (reference, address, address + size, keeps_memory, _maker())

    def held_in(self, address: int, size: int) -> str:
        """Return what made the living views and spans that keep memory in [address, address + size), or ""."""
        return described(
            [
                maker
                for _, start, end, keeps, maker in list(self._living.values())
                if keeps and start < address + size and address < end
            ]
        )

    def held_by(self, before: str = "") -> str:
        """Return what made the living views and spans, after the words `before`, or "" without any."""
        held = described([maker for *_, maker in list(self._living.values())])
        return before + held if held else ""

    def ranges(self, *, pages_only: bool = False) -> list[tuple[int, int]]:
        """Return (first address, address after the last byte) of each living view and span.

        With `pages_only`, those that keep only addresses are left out.
        """
        # The list is copied in one step, because a view that dies meanwhile changes the table.
        return [(start, end) for _, start, end, keeps, _ in list(self._living.values()) if keeps or not pages_only]

    def any(self) -> bool:
        """Return whether any view or span is alive."""
        return bool(self._living)

    def _forget(self, reference: weakref.ref[Any]) -> None:
        self._living.pop(id(reference), None)
        holding = self._holding()
        if holding is not None:
            self._lost_one(holding)
