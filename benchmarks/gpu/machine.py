"""What the figures depend on: the GPU, its driver, and what both benchmarks report of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import resource

from membroker.vmm import Location, format_size

from .. import machine
from .bare import Bare


def facts(bare: Bare) -> dict[str, str]:
    """Return what a reader must know, by its name."""
    device, memory = bare.driver.device, bare.driver.memory(Location.DEVICE)
    about = {"device": device.name}
    if memory is not None:
        about["memory"] = f"{format_size(memory.total)}, of which {format_size(memory.used)} in use when it began"
    if device.driver == "cuda":
        about |= {"driver": device.driver_version, "CUDA": _cuda_version(), "cuda-bindings": _version("cuda-bindings")}
    general = machine.facts()
    return {
        "date": general.pop("date"),
        **about,
        "granularity": format_size(device.granularity),
        **general,
        "descriptors": str(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        "user": "root" if os.geteuid() == 0 else "not root",
    }


def _cuda_version() -> str:
    """Return the CUDA version that the driver speaks."""
    import cuda.bindings.driver as cuda

    try:
        result, version = cuda.cuDriverGetVersion()
    except RuntimeError:  # the bindings' own, for a libcuda that lacks the call
        return "unknown"
    return "unknown" if int(result) else f"{version // 1000}.{version % 1000 // 10}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
