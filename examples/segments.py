"""One of many workers that start together. The first loads the weights into a segment, and all others attach it.

python examples/segments.py [SECONDS]     (MEMBROKER_ENDPOINT, or the default endpoint; start as many as you like)

It prints whether it made or attached the segment, and a checksum of the weights. SECONDS is how long the loading takes.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable

import membroker
from membroker.safetensors import segment_size

TENSORS = {"embed": ("F32", (1000, 256)), "norm": ("F32", (256,))}
"""The tensors with their dtypes, as safetensors names them, and shapes."""


def create_or_attach(
    client: membroker.Client,
    model: membroker.Model,
    name: str,
    size: int,
    fill: Callable[[membroker.Segment], None],
    seconds: float = 600.0,
) -> tuple[membroker.Segment, bool]:
    """Return the segment, sealed, and whether it was made here."""
    end = time.monotonic() + seconds
    while True:
        try:
            segment = model.create_segment(name, size)
        except membroker.SegmentExists:
            try:
                left = max(0.0, end - time.monotonic())
                return client.attach(f"{model.name}/{name}", timeout=left), False
            except (membroker.WriterDied, membroker.SegmentNotFound):
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)  # its writer died, or it is deleted: the name is free when the memory is free
        else:
            try:
                fill(segment)
                segment.seal()
            except BaseException:
                segment.close()  # the waiting workers get WriterDied, and one of them creates it again
                raise
            return segment, True


def load(segment: membroker.Segment, seconds: float) -> None:
    """Write the weights, as if they came from a slow disk."""
    index = segment.lay_out(TENSORS, {"loaded_by": "examples/segments.py"})
    print("loading", flush=True)
    for number, tensor in enumerate(index.values(), 1):
        segment.write(tensor.offset, bytes([number]) * tensor.size)
        time.sleep(seconds / len(index))


def main(seconds: float) -> None:
    """Take part in a start of many workers."""
    with membroker.connect() as client:
        model = client.model("llama-7b")
        size = segment_size(TENSORS, {"loaded_by": "examples/segments.py"})
        segment, made = create_or_attach(client, model, "weights", size, lambda one: load(one, seconds))
        with segment:
            total = 0
            for tensor in segment.index().values():
                total = zlib.crc32(segment.read(tensor.offset, tensor.size), total)
            print(f"{'made' if made else 'attached'} {segment.resource_name}: {total:08x}", flush=True)


def seconds_of(text: str) -> float:
    """Read SECONDS."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86400")
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Load the weights, or attach them if another worker was first.")
    parser.add_argument("seconds", nargs="?", metavar="SECONDS", type=seconds_of, default=0.0, help="how long it loads")
    try:
        main(parser.parse_args().seconds)
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"could not make or attach the segment: {error}") from None
