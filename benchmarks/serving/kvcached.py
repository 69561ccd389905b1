"""What the benchmark knows of kvcached 0.1: how it is started, and how much memory its engines have mapped.

Nothing but the free memory of the GPU bounds all of its engines together. So the benchmark fills the GPU up to the
budget, less what they have mapped at that moment, and reads what they have mapped during the run.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from membroker.vmm import Driver, Location

ENVIRONMENT: Final[Mapping[str, str]] = {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1"}
NEVER_TAKEN: Final = 20
"""It leaves a twentieth of the GPU free (KVCACHED_GPU_UTILIZATION), whatever is there."""
_FIGURES: Final = struct.Struct("=qqq")
"""What it tells of itself: the most that it may map, what blocks are in, and what is mapped ahead of them, in bytes."""
_DIRECTORY: Final = Path("/dev/shm")


def segment(model: int) -> str:
    """Return the name under which a model's engine tells of itself: KVCACHED_IPC_NAME."""
    return f"mb-serving-{os.getpid()}-m{model}"


def mapped(model: int) -> int:
    """Return the bytes that a model's engine has mapped; 0 if it tells nothing."""
    try:
        with (_DIRECTORY / segment(model)).open("rb") as file:
            _, used, ahead = _FIGURES.unpack(file.read(_FIGURES.size))
    except (OSError, struct.error):
        return 0
    return max(0, used) + max(0, ahead)


def left_free(driver: Driver, budget: int, models: Iterable[int]) -> int:
    """Return how much of the GPU must be free so that all engines together can map the budget, and no more."""
    memory = driver.memory(Location.DEVICE)
    never = 0 if memory is None else memory.total // NEVER_TAKEN
    return max(0, budget - sum(map(mapped, models))) + never
