"""The driver without a broker: the calls of an engine that has a GPU to itself, one after the other.

`CudaBare` is cuda-bindings and nothing between, `HostBare` the same over a `Driver`, for machines without a GPU.
Memory is of the broker's kind, exportable, so that the work is the same. It must never use the library above the
driver.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from membroker.vmm import AccessFlags, DriverError, Handle, Location, open_driver
from membroker.vmm.sizes import GIB

TWIN_BYTES = 256 * GIB
"""The capacity of the host driver: a figure only, since nothing is written."""


class CudaBare:
    """A GPU by cuda-bindings. The library's driver beside it keeps the primary context, which both use.

    Handles are the bindings' own; all handles of a call are released together.
    """

    def __init__(self) -> None:
        self.driver = open_driver("cuda", 0, context=True)
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
        """Reserve addresses."""
        result, address = self._cuda.cuMemAddressReserve(size, 0, 0, 0)
        if int(result):
            _check("cuMemAddressReserve", result)
        return int(address)

    def unreserve(self, address: int, size: int) -> None:
        """Give addresses back."""
        (result,) = self._cuda.cuMemAddressFree(address, size)
        if int(result):
            _check("cuMemAddressFree", result)

    def back(self, address: int, size: int) -> list[Any]:
        """Create one extent, map it, and open it for access."""
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
        """Create and map so many extents side by side; open each for access as it comes, or all of them at the end."""
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

    def back_imported(self, address: int, descriptors: Sequence[tuple[int, int]], *, read_only: bool) -> list[Any]:
        """Import descriptors, each with its size, map them side by side, and open all for access."""
        cuda, extents, at = self._cuda, [], address
        for descriptor, size in descriptors:
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
        """Wait for the GPU, unmap everything in one call, and release the handles."""
        cuda = self._cuda
        _check("cuCtxSynchronize", cuda.cuCtxSynchronize()[0])
        _check("cuMemUnmap", cuda.cuMemUnmap(address, size)[0])
        for extent in handles:
            (result,) = cuda.cuMemRelease(extent)
            if int(result):
                _check("cuMemRelease", result)

    def export(self, size: int) -> int:
        """Create an extent that a descriptor alone keeps, and return that."""
        cuda = self._cuda
        result, extent = cuda.cuMemCreate(size, self._properties, 0)
        _check("cuMemCreate", result)
        result, descriptor = cuda.cuMemExportToShareableHandle(extent, self._kind, 0)
        (released,) = cuda.cuMemRelease(extent)
        _check("cuMemExportToShareableHandle", result)
        _check("cuMemRelease", released)
        return int(descriptor)

    def pin(self, size: int) -> int:
        """Allocate page-locked memory of the host."""
        result, address = self._cuda.cuMemHostAlloc(size, 1)
        _check("cuMemHostAlloc", result)
        return int(address)

    def unpin(self, address: int) -> None:
        """Free it."""
        _check("cuMemFreeHost", self._cuda.cuMemFreeHost(address)[0])

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy between mapped and pinned memory, and wait."""
        cuda = self._cuda
        _check("cuMemcpyAsync", cuda.cuMemcpyAsync(target, source, size, self._stream)[0])
        _check("cuStreamSynchronize", cuda.cuStreamSynchronize(self._stream)[0])

    def close(self) -> None:
        """Release the GPU."""
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


class HostBare:
    """The same by the library's host driver."""

    def __init__(self) -> None:
        self.driver = open_driver("host", total_bytes=TWIN_BYTES)

    def reserve(self, size: int) -> int:
        return self.driver.reserve(size)

    def unreserve(self, address: int, size: int) -> None:
        self.driver.unreserve(address, size)

    def back(self, address: int, size: int) -> list[Handle]:
        return self.back_pages(address, size, 1, access_each=False)

    def back_pages(self, address: int, page: int, count: int, *, access_each: bool) -> list[Handle]:
        handles = []
        for at in range(address, address + page * count, page):
            handles.append(self.driver.create(page))
            self.driver.map(at, handles[-1])
            if access_each:
                self._open(at, page)
        if not access_each:
            self._open(address, page * count)
        return handles

    def back_imported(self, address: int, descriptors: Sequence[tuple[int, int]], *, read_only: bool) -> list[Handle]:
        handles, at = [], address
        for descriptor, size in descriptors:
            handles.append(self.driver.import_extent(descriptor, size))
            self.driver.map(at, handles[-1])
            at += size
        self.driver.set_access(address, at - address, AccessFlags.READ if read_only else AccessFlags.READ_WRITE)
        return handles

    def unback(self, address: int, size: int, handles: Sequence[Handle]) -> None:
        self.driver.synchronize()
        self.driver.unmap(address, size)
        for handle in handles:
            self.driver.release(handle)

    def export(self, size: int) -> int:
        return self.driver.lend(size, 1)[0]

    def pin(self, size: int) -> int:
        return self.driver.pin(size)

    def unpin(self, address: int) -> None:
        self.driver.unpin(address)

    def copy(self, target: int, source: int, size: int) -> None:
        copier = self.driver.copier()
        copier.copy(target, source, size)
        copier.close()

    def close(self) -> None:
        self.driver.close()

    def _open(self, address: int, size: int) -> None:
        self.driver.set_access(address, size, AccessFlags.READ_WRITE)


Bare = CudaBare | HostBare


def open_bare(kind: str) -> Bare:
    """Return the driver of `kind`, cuda or host. Raises `DriverUnavailable` if there is no GPU."""
    return CudaBare() if kind == "cuda" else HostBare()


def free_bytes(bare: Bare) -> int:
    """Return the free bytes that the GPU reports."""
    memory = bare.driver.memory(Location.DEVICE)
    return memory.free if memory else 0


def close_all(descriptors: Sequence[tuple[int, int]]) -> None:
    """Close descriptors, each with its size."""
    for descriptor, _ in descriptors:
        os.close(descriptor)
