"""Two torch workers that serve in turns, one growing while the other shrinks, inside one limit for both.

python examples/torch_turns.py     (MEMBROKER_ENDPOINT, or the default endpoint; a GPU or the host driver)

Each has its cache in a pool: the addresses stay, and the memory behind them comes and goes. No memory is reserved for
a worker; it goes where the work is.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

import membroker

try:
    import torch

    from membroker.adapters.torch import tensor
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch: {error}") from None

PAGE = 4 << 20
LIMIT = 8 * PAGE
"""The memory that both workers may hold together."""
STEP = 4 * PAGE


def worker(number: int, orders: Connection) -> None:
    """Follow the conductor's orders (grow, shrink, serve), and answer each with its result."""
    try:
        with membroker.connect(client=f"worker-{number}") as client:
            model = client.register_model("turns", virtual_capacity=LIMIT, limit=LIMIT)
            with model.pool(page_size=PAGE) as pool:
                for order in iter(orders.recv, "end"):
                    orders.send(obey(order, number, pool))
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        sys.exit(f"worker {number}: {error}")
    except EOFError:
        sys.exit(1)  # the conductor is gone


def obey(order: str, number: int, pool: membroker.VirtualMemoryPool) -> str:
    """Carry out one order."""
    if order == "grow":
        try:
            pool.grow(STEP)
        except membroker.OutOfMemory as error:
            return f"worker {number} is refused: {error}"
    if order == "shrink":
        pool.deallocate(pool.physical_usage_bytes - STEP, STEP)
    if order == "serve":
        return f"worker {number} serves with {pool.physical_usage_bytes >> 20} MiB: {serve(number, pool)}"
    return f"worker {number} has {pool.physical_usage_bytes >> 20} MiB"


def serve(number: int, pool: membroker.VirtualMemoryPool) -> int:
    """Fill the cache and read it, as a request would."""
    rows = pool.physical_usage_bytes // (2 * 1024)
    cache: Any = tensor(pool, torch.bfloat16, (rows, 1024))
    cache.fill_(number)
    return int(cache[::64].float().mean().item())


def main() -> None:
    """Conduct two workers: the first grows, the second is refused, then the memory moves to it step by step."""
    context = multiprocessing.get_context("spawn")  # neither CUDA nor a session survives a fork
    ends, workers = [], []
    for number in (1, 2):
        mine, theirs = context.Pipe()
        workers.append(context.Process(target=worker, args=(number, theirs), daemon=True))
        workers[-1].start()
        theirs.close()
        ends.append(mine)

    def say(number: int, order: str) -> None:
        try:
            ends[number - 1].send(order)
            print(ends[number - 1].recv(), flush=True)
        except (EOFError, OSError):
            sys.exit(1)  # the worker has printed why it ended

    for number, order in ((1, "grow"), (1, "grow"), (1, "serve"), (2, "grow")):
        say(number, order)
    for _ in range(LIMIT // STEP):
        say(1, "shrink")
        say(2, "grow")
        say(2, "serve")
    for end in ends:
        end.send("end")
    for one in workers:
        one.join()
    sys.exit(max(abs(one.exitcode or 0) for one in workers))


if __name__ == "__main__":
    main()
