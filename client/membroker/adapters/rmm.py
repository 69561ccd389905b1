"""RMM: the memory resource of RAPIDS (cuDF, cuML, RAFT), with memory that is borrowed from a model.

Owns no memory: RMM's own pool allocates from a `BlockLending`. It must never let RMM choose the pool's initial size,
which would be half of the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .. import Model
from ..ext import arguments
from ..vmm.sizes import MIB
from ._packages import check_card, framework
from .blocks import BlockLending

INITIAL_BYTES = 64 * MIB
"""What a pool borrows when it is created."""


def _rmm() -> Any:
    return framework("rmm", "RMM", "pip install rmm-cu13, or rmm-cu12 for CUDA 12")


def memory_resource(
    model: Model, initial_bytes: int | str = INITIAL_BYTES, maximum_bytes: int | str | None = None
) -> Any:
    """Return an `rmm.mr.PoolMemoryResource` whose memory is borrowed from `model`.

    The pool doubles its size until the broker refuses or `maximum_bytes` is reached. It never shrinks: RMM releases the
    memory when the pool is destroyed. A refusal raises `MemoryError`. Raises `InvalidRequest` if the broker's device is
    not a GPU, and what `Model.allocate` raises.
    """
    rmm = _rmm()
    check_card("RMM", on_card=model.driver.device.driver == "cuda")
    lending = BlockLending(model)

    def allocate(size: int, _stream: Any) -> int:
        return lending.allocate(size)

    def deallocate(address: int, _size: int, _stream: Any) -> None:
        lending.free(address)

    return rmm.mr.PoolMemoryResource(
        rmm.mr.CallbackMemoryResource(allocate, deallocate),
        initial_pool_size=arguments.bytes_of("a pool", initial_bytes),
        maximum_pool_size=None if maximum_bytes is None else arguments.bytes_of("a pool", maximum_bytes),
    )


@contextmanager
def use(
    model: Model, initial_bytes: int | str = INITIAL_BYTES, maximum_bytes: int | str | None = None
) -> Iterator[Any]:
    """Make RMM allocate from `model` inside the block, in all threads; yields the resource.

    Any live allocation keeps the pool, and with it all of the pool's memory.
    """
    rmm = _rmm()
    before = rmm.mr.get_current_device_resource()
    resource = memory_resource(model, initial_bytes, maximum_bytes)
    rmm.mr.set_current_device_resource(resource)
    try:
        yield resource
    finally:
        rmm.mr.set_current_device_resource(before)
