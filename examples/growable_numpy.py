"""A column of measurements that grows by appending, and is never copied.

python examples/growable_numpy.py        (MEMBROKER_ENDPOINT, or the default endpoint; the host driver)
"""

from __future__ import annotations

import membroker

try:
    import numpy

    from membroker.dlpack import export
except ImportError as error:
    raise SystemExit(f"this example needs NumPy: {error}") from None

BATCHES = 40
BATCH = 50_000
"""Measurements, of 8 bytes each."""


def column(buffer: membroker.GrowableBuffer) -> numpy.ndarray:
    """Return all measurements so far: an array over the buffer's own bytes."""
    return numpy.from_dlpack(export(buffer, (buffer.size // 8,), "F64"))


def main() -> None:
    """Append while the first array stays in use, then keep the smallest measurements."""
    random = numpy.random.default_rng(7)
    with (
        membroker.connect() as client,
        client.model("measurements").growable_buffer(0, capacity="1TiB", page_size="2MiB") as buffer,
    ):
        buffer.grow(BATCH * 8)
        first = column(buffer)  # stays valid while the column grows
        first[:] = random.normal(size=BATCH)
        for _ in range(BATCHES - 1):
            offset = buffer.grow(BATCH * 8)
            column(buffer)[offset // 8 :] = random.normal(size=BATCH)
        every = column(buffer)
        print(f"{len(every)} measurements in {buffer.size} bytes; {buffer.physical_usage_bytes} are charged")
        print(f"their mean is {every.mean():.4f}; the first array is still valid: {first[0] == every[0]}")
        every.sort()
        del first, every  # an array keeps its bytes mapped
        buffer.resize(BATCH * 8)
        print(f"kept the smallest {BATCH}, up to {column(buffer).max():.4f}; {buffer.physical_usage_bytes} are charged")


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
