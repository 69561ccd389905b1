"""Numba: device arrays over borrowed memory, and Numba's own arrays made of it (an external memory manager, version 1).

Owns no memory: its blocks belong to a `BlockLending`. It must be selected before Numba's first use of a GPU, because
Numba ignores it afterwards.

https://nvidia.github.io/numba-cuda/user/external-memory.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

from .. import Model
from ..dlpack import Exportable, export, is_numpys
from ..errors import InvalidRequest
from ..vmm.driver import Location
from ..vmm.sizes import Size
from ._packages import check_card, framework
from .blocks import CHUNK_BYTES, BlockLending


def _numba_cuda() -> Any:
    return framework("numba.cuda", "Numba with CUDA", "pip install 'numba-cuda[cu13]', or [cu12] for CUDA 12")


def array(source: Exportable, shape: Sequence[int], dtype: Any, offset: int = 0) -> Any:
    """Return a Numba device array over bytes of a buffer, a pool or a segment; nothing is copied.

    The array holds the range, as with `dlpack.export`. Numba has no read-only arrays: a kernel that writes to a sealed
    segment destroys the process's CUDA context. Raises what `dlpack.export` raises, and `InvalidRequest` for a dtype
    that the CUDA array interface does not have, or if the broker's device is not a GPU.
    """
    cuda = _numba_cuda()
    tensor = export(source, shape, dtype, offset)
    check_card("Numba", on_card=tensor.on_card)
    if not is_numpys(tensor.dtype):
        raise InvalidRequest(f"Numba's device arrays have no {tensor.dtype}: take U8 or U16")
    return cuda.as_cuda_array(tensor)


def use(model: Model, chunk_bytes: Size = CHUNK_BYTES) -> None:
    """Make Numba allocate from `model` in this process, from its first use of the GPU on. It cannot be undone.

    A refusal by the broker raises `OutOfMemory` with the numbers. Raises `InvalidRequest` if the broker's device is not
    a GPU.
    """
    _numba_cuda().set_memory_manager(memory_manager(model, chunk_bytes))


def memory_manager(model: Model, chunk_bytes: Size = CHUNK_BYTES) -> Any:
    """Return the class that `numba.cuda.set_memory_manager` takes."""
    numba_cuda = _numba_cuda()
    check_card("Numba", on_card=model.driver.device.driver == "cuda")
    lending = BlockLending(model, chunk_bytes)
    base: Any = numba_cuda.HostOnlyCUDAMemoryManager

    class MembrokerMemoryManager(base):  # type: ignore[misc]
        """Borrows Numba's device memory. Numba still allocates pinned and managed memory itself."""

        def initialize(self) -> None:
            """Do nothing: everything is ready before the context exists."""

        def memalloc(self, size: int) -> Any:
            """Return a pointer whose finalizer frees it."""
            address = lending.allocate(size)
            finalizer = partial(lending.free, address)
            return numba_cuda.MemoryPointer(self.context, _device_pointer(address), size, finalizer=finalizer)

        def get_memory_info(self) -> Any:
            """Return what the GPU itself reports; the model's limit may be lower."""
            info = model.driver.memory(Location.DEVICE)
            assert info is not None
            return numba_cuda.MemoryInfo(free=info.free, total=info.total)

        def get_ipc_handle(self, memory: Any) -> Any:
            """Refuse: CUDA cannot export imported memory."""
            raise NotImplementedError("borrowed memory cannot be exported by CUDA IPC: share a segment instead")

        @property
        def interface_version(self) -> int:
            """The version of Numba's interface that this class implements."""
            return 1

    return MembrokerMemoryManager


def _device_pointer(address: int) -> Any:
    """Return an address in the form that this version of Numba takes: NVIDIA's bindings, or a ctypes integer."""
    driver = framework("numba.cuda.cudadrv.driver", "Numba with CUDA", "pip install 'numba-cuda[cu13]'")
    if getattr(driver, "USE_NV_BINDING", True):
        return framework("cuda.bindings.driver", "cuda-bindings", "pip install cuda-bindings").CUdeviceptr(address)
    return ctypes.c_uint64(address)
