"""The calls for managed memory, in the form that the installed cuda-bindings and NVIDIA's driver support.

Owns the difference between CUDA 12 and 13. It must never check requests: the caller has checked ranges and devices, and
turns the errors from here into the library's errors.
"""

from __future__ import annotations

from typing import Any

from .driver import CudaDriver
from .gpu import load_bindings

HOST = -1
"""`CU_DEVICE_CPU`: the host, in calls that take a device's ordinal."""

_LOCATIONS_SINCE = 12020
"""The first CUDA version whose driver takes a location (`cuMemAdvise_v2`): 12.2, as `cuDriverGetVersion` returns it."""


class CudaManaged:
    """The calls of one GPU's driver, which needs a context. Every failure is a `DriverError`.

    Addresses and sizes are in bytes; a device is its ordinal in this process, or `HOST`.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._cuda = load_bindings()
        # The bindings of CUDA 13 have one form, under the plain names. The bindings of CUDA 12 call that form `_v2`.
        two_forms = hasattr(self._cuda, "cuMemAdvise_v2")
        self._by_location = not two_forms or int(self._call("cuDriverGetVersion")) >= _LOCATIONS_SINCE
        self._suffix = "_v2" if two_forms and self._by_location else ""

    @property
    def ordinal(self) -> int:
        """The ordinal of the driver's own device."""
        return self._driver.device.ordinal

    def devices(self) -> int:
        """Return how many devices this process sees."""
        return int(self._call("cuDeviceGetCount"))

    def has_managed_memory(self) -> bool:
        """Return whether the driver's own device supports managed memory."""
        return self._attribute("MANAGED_MEMORY", self.ordinal)

    def has_concurrent_access(self, ordinal: int) -> bool:
        """Return whether pages can migrate while this device works. Without that, advice has no use."""
        return self._attribute("CONCURRENT_MANAGED_ACCESS", ordinal)

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes for every stream of every device. The memory is not cleared."""
        attached = int(self._cuda.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
        return int(self._call("cuMemAllocManaged", size, attached))

    def free(self, address: int) -> None:
        """Wait for this driver's work, then free what `allocate` returned."""
        self._driver.synchronize()
        self._call("cuMemFree", address)

    def advise(self, address: int, size: int, advice: int, device: int) -> None:
        """Give `advice`, a number of `CUmem_advise`; `device` is ignored for advice without a location."""
        self._call(f"cuMemAdvise{self._suffix}", address, size, self._cuda.CUmem_advise(advice), self._place(device))

    def prefetch(self, address: int, size: int, device: int, stream: int) -> None:
        """Queue a migration of pages to `device` on `stream`, a CUstream handle of this context."""
        flags = (0,) if self._by_location else ()
        self._call(f"cuMemPrefetchAsync{self._suffix}", address, size, self._place(device), *flags, stream)

    def _place(self, device: int) -> Any:
        if not self._by_location:
            return device
        kinds, location = self._cuda.CUmemLocationType, self._cuda.CUmemLocation()
        on_host = device == HOST
        location.type = kinds.CU_MEM_LOCATION_TYPE_HOST if on_host else kinds.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = 0 if on_host else device
        return location

    def _attribute(self, name: str, ordinal: int) -> bool:
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return bool(self._call("cuDeviceGetAttribute", attribute, ordinal))

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._driver.in_context(name, *arguments)
