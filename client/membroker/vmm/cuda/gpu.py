"""One GPU of this process: how it is found, and what CUDA says about it.

Owns CUDA's functions by name, with their errors, and the structures that describe the GPU's memory. It has no handles,
and makes no context.
"""

from __future__ import annotations

import uuid
from typing import Any

from ..driver import AccessFlags, DeviceInfo, DriverError, DriverOutOfMemory, DriverUnavailable, Location
from .nvml import INSTALL_HINT, NvmlDevice

NOT_SUPPORTED = ("CUDA_ERROR_NOT_SUPPORTED", 801)
_OUT_OF_MEMORY = 2


class Gpu:
    """The GPU `device`: an ordinal in this process, or its UUID. Raises `DriverUnavailable`."""

    def __init__(self, device: int | str) -> None:
        _refuse_wsl()
        self.cuda: Any = load_bindings()
        self.ordinal: Any = self._find(device)
        self._check_abilities()
        self.descriptor_kind: Any = self.cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def uuid(self) -> str:
        """Return the UUID, of a MIG slice if this is one."""
        return self._uuid_of(self.ordinal)

    def _find(self, device: int | str) -> Any:
        try:
            self.call("cuInit", 0)
        # The bindings load libcuda at their first call, and raise a RuntimeError without it.
        except RuntimeError as error:
            hint = (
                'there is no NVIDIA driver here (libcuda.so.1): install it, or take the driver "host", which lends '
                "ordinary memory"
            )
            raise DriverUnavailable("cuInit", "MISSING", 0, hint) from error
        except DriverError as error:
            raise DriverUnavailable(error.call, error.name, error.code, "CUDA does not start here") from error
        if isinstance(device, str):
            return self._find_uuid(device)
        try:
            return self.call("cuDeviceGet", device)
        except DriverError as error:
            hint = f"there is no GPU number {device}: this process sees {self.call('cuDeviceGetCount')}"
            raise DriverUnavailable(error.call, error.name, error.code, hint) from error

    def _find_uuid(self, text: str) -> Any:
        seen, wanted = self.visible_uuids(), text.lower().removeprefix("gpu-").removeprefix("mig-")
        if wanted in seen:
            return self.call("cuDeviceGet", seen.index(wanted))
        hint = f"there is no GPU {text} among those that this process sees: {', '.join(seen) or 'none'}"
        raise DriverUnavailable("cuDeviceGetUuid", "CUDA_ERROR_INVALID_DEVICE", 101, hint)

    def visible_uuids(self) -> list[str]:
        """Return the UUIDs of all GPUs that this process sees, in CUDA's order."""
        return [self._uuid_of(self.call("cuDeviceGet", number)) for number in range(self.call("cuDeviceGetCount"))]

    def _uuid_of(self, ordinal: Any) -> str:
        # In CUDA 12, only the second version returns a MIG slice instead of its GPU. CUDA 13 has only that version.
        call = "cuDeviceGetUuid_v2" if hasattr(self.cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return str(uuid.UUID(bytes=bytes(self.call(call, ordinal).bytes)))

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, self.ordinal))

    def _check_abilities(self) -> None:
        for name, lack in (
            ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "virtual memory management"),
            ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "extents as file descriptors"),
        ):
            if not self._attribute(name):
                hint = f"this GPU, or its driver, does not support {lack}, which a broker needs"
                raise DriverUnavailable("cuDeviceGetAttribute", *NOT_SUPPORTED, hint)

    def own_location(self) -> Any:
        """Return the place of the GPU's own memory."""
        location = self.cuda.CUmemLocation()
        location.type = self.cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = int(self.ordinal)
        return location

    def grant(self, access: AccessFlags) -> Any:
        """Return the form in which CUDA takes an access for this GPU."""
        grant = self.cuda.CUmemAccessDesc()
        grant.location = self.own_location()
        grant.flags = self.cuda.CUmemAccess_flags(access.value)
        return grant

    def extent_properties(self, location: Location) -> Any:
        """Return the properties of an extent that can be exported, and used for RDMA if the GPU supports it."""
        cuda = self.cuda
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self.descriptor_kind
        if location is Location.HOST:
            host = cuda.CUmemLocation()
            host.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
            # The NUMA node next to the GPU; -1 on a machine with only one.
            host.id = max(0, self._attribute("HOST_NUMA_ID"))
            properties.location = host
        else:
            properties.location = self.own_location()
            # This is decided at creation, so request it whenever the GPU supports it.
            rdma = self._attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
            properties.allocFlags.gpuDirectRDMACapable = int(bool(rdma))
        return properties

    def describe(self, nvml: NvmlDevice) -> DeviceInfo:
        """Return what a user is told about the GPU."""
        kinds = self.cuda.CUmemAllocationGranularity_flags
        granularity = self._granularity(kinds.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
        recommended = self._granularity(kinds.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return DeviceInfo(
            uuid=nvml.uuid,
            name=nvml.name,
            driver="cuda",
            granularity=granularity,
            index=int(self.ordinal) if nvml.index is None else nvml.index,
            driver_version=nvml.driver_version,
            ordinal=int(self.ordinal),
            recommended_granularity=recommended,
        )

    def _granularity(self, kind: Any) -> int:
        return int(self.call("cuMemGetAllocationGranularity", self.extent_properties(Location.DEVICE), kind))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the CUDA function `name`, and return its result, a list of several, or raise its error."""
        result, *values = getattr(self.cuda, name)(*arguments)
        if result:
            raise self.failure(name, result)
        return values if len(values) > 1 else values[0] if values else None

    def failure(self, name: str, result: Any) -> DriverError:
        """Return the error for the result of a call that failed."""
        kind = DriverOutOfMemory if int(result) == _OUT_OF_MEMORY else DriverError
        return kind(name, self._error_name(result), int(result))

    def _error_name(self, result: Any) -> str:
        status, name = self.cuda.cuGetErrorName(result)
        return f"CUDA_ERROR_{int(result)}" if int(status) or not name else str(name, "ascii")


def load_bindings() -> Any:
    """Return `cuda.bindings.driver`; raises `DriverUnavailable`, which says what to install."""
    try:
        import cuda.bindings.driver as bindings
    except ImportError as error:
        raise DriverUnavailable("import cuda.bindings", "MISSING", 0, INSTALL_HINT) from error
    return bindings


def _refuse_wsl() -> None:
    with open("/proc/version", encoding="utf-8", errors="replace") as version:
        if "microsoft" in version.read().lower():
            hint = "WSL cannot pass memory between processes as descriptors: use Linux itself, or the host driver"
            raise DriverUnavailable("/proc/version", *NOT_SUPPORTED, hint)
