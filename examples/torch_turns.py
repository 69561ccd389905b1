"""Two workers that serve in turns inside one limit for both: one grows while the other shrinks.

python examples/torch_turns.py     (MEMBROKER_ENDPOINT, or the default endpoint; a GPU or the host driver)

No memory is reserved for a worker; it goes where the work is. Here both are sessions of one process, to be short.
"""

from __future__ import annotations

import membroker

try:
    import torch

    from membroker.adapters.torch import empty
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch: {error}") from None

BATCH = (8, 1024, 1024)
"""The cache of one batch: 16 MiB in bfloat16."""
LIMIT = "32MiB"


class Worker:
    """A worker with a cache in a pool: the addresses stay, and the memory behind them comes and goes."""

    def __init__(self, client: membroker.Client, number: int) -> None:
        self.number = number
        self.pool = client.model("turns", limit=LIMIT).pool(LIMIT, page_size="4MiB")
        self.batches: list[torch.Tensor] = []

    def serve(self) -> None:
        """Take memory for one more batch, or say why it is refused."""
        try:
            self.batches.append(empty(self.pool, BATCH, torch.bfloat16).fill_(self.number))
        except membroker.OutOfMemory as error:
            print(f"worker {self.number} is refused: {error}")
        else:
            print(f"worker {self.number} serves with {self.pool.physical_usage_bytes >> 20} MiB")


def main() -> None:
    """Let the first worker take everything, and then hand it over batch by batch."""
    with membroker.connect(client="worker-1") as one, membroker.connect(client="worker-2") as two:
        first, second = Worker(one, 1), Worker(two, 2)
        for worker in (first, first, second):
            worker.serve()
        while first.batches:
            first.batches.pop()  # the last reference: its memory is free
            second.serve()


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
