"""Views: memoryviews over mapped bytes, spans of bytes that others address, and which of them are still alive.

Owns a weak reference to each span, and to the array behind each view. Python 3.11 has no buffer protocol for classes
(PEP 688), so a view is a memoryview of a ctypes array, and every slice, cast or numpy array made from it keeps that
array. It must never take a lock: an array dies in whatever thread, wherever the garbage collector happens to run.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ..vmm.driver import DeviceInfo

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Span:
    """`size` bytes at `address` that somebody uses by their addresses, as long as this lives. It cannot be read.

    `device` is where the memory is, `writable` whether it is mapped so; `keeper` is what the memory belongs to.
    """

    keeper: object
    address: int
    size: int
    device: DeviceInfo
    writable: bool


class Views:
    """The living views and spans of one holding; `lost_one` is called with it after each death, from any thread.

    The holding is kept weakly: a cycle would leave a client that was forgotten to the garbage collector's leisure.
    """

    def __init__(self, holding: _T, lost_one: Callable[[_T], None]) -> None:
        # No `weakref.WeakMethod`: it takes 0.7 us more, and a holding is made with each allocation.
        self._holding = weakref.ref(holding)
        self._lost_one: Callable[[Any], None] = lost_one
        self._numbers = itertools.count()
        self._living: dict[int, tuple[weakref.ref[Any], int, int]] = {}

    def make(self, keeper: object, address: int, size: int) -> memoryview:
        """Return the bytes [address, address + size), writable. It keeps `keeper` alive."""
        array: Any = (ctypes.c_ubyte * size).from_address(address)
        array.keeper = keeper
        self._watch(array, address, size)
        return memoryview(array).cast("B")

    def count(self, span: Span) -> Span:
        """Count a span among what lives, and return it."""
        self._watch(span, span.address, span.size)
        return span

    def _watch(self, living: Any, address: int, size: int) -> None:
        number = next(self._numbers)
        reference = weakref.ref(living, partial(self._forget, number))
        self._living[number] = (reference, address, address + size)

    def any_in(self, address: int, size: int) -> bool:
        """Say whether a living view touches [address, address + size)."""
        # A copy in one step: a view that dies meanwhile changes the table.
        return any(start < address + size and address < end for _, start, end in list(self._living.values()))

    def ranges(self) -> list[tuple[int, int]]:
        """Return the addresses under each living view, and those behind its end."""
        return [(start, end) for _, start, end in list(self._living.values())]

    def any(self) -> bool:
        """Say whether any view is alive."""
        return bool(self._living)

    def _forget(self, number: int, _reference: weakref.ref[Any]) -> None:
        self._living.pop(number, None)
        holding = self._holding()
        if holding is not None:
            self._lost_one(holding)
