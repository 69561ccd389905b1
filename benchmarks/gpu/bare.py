"""The driver without a broker: the calls of an engine that has a GPU to itself, one after the other.

`CudaBare` is cuda-bindings and nothing between for all that is timed, `Bare` the same over a `Driver`, for machines
without a GPU. Memory is of the broker's kind, exportable, so that the work is the same. It must never use the library
above the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from membroker.vmm import AccessFlags, Driver, DriverError, Location, open_driver

from ..harness.daemon import TWIN_BYTES


class Bare:
    """A driver. All handles of a call are released together."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    @property
    def free_bytes(self) -> int:
        """The free bytes that the GPU reports."""
        memory = self.driver.memory(Location.DEVICE)
        return memory.free if memory else 0

    def reserve(self, size: int) -> int:
        """Reserve addresses."""
        return self.driver.reserve(size)

    def unreserve(self, address: int, size: int) -> None:
        """Give addresses back."""
        self.driver.unreserve(address, size)

    def back(self, address: int, size: int) -> Sequence[Any]:
        """Create one extent, map it, and open it for access."""
        return self.back_pages(address, size, 1, access_each=False)

    def back_pages(self, address: int, page: int, count: int, *, access_each: bool) -> Sequence[Any]:
        """Create and map so many extents side by side; open each for access as it comes, or all of them at the end."""
        handles = []
        for at in range(address, address + page * count, page):
            handles.append(self.driver.create(page))
            self.driver.map(at, handles[-1])
            if access_each:
                self.driver.set_access(at, page, AccessFlags.READ_WRITE)
        if not access_each:
            self.driver.set_access(address, page * count, AccessFlags.READ_WRITE)
        return handles

    def back_imported(self, address: int, descriptors: Sequence[int], size: int, *, read_only: bool) -> Sequence[Any]:
        """Import descriptors of extents of a size, map them side by side, and open all for access."""
        handles = [self.driver.import_extent(descriptor, size) for descriptor in descriptors]
        for number, handle in enumerate(handles):
            self.driver.map(address + number * size, handle)
        access = AccessFlags.READ if read_only else AccessFlags.READ_WRITE
        self.driver.set_access(address, size * len(handles), access)
        return handles

    def unback(self, address: int, size: int, handles: Sequence[Any]) -> None:
        """Wait for the GPU, unmap everything in one call, and release the handles."""
        self.driver.synchronize()
        self.driver.unmap(address, size)
        for handle in handles:
            self.driver.release(handle)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy between mapped and pinned memory, and wait."""
        copier = self.driver.copier()
        copier.copy(target, source, size)
        copier.close()

    def close(self) -> None:
        """Release the GPU."""
        self.driver.close()


class CudaBare(Bare):
    """A GPU by cuda-bindings. The library's driver beside it keeps the primary context, which both use.

    Handles are the bindings' own.
    """

    def __init__(self) -> None:
        super().__init__(open_driver("cuda", 0, context=True))
        self.driver.synchronize()  # the context is this thread's from now on
        import cuda.bindings.driver as cuda

        self._cuda: Any = cuda
        self._kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        place = cuda.CUmemLocation()
        place.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = self.driver.device.ordinal
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = place
        self._properties.requestedHandleTypes = self._kind
        rdma = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        result, able = cuda.cuDeviceGetAttribute(rdma, self.driver.device.ordinal)
        _check("cuDeviceGetAttribute", result)
        self._properties.allocFlags.gpuDirectRDMACapable = int(bool(able))
        self._grants = [_grant(cuda, place, cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)]
        result, self._stream = cuda.cuStreamCreate(1)
        _check("cuStreamCreate", result)
        self._grants_to_read = [_grant(cuda, place, cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ)]

    def reserve(self, size: int) -> int:
        result, address = self._cuda.cuMemAddressReserve(size, 0, 0, 0)
        if int(result):
            _check("cuMemAddressReserve", result)
        return int(address)

    def unreserve(self, address: int, size: int) -> None:
        (result,) = self._cuda.cuMemAddressFree(address, size)
        if int(result):
            _check("cuMemAddressFree", result)

    def back(self, address: int, size: int) -> list[Any]:
        cuda = self._cuda
        result, extent = cuda.cuMemCreate(size, self._properties, 0)
        if int(result):
            _check("cuMemCreate", result)
        (result,) = cuda.cuMemMap(address, size, 0, extent, 0)
        if int(result):
            _check("cuMemMap", result)
        (result,) = cuda.cuMemSetAccess(address, size, self._grants, 1)
        if int(result):
            _check("cuMemSetAccess", result)
        return [extent]

    def back_pages(self, address: int, page: int, count: int, *, access_each: bool) -> list[Any]:
        cuda, extents = self._cuda, []
        for at in range(address, address + page * count, page):
            result, extent = cuda.cuMemCreate(page, self._properties, 0)
            if int(result):
                _check("cuMemCreate", result)
            extents.append(extent)
            (result,) = cuda.cuMemMap(at, page, 0, extent, 0)
            if int(result):
                _check("cuMemMap", result)
            if access_each:
                (result,) = cuda.cuMemSetAccess(at, page, self._grants, 1)
                if int(result):
                    _check("cuMemSetAccess", result)
        if not access_each:
            _check("cuMemSetAccess", cuda.cuMemSetAccess(address, page * count, self._grants, 1)[0])
        return extents

    def back_imported(self, address: int, descriptors: Sequence[int], size: int, *, read_only: bool) -> list[Any]:
        cuda, extents, at = self._cuda, [], address
        for descriptor in descriptors:
            result, extent = cuda.cuMemImportFromShareableHandle(descriptor, self._kind)
            if int(result):
                _check("cuMemImportFromShareableHandle", result)
            extents.append(extent)
            (result,) = cuda.cuMemMap(at, size, 0, extent, 0)
            if int(result):
                _check("cuMemMap", result)
            at += size
        grants = self._grants_to_read if read_only else self._grants
        _check("cuMemSetAccess", cuda.cuMemSetAccess(address, at - address, grants, 1)[0])
        return extents

    def unback(self, address: int, size: int, handles: Sequence[Any]) -> None:
        cuda = self._cuda
        _check("cuCtxSynchronize", cuda.cuCtxSynchronize()[0])
        _check("cuMemUnmap", cuda.cuMemUnmap(address, size)[0])
        for extent in handles:
            (result,) = cuda.cuMemRelease(extent)
            if int(result):
                _check("cuMemRelease", result)

    def copy(self, target: int, source: int, size: int) -> None:
        cuda = self._cuda
        _check("cuMemcpyAsync", cuda.cuMemcpyAsync(target, source, size, self._stream)[0])
        _check("cuStreamSynchronize", cuda.cuStreamSynchronize(self._stream)[0])

    def close(self) -> None:
        _check("cuStreamDestroy", self._cuda.cuStreamDestroy(self._stream)[0])
        self.driver.close()


def _grant(cuda: Any, place: Any, flags: Any) -> Any:
    grant = cuda.CUmemAccessDesc()
    grant.location = place
    grant.flags = flags
    return grant


def _check(call: str, result: Any) -> None:
    if int(result):
        raise DriverError(call, str(getattr(result, "name", result)), int(result))


def open_bare(kind: str) -> Bare:
    """Return the driver of `kind`, cuda or host. Raises `DriverUnavailable` if there is no GPU."""
    return CudaBare() if kind == "cuda" else Bare(open_driver("host", total_bytes=TWIN_BYTES))
