"""Borrow GPU memory from a broker.

    import membroker

    with membroker.connect() as client:
        model = client.model("llama-7b", virtual_capacity="64GiB", limit="8GiB")
        with model.pool(page_size="2MiB") as pool:
            memory = pool.allocate(0, "1GiB")       # an int, its address; memory.tensor(shape, dtype), memory.free()

A size is an int or text, and a call that does not fit raises an error that has the numbers. `help(membroker.Client)`,
`help(membroker.Model)` and `help(membroker.VirtualMemoryPool)` say what each call does. Beside the names listed here
there are `membroker.adapters` (torch, JAX, CuPy, Numba, RMM), `aio` (coroutines), `checkpoint` (weights that
processes share), `errors`, `types`, `testing` and `vmm`.
"""

# This module owns the list of public names, and the module from which each is imported at its first use (PEP 562). It
# must never import grpc, protobuf, torch or cuda, so that a program that only imports membroker does not load them.

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cancellation import CancelScope
    from .client import Client, connect
    from .errors import *
    from .memory.buffer import Buffer
    from .memory.growable import GrowableBuffer
    from .memory.local_source import LocalSource
    from .memory.sparse import SparseArray
    from .model import Model, Recall
    from .pool.pool import VirtualMemoryPool
    from .recording import record
    from .segment import Segment
    from .session.recalls import DEFERRED
    from .shared_pool import SharedMemoryPool
    from .types import Disconnected, Draining, Forgotten, Resumed, Stopping, Undrained

__version__ = "0.1.0"

__all__ = [
    "DEFERRED",
    "AccessDenied",
    "AlreadyMapped",
    "BrokerUnavailable",
    "Buffer",
    "CancelScope",
    "Client",
    "ClosedError",
    "CompactionFailed",
    "DescriptorLimit",
    "DeviceFailure",
    "Disconnected",
    "Draining",
    "Forgotten",
    "GrowableBuffer",
    "InvalidOffset",
    "InvalidPageSize",
    "InvalidRequest",
    "LocalSource",
    "MembrokerError",
    "Model",
    "ModelAlreadyExists",
    "ModelConflict",
    "ModelInUse",
    "ModelNotFound",
    "NotFound",
    "NotMapped",
    "Offloaded",
    "OutOfMemory",
    "OutOfVirtualMemory",
    "ProtocolError",
    "Recall",
    "Resumed",
    "Segment",
    "SegmentExists",
    "SegmentNotFound",
    "SegmentNotSealed",
    "SegmentNotWritable",
    "SessionLost",
    "SharedMemoryPool",
    "SparseArray",
    "StillMapped",
    "Stopping",
    "TooMany",
    "Undrained",
    "VirtualMemoryPool",
    "WriterDied",
    "__version__",
    "connect",
    "record",
]

_ELSEWHERE = {
    "DEFERRED": "session.recalls",
    "Buffer": "memory.buffer",
    "CancelScope": "cancellation",
    "Client": "client",
    "Disconnected": "types",
    "Draining": "types",
    "Forgotten": "types",
    "GrowableBuffer": "memory.growable",
    "LocalSource": "memory.local_source",
    "Model": "model",
    "Recall": "model",
    "Resumed": "types",
    "Segment": "segment",
    "SharedMemoryPool": "shared_pool",
    "SparseArray": "memory.sparse",
    "Stopping": "types",
    "Undrained": "types",
    "VirtualMemoryPool": "pool",
    "connect": "client",
    "record": "recording",
}
"""The module of each public name that is not an error."""

if not TYPE_CHECKING:  # a type checker would take every name from it

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'membroker' has no attribute {name!r}")
        value = getattr(import_module(f"membroker.{_ELSEWHERE.get(name, 'errors')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
