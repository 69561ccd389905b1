"""`make sim`: play a world for any number of steps, from a seed that is printed."""

from __future__ import annotations

import argparse
import secrets
import sys
import time

from tests.simulation.shrink import Failed, run


def main() -> int:
    """Play it, and say what happened; status 1 and a shrunk transcript when the core failed."""
    parser = argparse.ArgumentParser(description="A world around the core, from a seed.")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    start = time.perf_counter()
    try:
        world = run(seed, options.steps)
    except Failed as failed:
        print(failed)
        return 1
    print(world.referee.report())
    print(f"{time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
