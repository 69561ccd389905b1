"""Sizes: parse what people write, round to the granularity, print what people read.

Owns every conversion between bytes, text and granules; must never touch a device.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import SupportsIndex, TypeAlias

from ..wire.names import MAX_BYTES as MAX_BYTES

Size: TypeAlias = SupportsIndex | str
"""Bytes, as an int of Python's or NumPy's, or as text: what `parse_size` reads."""

MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "PIB": 1 << 50,
    "EIB": 1 << 60,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "EB": 10**18,
}
_SHORT = {letter + i: 1 << 10 * (n + 1) for n, letter in enumerate("KMGTPE") for i in ("", "i")}
_SHORT |= {letter.lower(): 1000 ** (n + 1) for n, letter in enumerate("KMGTPE")}
"""Kubernetes' `8Gi`, and what vLLM's flags mean by `8G` and `8g`: 2^30 and 10^9. Only here does the case matter."""
_TEXT = re.compile(r"\s*(\d{1,20})(?:\.(\d{1,9}))?\s*([A-Za-z]*)\s*")


def parse_size(size: Size) -> int:
    """Return `size` in bytes; text is a number and a unit, as in `"8GiB"`, `"1.5 GiB"` or `"500MB"`.

    One letter means what vLLM's flags mean by it: `"8G"` is `"8Gi"`, which is `"8GiB"`, and `"8g"` is `"8GB"`.
    NumPy's integers and other objects with `__index__` count as ints; a bool or a float does not. Raises `ValueError`
    for a negative number, an unknown unit, a fraction of a byte, or more than 2^63-1, and `TypeError` for another type.
    """
    if isinstance(size, bool) or not (isinstance(size, str) or hasattr(size, "__index__")):
        raise TypeError(f'a size is an int of bytes or text such as "8GiB", not {type(size).__name__}')
    value = _parse_text(size) if isinstance(size, str) else operator.index(size)
    if not 0 <= value <= MAX_BYTES:
        raise ValueError(f"a size must be between 0 and 2^63-1 bytes, not {size!r}")
    return value


def _parse_text(text: str) -> int:
    match = _TEXT.fullmatch(text)
    unit = (_SHORT.get(match[3]) or _UNITS.get(match[3].upper())) if match else None
    if match is None or unit is None:
        raise ValueError(f'cannot read {text!r} as a size: write a number and a unit, such as "8GiB" or "500MB"')
    whole, fraction = match[1], match[2] or ""
    scaled = int(whole + fraction) * unit
    scale: int = 10 ** len(fraction)
    value, rest = divmod(scaled, scale)
    if rest:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return value


def round_up(size: int, granularity: int) -> int:
    """Return the smallest multiple of `granularity` that is at least `size`, both in bytes."""
    return -(-size // granularity) * granularity


def is_power_of_two(value: int) -> bool:
    """Say whether `value` is a power of two (zero and negatives are not)."""
    return value > 0 and value & (value - 1) == 0


def format_size(size: int) -> str:
    """Return `size` bytes as people read it: `"8.0 GiB"`, `"48.0 MiB"`, `"512 B"`."""
    if abs(size) < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        value /= 1024
        if abs(value) < 1024 or unit == "EiB":
            return f"{value:.1f} {unit}"
    raise AssertionError("unreachable")


def format_exact(size: int) -> str:
    """Return `size` bytes as people read it, and nothing rounded: `"8.0 GiB"`, `"2046.0 MiB"`, `"1025 B"`.

    For sentences about what does not fit: rounded, 2.0 GiB would be more than 2.0 GiB. The text is a size again.
    """
    for number, unit in enumerate(("EiB", "PiB", "TiB", "GiB", "MiB", "KiB")):
        bits = 60 - 10 * number
        if abs(size) >= 1 << bits and size * 10 % (1 << bits) == 0:
            whole, tenths = divmod(abs(size) * 10 >> bits, 10)
            return f"{'-' * (size < 0)}{whole}.{tenths} {unit}"
    return f"{size} B"


def joined(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ascending parts, each as (start, size), with adjacent ones as one."""
    runs: list[tuple[int, int]] = []
    for start, size in parts:
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        else:
            runs.append((start, size))
    return runs
