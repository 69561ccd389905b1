"""The decorator `value` makes the classes of events, effects and facts, whose instances must never be changed.

Only the type checker enforces that. At run time, `frozen=True` would make a value of seven fields four times as slow
to create, and one extent needs about fifteen values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def value(cls: type[_T]) -> type[_T]:
    """Make a class of annotated fields a value: compared, hashed and shown by its fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
