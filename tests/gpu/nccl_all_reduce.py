"""NCCL over borrowed memory: one rank for each GPU, with that GPU's broker, or both GPUs in one process.

torchrun --nproc-per-node 2 tests/gpu/nccl_all_reduce.py ENDPOINT ENDPOINT     rank N borrows at the Nth endpoint
python examples/nccl_all_reduce.py --one-process ENDPOINT ENDPOINT            one process at both endpoints
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import membroker

try:
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl
except ImportError as error:
    raise SystemExit(f"this program needs PyTorch: {error}") from None

SIZE = 256 << 20
PAGE = 64 << 20


class Bytes:
    """A range of a pool as a CUDA array: several extents, side by side."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class Memory:
    """256 MiB of one extent, and 256 MiB of four, as tensors of float32."""

    def __init__(self, endpoint: str) -> None:
        self.client = membroker.connect(endpoint)
        model = self.client.model("nccl", virtual_capacity="8GiB")
        self.card = torch.device("cuda", model.driver.device.ordinal)
        torch.cuda.set_device(self.card)
        self.buffer = model.allocate(SIZE)
        self.pool = model.pool(page_size=PAGE)
        self.one = torch.as_tensor(self.buffer, device=self.card).view(torch.float32)
        self.many = torch.as_tensor(Bytes(self.pool.allocate(0, SIZE), SIZE), device=self.card).view(torch.float32)

    def close(self) -> None:
        """Release everything; no tensor of it may be in use."""
        torch.cuda.synchronize(self.card)
        del self.one, self.many
        self.client.close()


def step(name: str, work: Callable[[], None]) -> None:
    """Do one thing, and print a line before and after."""
    print(f"doing {name}", flush=True)
    work()
    print(f"done {name}", flush=True)


def expect(numbers: Any, value: float) -> None:
    """Fail unless every element is `value`."""
    torch.cuda.synchronize(numbers.device)
    low, high = numbers.min().item(), numbers.max().item()
    if (low, high) != (value, value):
        raise SystemExit(f"a wrong sum: from {low} to {high}, not {value}")


def as_a_rank(endpoints: list[str]) -> None:
    """Run as one of several processes, each with a GPU and a broker of its own."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    memory = Memory(endpoints[rank])
    total = ranks * (ranks + 1) / 2

    def start() -> None:
        dist.init_process_group("nccl", timeout=timedelta(seconds=30), device_id=memory.card)

    def all_reduce(numbers: Any) -> None:
        numbers.fill_(rank + 1)
        dist.all_reduce(numbers)
        expect(numbers, total)

    def broadcast(numbers: Any) -> None:
        numbers.fill_(rank + 1)
        dist.broadcast(numbers, 0)
        expect(numbers, 1)

    def around(there: Any, back: Any) -> None:
        there.fill_(rank)
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        pair = [dist.P2POp(dist.isend, there, after), dist.P2POp(dist.irecv, back, before)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        expect(back, before)

    def captured(numbers: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(numbers)
        numbers.fill_(rank + 1)
        graph.replay()
        expect(numbers, total)
        del graph

    step("start", start)
    step("all-reduce of 4 KiB", lambda: all_reduce(memory.one[:1024]))
    step("all-reduce of one extent", lambda: all_reduce(memory.one))
    step("all-reduce of four extents", lambda: all_reduce(memory.many))
    step("broadcast", lambda: broadcast(memory.many))
    if ranks > 1:
        step("send and receive", lambda: around(memory.one, memory.many))
    step("all-reduce in a graph", lambda: captured(memory.many))
    dist.destroy_process_group()
    memory.close()


def in_one_process(endpoints: list[str]) -> None:
    """Run as one process with all GPUs and all brokers."""
    memories = [Memory(endpoint) for endpoint in endpoints]
    total = len(memories) * (len(memories) + 1) / 2

    def all_reduce(tensors: list[Any]) -> None:
        for number, numbers in enumerate(tensors):
            numbers.fill_(number + 1)
            torch.cuda.synchronize(numbers.device)
        nccl.all_reduce(tensors)
        for numbers in tensors:
            expect(numbers, total)

    def copy(source: Any, target: Any) -> None:
        source.fill_(5)
        target.fill_(0)
        torch.cuda.synchronize(target.device)
        # Through the host: borrowed memory is mapped for its own GPU only, and a copy from GPU to GPU fails
        # with cudaErrorInvalidValue (seen on two H200s, driver 580.159). NCCL needs no such mapping.
        target.copy_(source.cpu())
        torch.cuda.synchronize(source.device)
        expect(target, 5)

    step("all-reduce of 4 KiB", lambda: all_reduce([memory.one[:1024] for memory in memories]))
    step("all-reduce of one extent", lambda: all_reduce([memory.one for memory in memories]))
    step("all-reduce of four extents", lambda: all_reduce([memory.many for memory in memories]))
    if len(memories) > 1:
        step("copy from GPU to GPU through the host", lambda: copy(memories[0].one, memories[1].many))
    with ExitStack() as closing:
        for memory in memories:
            closing.callback(memory.close)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoints", nargs="+", metavar="ENDPOINT", help="a tenant's endpoint at each GPU's broker")
    parser.add_argument("--one-process", action="store_true", help="use all GPUs in this process")
    options = parser.parse_args()
    try:
        (in_one_process if options.one_process else as_a_rank)(options.endpoints)
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        sys.exit(str(error))
    print("all done", flush=True)


if __name__ == "__main__":
    main()
