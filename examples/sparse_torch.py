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
TOKENS, HEADS, WIDTH = 1024, 8, 128
"""How many tokens a block has. With keys and values it has 4 MiB, which is one tile."""


class PagedCache:
    """Keys and values in blocks. Kernels need only the number of a block, because the stride is constant."""

    def __init__(self, model: membroker.Model) -> None:
        self.array = model.sparse_array((BLOCKS, 2, TOKENS, HEADS, WIDTH), "BF16", tile_rows=1)

    def take(self, count: int) -> list[int]:
        """Take free blocks for a request: all of them, or an error that changes nothing."""
        taken = set(self.array.tiles())
        blocks = [block for block in range(BLOCKS) if block not in taken][:count]
        self.array.back(*blocks)
        return blocks

    def block(self, number: int) -> torch.Tensor:
        """Return a block that was taken, (2, tokens, heads, width): its own memory, no copy."""
        return torch.from_dlpack(self.array.tensor(number))[0]


def main() -> None:
    """Serve three requests within a limit that is enough for two."""
    with membroker.connect() as client:
        model = client.model("paged", limit="32MiB")
        cache = PagedCache(model)
        requests = [cache.take(4), cache.take(4)]
        for number, blocks in enumerate(requests):
            for block in blocks:
                cache.block(block).fill_(number + 1)
        print(f"two requests on {device_of(model.driver.device).type}: {cache.array.physical_usage_bytes >> 20} MiB")
        try:
            cache.take(4)
        except membroker.OutOfMemory as refused:
            print(
                f"a third is refused: {refused.requested_bytes >> 20} MiB asked, "
                f"{refused.available_bytes >> 20} MiB left"
            )
        cache.array.drop(*requests.pop(0))
        third = cache.take(4)
        print(f"the first request has ended: the third gets blocks {third}")
        print(f"they begin as zeros: {not any(cache.block(block).any() for block in third)}", end="; ")
        same = all((cache.block(block) == 2).all() for block in requests[0])
        print(f"the second request's blocks are unchanged: {same}")
        cache.array.close()


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
