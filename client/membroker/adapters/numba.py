"""Numba: device arrays over borrowed memory, and Numba's own made of it (an external memory manager, version 1).

Owns no memory: blocks are a `Lending`'s. It must never be chosen after Numba's first use of a card, when Numba would
take no notice of it.

https://nvidia.github.io/numba-cuda/user/external-memory.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

from membroker.adapters._lending import CHUNK_BYTES, Lending
from membroker.adapters._packages import check_card, framework
from membroker.adapters.dlpack import Source, export, is_numpys
from membroker.errors import InvalidRequest
from membroker.model import Model
from membroker.vmm.driver import Location


def _numba_cuda() -> Any:
    return framework("numba.cuda", "Numba with CUDA", "pip install 'numba-cuda[cu13]', or [cu12] for CUDA 12")


def array(source: Source, dtype: Any, shape: Sequence[int], offset: int = 0) -> Any:
    """Return a Numba device array over bytes of a buffer, a pool or a segment; nothing is copied.

    It keeps the range held, as `dlpack.export` says. Numba has no read-only arrays: a kernel that writes to a sealed
    segment ends the process's CUDA context. Raises what `dlpack.export` raises, and `InvalidRequest` for a dtype that
    the CUDA array interface has not, or where the broker's device is no card.
    """
    cuda = _numba_cuda()
    tensor = export(source, dtype, shape, offset)
    check_card("Numba", on_card=tensor.on_card)
    if not is_numpys(dtype):
        raise InvalidRequest(f"Numba's device arrays have no {dtype}: take U8 or U16")
    return cuda.as_cuda_array(tensor)


def use(model: Model, chunk_bytes: int | str = CHUNK_BYTES) -> None:
    """Let Numba allocate from `model` in this process, from its first use of the card on; it cannot be undone.

    A refusal of the broker is an `OutOfMemory` with its numbers. Raises `InvalidRequest` where the broker's device is
    no card.
    """
    _numba_cuda().set_memory_manager(memory_manager(model, chunk_bytes))


def memory_manager(model: Model, chunk_bytes: int | str = CHUNK_BYTES) -> Any:
    """Return the class that `numba.cuda.set_memory_manager` takes."""
    numba_cuda = _numba_cuda()
    check_card("Numba", on_card=model.driver.device.driver == "cuda")
    lending = Lending(model, chunk_bytes)
    base: Any = numba_cuda.HostOnlyCUDAMemoryManager

    class MembrokerMemoryManager(base):  # type: ignore[misc]
        """Numba's device memory, borrowed; pinned and managed memory stay Numba's own."""

        def initialize(self) -> None:
            """Do nothing: everything was ready before the context."""

        def memalloc(self, size: int) -> Any:
            """Return a pointer whose finalizer frees it."""
            address = lending.allocate(size)
            finalizer = partial(lending.free, address)
            return numba_cuda.MemoryPointer(self.context, _device_pointer(address), size, finalizer=finalizer)

        def get_memory_info(self) -> Any:
            """Return what the card itself shows; the model's limit may be less."""
            info = model.driver.memory(Location.DEVICE)
            assert info is not None
            return numba_cuda.MemoryInfo(free=info.free, total=info.total)

        def get_ipc_handle(self, memory: Any) -> Any:
            """Refuse: CUDA exports no memory that was imported."""
            raise NotImplementedError("borrowed memory cannot be exported by CUDA IPC: share a segment instead")

        @property
        def interface_version(self) -> int:
            """The version of Numba's interface that this obeys."""
            return 1

    return MembrokerMemoryManager


def _device_pointer(address: int) -> Any:
    """Return an address as the two generations of Numba want it: NVIDIA's bindings, or a ctypes integer."""
    driver = framework("numba.cuda.cudadrv.driver", "Numba with CUDA", "pip install 'numba-cuda[cu13]'")
    if getattr(driver, "USE_NV_BINDING", True):
        return framework("cuda.bindings.driver", "cuda-python", "pip install cuda-python").CUdeviceptr(address)
    return ctypes.c_uint64(address)
