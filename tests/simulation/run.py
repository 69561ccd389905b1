"""`make sim`: play worlds for any number of steps, from a seed that is printed."""

from __future__ import annotations

import argparse
import secrets
import sys
import time

from tests.simulation.joined import Joined
from tests.simulation.shrink import Failed, run

WORLD_STEPS = 10_000
"""How long each world is played. A seed decides what kind of world it is: many find more than a long one."""


def main() -> int:
    """Play it, and say what happened; status 1 and a shrunk transcript when the core failed."""
    parser = argparse.ArgumentParser(
        description=f"Worlds around the core, of {WORLD_STEPS:,} steps each. The first one has the seed, the next one "
        "the seed after it, and so on."
    )
    parser.add_argument("--steps", type=int, default=200_000, help="of all worlds together; default: %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--joined", action="store_true", help="the library's machine of calls and the core together")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    start = time.perf_counter()
    for begin in range(0, options.steps, WORLD_STEPS):
        if options.joined:
            print(f"joined world {seed + begin // WORLD_STEPS}", flush=True)
            joined = Joined(seed + begin // WORLD_STEPS).play(min(WORLD_STEPS, options.steps - begin))
            ended = ", ".join(f"{count} {name}" for name, count in joined.ended.items())
            print(f"calls: {ended}\n{joined.steps:,} steps, with those of crowds")
            continue
        try:
            run(seed + begin // WORLD_STEPS, min(WORLD_STEPS, options.steps - begin), show=True)
        except Failed as failed:
            print(failed)
            return 1
    print(f"{time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
