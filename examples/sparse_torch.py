"""A paged cache: blocks keep their addresses, and have memory only while a request uses them.

python examples/sparse_torch.py        (MEMBROKER_ENDPOINT, or the default endpoint; a GPU or the host driver)
"""

from __future__ import annotations

import membroker

try:
    import torch

    from membroker.adapters.torch import device_of
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch: {error}") from None

BLOCKS = 4096
BLOCK = (2, 1024, 8, 128)
"""Keys and values, tokens, heads, width: 4 MiB in bfloat16, which is one tile."""


def take(cache: membroker.SparseArray, count: int) -> list[int]:
    """Give free blocks memory: all of them, or an error that changes nothing."""
    taken = set(cache.tiles())
    blocks = [block for block in range(BLOCKS) if block not in taken][:count]
    cache.back(*blocks)
    return blocks


def block_of(cache: membroker.SparseArray, number: int) -> torch.Tensor:
    """Return a block: its own memory, no copy. A kernel needs only its number, because the stride is constant."""
    return torch.from_dlpack(cache.tensor(number))[0]


def main() -> None:
    """Serve three requests within a limit that is enough for two."""
    with membroker.connect() as client, client.model("paged", limit="32MiB") as model:
        cache = model.sparse_array((BLOCKS, *BLOCK), "BF16", tile_rows=1)
        first, second = take(cache, 4), take(cache, 4)
        for block in (*first, *second):
            block_of(cache, block).fill_(block)
        print(f"two requests on {device_of(model.driver.device).type}: {model.used_bytes >> 20} MiB")
        try:
            take(cache, 4)
        except membroker.OutOfMemory as refused:
            print(f"a third is refused: {refused.requested_bytes >> 20} MiB asked")
        cache.drop(*first)
        third = take(cache, 4)
        print(f"the first has ended: the third gets blocks {third}", end="; ")
        print(f"they begin as zeros: {not any(block_of(cache, block).any() for block in third)}", end="; ")
        print(f"the second's are unchanged: {all((block_of(cache, block) == block).all() for block in second)}")


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
