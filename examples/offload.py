"""A model that sleeps and wakes up. Meanwhile others can borrow its memory; a bar shows the progress of the copy.

python examples/offload.py [SIZE]     (MEMBROKER_ENDPOINT, or the default endpoint; the broker needs host_capacity)
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable

import membroker
from membroker.vmm import format_size, parse_size

WIDTH = 30
STEP = 1 << 20


def bar(what: str) -> Callable[[int, int], None]:
    """Return a callback that draws a line on stderr: repeatedly on a terminal, else once at the end."""
    begun, terminal = time.monotonic(), sys.stderr.isatty()

    def draw(done: int, total: int) -> None:
        if not terminal and done < total:
            return
        full = WIDTH * done // total
        rate = done / max(time.monotonic() - begun, 1e-9)
        line = f"{what} [{'#' * full}{'.' * (WIDTH - full)}] {format_size(done)}, {format_size(int(rate))}/s"
        print(f"\r{line}" if terminal else line, end="" if terminal and done < total else "\n", file=sys.stderr)

    return draw


def checksum(driver: membroker.vmm.Driver, address: int, size: int) -> int:
    """Return the CRC of mapped bytes, on a GPU or with the host driver."""
    total = 0
    for offset in range(0, size, STEP):
        total = zlib.crc32(driver.read(address + offset, min(STEP, size - offset)), total)
    return total


def main(size: int) -> None:
    """Fill a pool, put it to sleep, and wake it."""
    with membroker.connect() as client:
        model = client.register_model("sleeper")
        with model.pool(page_size="2MiB") as pool:
            address = pool.allocate(0, size)
            for offset in range(0, size, STEP):
                model.driver.write(address + offset, offset.to_bytes(8, "little"))
            before = checksum(model.driver, address, size)
            pool.offload(progress=bar("offload"))
            here, there = pool.physical_usage_bytes, model.stats().books["host"].used_bytes
            print(f"asleep: {format_size(here)} on the device, {format_size(there)} on the host")
            pool.restore(progress=bar("restore"))
            here, after = pool.physical_usage_bytes, checksum(model.driver, address, size)
            print(f"awake: {format_size(here)} on the device, checksum {before:08x} before, {after:08x} now")


def size_of(text: str) -> int:
    """Read SIZE."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Put a pool to sleep and wake it.")
    parser.add_argument("size", nargs="?", metavar="SIZE", type=size_of, default="64MiB", help="default: 64MiB")
    try:
        main(parser.parse_args().size)
    except membroker.MembrokerError as error:
        raise SystemExit(f"not offloaded: {error}") from None
