"""One of many workers that start together. The first loads the weights into a segment, and all others attach it.

python examples/segments.py [SECONDS]     (MEMBROKER_ENDPOINT, or the default endpoint; start as many as you like)

It prints a checksum of the weights, and the one that loads them says so before. SECONDS is how long the loading takes.
"""

from __future__ import annotations

import sys
import time
import zlib

import membroker
from membroker.safetensors import segment_size

TENSORS = {"embed": ("F32", (1000, 256)), "norm": ("F32", (256,))}
"""The tensors with their dtypes, as safetensors names them, and shapes."""


def load(segment: membroker.Segment, seconds: float) -> None:
    """Write the weights, as if they came from a slow disk, and seal them: the others wait for that."""
    print("loading", flush=True)
    for number, tensor in enumerate(segment.lay_out(TENSORS).values(), 1):
        segment.write(tensor.offset, bytes([number]) * tensor.size)
        time.sleep(seconds / len(TENSORS))
    segment.seal()


def made_or_attached(client: membroker.Client, model: membroker.Model, seconds: float) -> membroker.Segment:
    """Return the segment, sealed: loaded by the first worker, attached by all others."""
    while True:
        try:
            segment = model.create_segment("weights", segment_size(TENSORS))
        except membroker.SegmentExists:
            try:
                return client.attach(f"{model.name}/weights", timeout=600)
            except (membroker.WriterDied, membroker.SegmentNotFound):
                time.sleep(0.1)  # its writer died, or it is deleted: the name is free when the memory is free
        else:
            load(segment, seconds)  # if this fails, the waiting workers get WriterDied, and one of them loads
            return segment


def main(seconds: float) -> None:
    """Take part in a start of many workers."""
    with membroker.connect() as client, made_or_attached(client, client.model("llama-7b"), seconds) as segment:
        print(f"{segment.resource_name}: {zlib.crc32(segment.read(0, segment.size)):08x}")


if __name__ == "__main__":
    try:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"could not make or attach the segment: {error}") from None
