"""The KV tensors of an engine, made over a pool without a change of the engine's code. It needs PyTorch.

Owns the mode that catches torch's calls, and the offsets that it has given out. It maps no memory: an `ElasticCache`
does, once the engine has told where its blocks are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from ..adapters.torch import address_tensor, device_of  # without PyTorch this says what to install

# isort: split
import torch

from .. import VirtualMemoryPool
from ..errors import InvalidRequest, OutOfVirtualMemory
from ..vmm import Driver
from ..vmm.sizes import round_up
from .layout import Strided

_MAKERS = (torch.zeros, torch.empty)
_PLAIN = {"size", "dtype", "device"}
"""With other arguments a tensor may be more than plain memory, and is torch's own."""
MAX_PARTS = 1 << 16
"""The most parts that `strided` makes of one tensor."""


class Capture(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Within this block, `torch.zeros` and `torch.empty` make KV tensors over addresses of `pool`, without memory.

        with Capture(pool) as capture:
            engine.allocate_kv_cache()

    A KV tensor is a tensor on the pool's device with at least one page of bytes, of which the engine says no more than
    the size, the dtype and the device. If `wanted` is given, `wanted(shape, dtype)` must also be true. Each KV tensor
    begins at a page boundary, the first at the pool's beginning. Pages are zero when they are mapped, as `torch.zeros`
    promises. Nothing may read or write a tensor before its pages are mapped: such an access ends the process on the
    host, and the CUDA context on a GPU. So an engine that fills its KV tensors right after it makes them cannot be
    captured.

    Only calls of the current thread are captured. The torch call raises `OutOfVirtualMemory` if the pool has not enough
    addresses left.
    """

    def __init__(
        self, pool: VirtualMemoryPool, *, wanted: Callable[[tuple[int, ...], torch.dtype], bool] | None = None
    ) -> None:
        super().__init__()
        self._pool = pool
        self._device = device_of(pool.lender.driver.device)
        self._wanted = wanted
        self._next = 0
        self.ranges: list[tuple[int, int]] = []
        """The offset and the size in bytes of each tensor, in the order they were made."""

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch instead of `function`."""
        kwargs = kwargs or {}
        found = self._asked_for(args, kwargs) if function in _MAKERS else None
        return function(*args, **kwargs) if found is None else self._make(*found)

    def _asked_for(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return the shape and the dtype of a KV tensor, or None for any other one."""
        size = args if args else (kwargs.get("size"),)
        shape = tuple(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)
        if not all(isinstance(length, int) and length > 0 for length in shape) or not kwargs.keys() <= _PLAIN:
            return None  # torch says what is wrong
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if not self._is_here(kwargs.get("device")) or math.prod(shape) * dtype.itemsize < self._pool.page_size:
            return None
        return (shape, dtype) if self._wanted is None or self._wanted(shape, dtype) else None

    def _is_here(self, device: object) -> bool:
        found = torch.get_default_device() if device is None else torch.device(device)
        if found.type != self._device.type:
            return False
        if found.type == "cpu":
            return True
        index = torch.cuda.current_device() if found.index is None else found.index
        return bool(index == self._device.index)

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size, left = math.prod(shape) * dtype.itemsize, self._pool.capacity - self._next
        if size > left:
            raise OutOfVirtualMemory(size, left, f"a KV tensor of {size} bytes does not fit: reserve a larger pool")
        found = address_tensor(self._pool, shape, dtype, self._next)
        self.ranges.append((self._next, size))
        self._next += round_up(size, self._pool.page_size)
        return found


def device_lent(driver: Driver, device: torch.device) -> torch.device:
    """Return the device whose memory a broker lends. Raises `InvalidRequest` if an engine computes on another one."""
    lent = device_of(driver.device)
    if lent.type != device.type or device.index not in (None, lent.index):
        raise InvalidRequest(f"this engine computes on {device}, and the broker lends memory of {lent}")
    return lent


def strided(tensor: torch.Tensor, dimension: int) -> list[Strided]:
    """Return the parts of a KV tensor for a `Layout`. `dimension` is the dimension that numbers the blocks.

    Everything within the stride of that dimension belongs to one block. Each index of a dimension outside of it is a
    separate part: in the shape (2, blocks, ...), 0 for keys and 1 for values. Raises `InvalidRequest` for an empty
    tensor, for one whose blocks are not apart in memory, and for more than 65,536 parts.
    """
    dimension = range(tensor.dim())[dimension]
    lengths, strides = list(tensor.shape), [stride * tensor.element_size() for stride in tensor.stride()]
    step = strides.pop(dimension)
    del lengths[dimension]
    sizes = [(length, stride) for length, stride in zip(lengths, strides, strict=True) if length > 1]
    inner = [(length, stride) for length, stride in sizes if 0 < stride < step]
    outer = [(length, stride) for length, stride in sizes if stride > step]
    parts = math.prod(length for length, _ in outer)
    if step <= 0 or len(inner) + len(outer) < len(sizes) or parts > MAX_PARTS or not tensor.numel():
        raise InvalidRequest(f"blocks along dimension {dimension} of {tuple(tensor.shape)} are not apart in memory")
    size = tensor.element_size() + sum((length - 1) * stride for length, stride in inner)
    return [
        Strided(tensor.data_ptr() + sum(at * stride for at, (_, stride) in zip(index, outer, strict=True)), step, size)
        for index in product(*(range(length) for length, _ in outer))
    ]
