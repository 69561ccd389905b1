"""Physical memory and addresses as separate things, on a card and on its host twin.

Owns the public names of the package and the choice of a driver. It must never import CUDA before a card is
asked for: a process that uses the twin, or only parses sizes, needs neither bindings nor a driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from membroker.vmm.driver import (
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
from membroker.vmm.manager import MappingRecord, PhysicalAllocation, VirtualAddressRange, VirtualMemoryManager
from membroker.vmm.ranges import AddressRange, MappedRange, PhysicalMemory, allocation_granularity
from membroker.vmm.sizes import format_size, parse_size

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
    """Return a driver of `kind`: `"host"`, the twin, or `"cuda"`, a card.

    `device` is a card's ordinal or its UUID, and `context` says whether this process computes (a worker) or
    only creates and exports (the broker); the twin ignores both, and has an `ordinal` of its own. `survivors` are what
    a dead process's driver of this kind returned: descriptors that become this one's. `host_options` are
    `HostDriver`'s. Raises `ValueError` for another kind, and `DriverUnavailable` where there is no such card.
    """
    if kind == "host":
        from membroker.vmm.host import HostDriver

        return HostDriver(survivors=survivors, **host_options)
    if kind != "cuda":
        raise ValueError(f'a driver is "host" or "cuda", not {kind!r}')
    if survivors:
        raise TypeError(f"a card has no survivors; given were {', '.join(sorted(survivors))}")
    if host_options:
        raise TypeError(f"options of the host twin given to a card: {', '.join(sorted(host_options))}")
    from membroker.vmm.cuda import CudaDriver

    return CudaDriver(device, context=context)
