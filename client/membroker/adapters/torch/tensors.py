"""PyTorch tensors over borrowed memory: the conversion of bytes to a `torch.Tensor`, and the dtypes of both sides.

Owns the table of dtypes. It must never copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ... import Buffer, LocalSource, Model, VirtualMemoryPool
from ...dlpack import DlpackTensor, Exportable, export, size_of
from ...dlpack import device_of as dlpack_device_of
from ...errors import ClosedError, InvalidRequest
from ...ext import PoolRange, Span, word_of
from ...vmm.driver import DeviceInfo
from .package import torch

# Names of safetensors. torch's float4 packs two elements into a byte.
_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
DTYPES = {text: getattr(torch, name) for text, name in _NAMES.items() if hasattr(torch, name)}
TEXTS = {dtype: text for text, dtype in DTYPES.items()}


def tensor(source: Exportable, shape: Sequence[int], dtype: Any, offset: int = 0) -> torch.Tensor:
    """Return `shape` elements of `dtype` from byte `offset` of a buffer, pool, segment or array; nothing is copied.

    The result is a CUDA tensor on a GPU, and a CPU tensor on the host driver. `dtype` is a dtype of torch or NumPy, the
    name of one, or its name in safetensors (`"BF16"`; an element of `"F4"` is torch's dtype for a pair of values). The
    tensor, and every view of it, keeps the memory: a closed owner releases it when the last of them is gone and the
    work on the device is over. Until then a pool, a growable buffer or a sparse array refuses to release that part
    (`BufferError`). torch has no read-only tensors: writing to one over a sealed or attached segment ends the process
    on the host, and its CUDA context on a GPU.

    Raises `InvalidRequest` for a range outside the source, an offset that is not a multiple of the element size, an
    invalid shape or an unknown dtype; `NotMapped` if a page or a tile has no memory; and `ClosedError`.
    """
    return _over(source, shape, dtype, offset)


def address_tensor(pool: VirtualMemoryPool, shape: Sequence[int], dtype: Any, offset: int = 0) -> torch.Tensor:
    """Return a tensor over addresses of a pool, from byte `offset` on, whether pages there have memory or not.

    It keeps the addresses, and not the pages: these can be allocated and freed while it lives, as the pages of a
    KV cache are. Only elements whose pages are allocated may be used. Any other access ends the process on the host,
    and its CUDA context on a GPU; so does a kernel that still runs when a page is freed. The device and `dtype`
    are as for `tensor`. The bytes of a page are zero when it has been allocated.

    A closed pool keeps its memory until the tensor is gone, so free first. Raises what `tensor` raises, except
    `NotMapped`.
    """
    return _over(_Addresses(pool), shape, dtype, offset)


def empty(
    source: Model | LocalSource | VirtualMemoryPool,
    shape: Sequence[int],
    dtype: Any = None,
    *,
    timeout: float | None = None,
) -> torch.Tensor:
    """Borrow memory for a tensor, and return it. The memory is released when the last reference to it is gone.

    Of a pool it takes whole pages, which may have old bytes, and of a `Model` or a `LocalSource` an extent of its own.
    `dtype` is as in `tensor`, by default torch's. `timeout` is that of `Model.allocate`. The end waits for the work on
    the device, as `close` does. Raises `InvalidRequest` for an invalid shape or dtype, and what `Model.allocate` or
    `VirtualMemoryPool.allocate_anywhere` raises.
    """
    dtype = torch.get_default_dtype() if dtype is None else _torch_dtype(dtype)
    size = size_of(shape, "U8") * dtype.itemsize
    lender = source.lender if isinstance(source, VirtualMemoryPool) else source
    if not size:
        return torch.empty(tuple(shape), dtype=dtype, device=device_of(lender.driver.device))
    if not isinstance(source, VirtualMemoryPool):
        with Buffer(source, size, timeout=timeout) as buffer:  # its end waits for that of the tensor
            return _over(buffer, shape, dtype, 0)
    owner = _TensorOwner(source.allocate_anywhere(size, timeout=timeout))
    memory = DlpackTensor(owner, owner.address, (size,), "U8", dlpack_device_of(lender.driver.device))
    return torch.from_dlpack(memory).view(dtype).view(tuple(shape))


class _TensorOwner:
    """An allocation of a pool that ends with the last tensor over it."""

    def __init__(self, memory: PoolRange) -> None:
        self._memory = memory
        self.address = memory.address
        self._span: Span | None = None
        self._span = memory.span(0, memory.nbytes)

    def __del__(self) -> None:
        self._span = None  # else the pool would refuse
        with suppress(ClosedError):
            self._memory.free()


class _Addresses:
    """A pool as a source of spans that keep addresses only."""

    def __init__(self, pool: VirtualMemoryPool) -> None:
        self._pool = pool

    def span(self, offset: int, size: int, /) -> Span:
        return self._pool.addresses(offset, size)


def _over(source: Exportable, shape: Sequence[int], dtype: Any, offset: int) -> torch.Tensor:
    dtype = _torch_dtype(dtype)
    size = size_of(shape, "U8") * dtype.itemsize
    # No version of DLPack has all of torch's dtypes: export bytes, and let torch reinterpret them.
    memory = export(source, (size,), "U8", offset, ignore_read_only=True)
    if offset % dtype.itemsize:
        raise InvalidRequest(f"a tensor of {dtype} begins at a multiple of {dtype.itemsize} bytes, not at {offset}")
    return torch.from_dlpack(memory).view(dtype).view(tuple(shape))


def _torch_dtype(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found = DTYPES.get(word_of(dtype))
    if found is None:
        raise InvalidRequest(f"this torch does not have the dtype {dtype!r}; it has {', '.join(DTYPES)}")
    return found


def device_of(info: DeviceInfo) -> torch.device:
    """Return torch's device for a driver's device, such as `model.driver.device`."""
    return torch.device("cpu") if info.driver == "host" else torch.device("cuda", info.ordinal)
