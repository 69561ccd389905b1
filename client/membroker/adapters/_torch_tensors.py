"""Tensors of PyTorch over borrowed memory: the step from bytes to `torch.Tensor`, and the dtypes of both sides.

Owns the table of dtypes. It must never copy: a tensor stands where the memory is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from membroker.adapters._torch import torch
from membroker.adapters.dlpack import Source, export, size_of
from membroker.errors import InvalidRequest
from membroker.tensor_index import word_of
from membroker.vmm.driver import DeviceInfo

# safetensors' words. A float4 of torch is two elements in a byte.
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


def tensor(source: Source, dtype: Any, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Return `shape` elements of `dtype` from byte `offset` of what was borrowed, whatever it is; nothing is copied.

    A CUDA tensor on a card, a CPU tensor on the host driver. `dtype` is torch's or NumPy's, a name of either, or its
    word in safetensors (`"BF16"`; `"F4"` is torch's, of which an element is a pair). The memory stays as long as the
    tensor lives, or a view of it: closing the owner waits for the last of them and for the work on the device, and
    what can give back a part of it (a pool, a growable buffer, a sparse array) refuses to (`BufferError`). torch has no
    read-only tensors: writing to one over a segment that is sealed or attached ends the process on the host, and its
    CUDA context on a card.

    Raises `InvalidRequest` for a range outside of the source, an offset that is no multiple of the element, what is
    no shape, or no dtype of torch, `NotMapped` where a page or a tile has no memory, and `ClosedError`.
    """
    dtype = _torch_dtype(dtype)
    size = size_of("U8", shape) * dtype.itemsize
    # DLPack has not all of torch's dtypes, in no version: torch itself makes them of bytes.
    memory = export(source, "U8", (size,), offset, ignore_read_only=True)
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
    """Return torch's device for the device of a driver: `model.driver.device`, for one."""
    return torch.device("cpu") if info.driver == "host" else torch.device("cuda", info.ordinal)
