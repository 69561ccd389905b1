"""What workers with a pool that sleeps do on a GPU: fill it with random bytes, sum them up.

The tests' lines import it in a worker.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

from membroker import VirtualMemoryPool
from membroker.vmm import Driver
from tests.support.gpu_work import torch_on_the_gpu

__all__ = ["fill_random", "sum_of", "tensor_over", "torch_on_the_gpu"]

BLOCK = 16 << 20


def fill_random(pool: VirtualMemoryPool, driver: Driver, size: int, seed: int) -> None:
    """Write random bytes to the first `size` bytes of a pool."""
    dice = random.Random(seed)
    for offset in range(0, size, BLOCK):
        driver.write(pool.base_address + offset, dice.randbytes(min(BLOCK, size - offset)))


def sum_of(pool: VirtualMemoryPool, driver: Driver, size: int) -> int:
    """Return a checksum of every byte of the first `size` of a pool."""
    found = 0
    for offset in range(0, size, BLOCK):
        found = zlib.crc32(driver.read(pool.base_address + offset, min(BLOCK, size - offset)), found)
    return found


class _Floats:
    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "<f4", "data": (address, False), "version": 3}


def tensor_over(address: int, count: int, ordinal: int) -> Any:
    """Return a tensor that holds nothing of a pool but its addresses, as an engine that keeps raw pointers."""
    return torch_on_the_gpu().as_tensor(_Floats(address, count), device=f"cuda:{ordinal}")
