"""CuPy: arrays over borrowed memory, and CuPy's own arrays made of it.

Owns no memory: an array keeps a span, and the allocator's blocks belong to a `BlockLending`. A refusal must reach CuPy
as its own `cudaErrorMemoryAllocation`: only that error makes CuPy's pool free its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import Model
from ..dlpack import DlpackTensor, Exportable, export, is_numpys
from ..errors import InvalidRequest, OutOfMemory
from ..vmm.sizes import Size
from ._packages import check_card, framework
from .blocks import CHUNK_BYTES, BlockLending

MEMORY_ALLOCATION = 2
"""cudaErrorMemoryAllocation (CUDA's driver_types.h): CuPy 14 has no name for it."""


def _cupy() -> Any:
    return framework("cupy", "CuPy", "pip install cupy-cuda13x, or cupy-cuda12x for CUDA 12")


def array(source: Exportable, shape: Sequence[int], dtype: Any, offset: int = 0) -> Any:
    """Return a `cupy.ndarray` over bytes of a buffer, a pool or a segment; nothing is copied.

    `dtype` is as for `dlpack.export`. The array, and every view of it, holds the range, as with `dlpack.export`. CuPy
    has no read-only arrays: writing to a sealed segment destroys the process's CUDA context. Raises what
    `dlpack.export` raises, and `InvalidRequest` for a dtype that CuPy does not have, or if the broker's device is not a
    GPU.
    """
    cupy = _cupy()
    tensor = export(source, shape, dtype, offset)
    check_card("CuPy", on_card=tensor.on_card)
    memory = cupy.cuda.UnownedMemory(tensor.address, tensor.size, tensor, tensor.device[1])
    return cupy.ndarray(tensor.shape, _native(tensor), cupy.cuda.MemoryPointer(memory, 0))


def _native(tensor: DlpackTensor) -> Any:
    """Return the dtype in CuPy's form: NumPy's, or ml_dtypes' bfloat16 (CuPy 14 and later)."""
    if is_numpys(tensor.dtype):
        return tensor.typestr
    if tensor.dtype != "BF16":
        raise InvalidRequest(f"CuPy has no {tensor.dtype}: take it as U8")
    return framework("ml_dtypes", "ml_dtypes for BF16", "pip install ml_dtypes").bfloat16


def memory_pool(model: Model, chunk_bytes: Size = CHUNK_BYTES) -> Any:
    """Return a `cupy.cuda.MemoryPool` whose memory is borrowed from `model`.

    `cupy.cuda.set_allocator(memory_pool(model).malloc)` uses it for the whole process. After a refusal by the broker,
    the pool releases its cache and tries again, then raises `cupy.cuda.memory.OutOfMemoryError`; `free_all_blocks()`
    releases the cache at any time. Raises `InvalidRequest` if the broker's device is not a GPU.
    """
    cupy = _cupy()
    device = model.driver.device
    check_card("CuPy", on_card=device.driver == "cuda")
    lending = BlockLending(model, chunk_bytes)

    def malloc(size: int, device_id: int) -> int:
        if device_id != device.ordinal:
            raise InvalidRequest(f"the broker lends memory of GPU {device.ordinal}, and CuPy is on GPU {device_id}")
        try:
            return lending.allocate(size)
        except OutOfMemory as error:
            raise cupy.cuda.runtime.CUDARuntimeError(MEMORY_ALLOCATION) from error

    def free(address: int, _device_id: int) -> None:
        lending.free(address)

    return cupy.cuda.MemoryPool(cupy.cuda.PythonFunctionAllocator(malloc, free).malloc)


@contextmanager
def use(model: Model, chunk_bytes: Size = CHUNK_BYTES) -> Iterator[Any]:
    """Make this thread's arrays inside the block from memory borrowed from `model`; yields the pool.

    Arrays stay valid after the block. At its end the pool releases what no array uses.
    """
    pool = memory_pool(model, chunk_bytes)
    with _cupy().cuda.using_allocator(pool.malloc):
        try:
            yield pool
        finally:
            pool.free_all_blocks()
