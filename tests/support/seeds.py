"""The seed of a test that tries things at random.

It is the same in each run: a test that fails for a new seed says nothing of the change that it was run for. Who
searches sets `MEMBROKER_SEED=random` for a seed that no run has had, or the number that a failed run has printed.
"""

from __future__ import annotations

import os
import random


def chosen_seed() -> int:
    """Return the seed of this run, and print it."""
    given = os.environ.get("MEMBROKER_SEED") or "20261129"
    seed = random.randrange(1 << 32) if given == "random" else int(given)
    print(f"MEMBROKER_SEED={seed}")
    return seed
