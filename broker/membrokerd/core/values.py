"""`value`: makes the classes of events, effects and facts. Their instances must never be changed.

The type checker holds them frozen. At run time nothing does: with `frozen=True` a value of seven fields takes four
times as long to make, and one extent needs about fifteen values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def value(cls: type[_T]) -> type[_T]:
    """Make a class of annotated fields a value: compared, hashed and shown by its fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
