"""Tensors that exist, moved to a pool's addresses, so that their memory can be released while an engine sleeps.

Owns the move of tensors that exist to memory of a pool. Their addresses stay from then on: `offload` and `restore`
change only what is behind them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Final

from torch.multiprocessing.reductions import StorageWeakRef

from ... import Model, VirtualMemoryPool
from ...errors import InvalidRequest
from ...vmm.sizes import GIB, MIB, round_up
from .package import torch
from .tensors import address_tensor

_ALIGNMENT: Final = 512
_FREE_EVERY: Final = GIB
"""After so many moved bytes torch releases the memory that they had, so that the move needs little besides."""
LARGE_PAGE, SMALL_PAGE = 64 * MIB, 2 * MIB


def move_to_pool(tensors: Iterable[torch.Tensor], model: Model, *, timeout: float | None = None) -> VirtualMemoryPool:
    """Move the memory of these tensors, such as a module's parameters, to a new pool of `model`; return the pool.

    They stay the same objects, with the same shape, strides and contents. Tensors that share memory still share it
    afterwards. The pool is as large as all of them together. Nothing may use the tensors while the pool is offloaded,
    and the pool must outlive them. Move weights before you capture CUDA graphs that use them. `timeout` is that of
    `VirtualMemoryPool.allocate`.

    Raises what `VirtualMemoryPool.allocate` raises. Raises `InvalidRequest` if another object still refers to the old
    memory, because that would be a second copy; the tensors have been moved then.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.untyped_storage().nbytes():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    sizes = [round_up(group[0].untyped_storage().nbytes(), _ALIGNMENT) for group in groups.values()]
    page = LARGE_PAGE if sum(sizes) >= GIB else SMALL_PAGE
    pool = VirtualMemoryPool(model, max(page, round_up(sum(sizes), page)), page)
    try:
        pool.allocate(0, max(1, sum(sizes)), timeout=timeout)
        before, offset, moved = [], 0, 0
        for group, size in zip(groups.values(), sizes, strict=True):
            before.append(_move(group, pool, offset))
            offset, moved = offset + size, moved + size
            if moved >= _FREE_EVERY:
                moved = 0
                _free(group[0])
        if groups:
            _free(next(iter(groups.values()))[0])
        if not all(reference.expired() for reference in before):
            gc.collect()
        if left := sum(not reference.expired() for reference in before):
            raise InvalidRequest(f"{left} of {len(before)} weights are referred to twice, and would be in memory twice")
    except BaseException:
        pool.close()
        raise
    return pool


def _move(group: list[torch.Tensor], pool: VirtualMemoryPool, offset: int) -> StorageWeakRef:
    """Put the tensors of one storage at `offset` of the pool; return a reference to the storage that they had."""
    old = group[0].untyped_storage()
    place = address_tensor(pool, (old.nbytes(),), torch.uint8, offset)
    with torch.no_grad():
        place.copy_(torch.empty(0, dtype=torch.uint8, device=old.device).set_(old))
        for tensor in group:
            fresh = torch.empty(0, dtype=tensor.dtype, device=old.device)
            tensor.data = fresh.set_(place.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return StorageWeakRef(old)


def _free(moved: torch.Tensor) -> None:
    if moved.is_cuda:
        torch.cuda.empty_cache()
