"""Views: memoryviews over mapped bytes, and which of them are still alive.

Owns a weak reference to the array behind each view. Python 3.11 has no buffer protocol for classes (PEP 688), so
a view is a memoryview of a ctypes array, and every slice, cast or numpy array made from it keeps that array. It
must never take a lock: an array dies in whatever thread, wherever the garbage collector happens to run.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any


class Views:
    """The living views of one holding. `gone`, a method of it, is called after each death, from any thread.

    It is kept weakly: a cycle would leave a client that was forgotten to the garbage collector's leisure.
    """

    def __init__(self, gone: Callable[[], None]) -> None:
        self._gone = weakref.WeakMethod(gone)
        self._numbers = itertools.count()
        self._living: dict[int, tuple[weakref.ref[Any], int, int]] = {}

    def make(self, keeper: object, address: int, size: int) -> memoryview:
        """Return the bytes [address, address + size), writable. It keeps `keeper` alive."""
        array: Any = (ctypes.c_ubyte * size).from_address(address)
        array.keeper = keeper
        number = next(self._numbers)
        reference = weakref.ref(array, partial(self._forget, number))
        self._living[number] = (reference, address, address + size)
        return memoryview(array).cast("B")

    def any_in(self, address: int, size: int) -> bool:
        """Say whether a living view touches [address, address + size)."""
        # A copy in one step: a view that dies meanwhile changes the table.
        return any(start < address + size and address < end for _, start, end in list(self._living.values()))

    def any(self) -> bool:
        """Say whether any view is alive."""
        return bool(self._living)

    def _forget(self, number: int, _reference: weakref.ref[Any]) -> None:
        self._living.pop(number, None)
        gone = self._gone()
        if gone is not None:
            gone()
