"""Virtual memory management: physical memory and addresses as separate things, on a GPU and on the host driver.

Owns the public names of the package and the choice of a driver. It must never import CUDA before a CUDA driver is
opened: a process that uses the host driver, or only parses sizes, needs neither the bindings nor NVIDIA's driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .driver import (
    AccessFlags,
    DeviceInfo,
    Driver,
    DriverError,
    DriverLimit,
    DriverOutOfMemory,
    DriverUnavailable,
    Handle,
    Location,
    MemoryInfo,
)
from .manager import MappingRecord, PhysicalAllocation, VirtualAddressRange, VirtualMemoryManager
from .ranges import AddressRange, MappedRange, PhysicalMemory, allocation_granularity
from .sizes import format_exact, format_size, parse_size

__all__ = [
    "AccessFlags",
    "AddressRange",
    "DeviceInfo",
    "Driver",
    "DriverError",
    "DriverLimit",
    "DriverOutOfMemory",
    "DriverUnavailable",
    "Handle",
    "Location",
    "MappedRange",
    "MappingRecord",
    "MemoryInfo",
    "PhysicalAllocation",
    "PhysicalMemory",
    "VirtualAddressRange",
    "VirtualMemoryManager",
    "allocation_granularity",
    "format_exact",
    "format_size",
    "open_driver",
    "parse_size",
]


def open_driver(
    kind: str,
    device: int | str = 0,
    *,
    context: bool = False,
    survivors: Mapping[str, int] | None = None,
    **host_options: Any,
) -> Driver:
    """Return a driver of `kind`: `"host"`, or `"cuda"` for a GPU.

    `device` is a GPU's ordinal or its UUID. `context` says whether this process computes (a worker) or only creates and
    exports (the broker). The host driver ignores both; its option is `ordinal`. `survivors` are the descriptors that
    the driver of a dead process returned from `survivors()`; the new driver takes them over. `host_options` are those
    of `HostDriver`. Raises `ValueError` for another kind, and `DriverUnavailable` if there is no such GPU.
    """
    if kind == "host":
        from .host.driver import HostDriver

        return HostDriver(survivors=survivors, **host_options)
    if kind != "cuda":
        raise ValueError(f'a driver is "host" or "cuda", not {kind!r}')
    if survivors:
        raise TypeError(f"the CUDA driver takes no survivors, but got {', '.join(sorted(survivors))}")
    if host_options:
        raise TypeError(f"the CUDA driver does not take options of the host driver: {', '.join(sorted(host_options))}")
    from .cuda.driver import CudaDriver

    return CudaDriver(device, context=context)
