"""`CudaDriver`: one NVIDIA GPU, by CUDA's virtual memory management. Only the `cuda` modules here name `cuMem*`.

Owns the driver's handles in this process and the translation of its errors. It must never create a context for a
broker: that costs 518 MiB of the GPU in each process, and a sticky error in a context ends its process. Measured on an
idle GPU: `cuInit` and `cuDeviceGet` are enough to create, export and release.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from .. import imports
from ..copies import is_pinned
from ..driver import (
    AccessFlags,
    Copier,
    DeviceInfo,
    DriverError,
    DriverOutOfMemory,
    Handle,
    Location,
    MemoryInfo,
    no_addresses,
)
from ..sizes import MAX_BYTES, is_power_of_two
from . import packets
from .copies import CudaCopier, pin, unpin
from .gpu import NOT_SUPPORTED, Gpu
from .nvml import NvmlDevice
from .process import CudaProcess, close_descriptors

# One counter for all drivers of the process: a handle of one driver is unknown to every other.
_handle_values = itertools.count(1)


class CudaDriver:
    """The GPU `device`: an ordinal in this process (CUDA_VISIBLE_DEVICES applies), or its UUID from NVML.

    `context=False` is for the broker: it creates, exports and releases extents, and maps nothing for work.
    `context=True` is for a worker: the driver retains the primary context, which the worker's frameworks share, and
    makes it current on each calling thread. Raises `DriverUnavailable`, which says what is missing.
    """

    def __init__(self, device: int | str = 0, context: bool = False) -> None:
        gpu = Gpu(device)
        self._gpu, self._call = gpu, gpu.call
        self._process = CudaProcess.here
        self._closed = False
        self._handles: dict[Handle, Any] = {}
        self._pinned: dict[int, int] = {}
        """The size of each pinned block, by its address."""
        self._threads = threading.local()
        with ExitStack() as undo:
            self._nvml = NvmlDevice(gpu.uuid())
            undo.callback(self._nvml.close)
            self._properties = {location: gpu.extent_properties(location) for location in Location}
            self._grants = {access: [gpu.grant(access)] for access in AccessFlags}
            self._device = gpu.describe(self._nvml)
            self._context = self._call("cuDevicePrimaryCtxRetain", gpu.ordinal) if context else None
            undo.pop_all()

    @property
    def device(self) -> DeviceInfo:
        """The GPU; `index` is NVML's number, which does not depend on environment variables."""
        return self._device

    # Extents and descriptors

    def create(self, size: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> Handle:
        """Create an extent that can be exported as a descriptor, and used for RDMA if the GPU supports it.

        `sealable` has no effect: CUDA cannot seal extents.
        """
        self._enter("cuMemCreate")
        _check_size(size, self._device.granularity, "cuMemCreate")
        return self._book(self._call("cuMemCreate", size, self._properties[location], 0), size, location)

    def export(self, handle: Handle) -> int:
        """Return a new descriptor (CLOEXEC). CUDA refuses to export an imported extent: pass on its descriptor."""
        self._enter("cuMemExportToShareableHandle")
        extent = self._extent(handle, "cuMemExportToShareableHandle")
        return int(self._call("cuMemExportToShareableHandle", extent, self._gpu.descriptor_kind, 0))

    def lend(self, size: int, count: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> list[int]:
        """Create `count` extents and return a descriptor of each: 53 us for one of 2 MiB (H200) if another is open."""
        self._enter("cuMemCreate")
        _check_size(size, self._device.granularity, "cuMemCreate")
        return packets.lend(self._gpu, size, count, self._properties[location])

    def map_descriptors(
        self, address: int, descriptors: Sequence[int], size: int, access: AccessFlags = AccessFlags.READ_WRITE
    ) -> None:
        """Map the extents behind `descriptors` side by side from `address` on; 56 us for one of 2 MiB (H200)."""
        self._enter("cuMemMap")
        self._check_reserved(address, size * len(descriptors))
        imports.mark()
        packets.map_side_by_side(self._gpu, address, descriptors, size, self._grants[access])

    def seal(self, descriptor: int) -> None:
        """Do nothing: with CUDA, any process that imports an extent can map it writable."""
        self._enter("seal")

    def import_extent(self, descriptor: int, size: int, location: Location = Location.DEVICE) -> Handle:
        """Return a handle to the extent behind `descriptor`. CUDA finds a wrong `size` at `map`."""
        self._enter("cuMemImportFromShareableHandle")
        _check_size(size, self._device.granularity, "cuMemImportFromShareableHandle")
        imports.mark()
        extent = self._call("cuMemImportFromShareableHandle", descriptor, self._gpu.descriptor_kind)
        return self._book(extent, size, location)

    def release(self, handle: Handle) -> None:
        """Drop this reference. Dropping the last one in any process frees the memory: 5 ms for 8 GiB."""
        self._enter("cuMemRelease")
        # Remove it first, atomically: if two threads release the same handle, one is refused here.
        extent = self._handles.pop(handle, None)
        if extent is None:
            raise _unknown(handle, "cuMemRelease")
        self._call("cuMemRelease", extent)

    # Addresses and mappings

    def reserve(self, size: int, alignment: int = 0) -> int:
        """Reserve `size` bytes of addresses; even 16 TiB in one call costs nothing."""
        self._enter("cuMemAddressReserve")
        _check_size(size, self._device.granularity, "cuMemAddressReserve")
        if alignment and not (is_power_of_two(alignment) and alignment <= MAX_BYTES):
            hint = f"an alignment is a power of two below 2^63, not {alignment}"
            raise _invalid("cuMemAddressReserve", hint)
        try:
            address = int(self._call("cuMemAddressReserve", size, alignment, 0, 0))
        except DriverOutOfMemory as error:
            raise no_addresses(error, size) from error
        self._process.add(address, size)
        return address

    def unreserve(self, address: int, size: int) -> None:
        """Release a whole reservation."""
        self._enter("cuMemAddressFree")
        self._call("cuMemAddressFree", address, size)
        self._process.remove(address, size)

    def map(self, address: int, handle: Handle) -> None:
        """Map the extent at `address`; no device has access until `set_access`."""
        self._enter("cuMemMap")
        self._check_reserved(address, handle.size)
        self._call("cuMemMap", address, handle.size, 0, self._extent(handle, "cuMemMap"), 0)

    def _check_reserved(self, address: int, size: int) -> None:
        """Refuse a map past the end of a reservation, which CUDA accepts (observed on an H200, 580.159)."""
        if not self._process.have(address, size):
            hint = f"{size} bytes at {address:#x} do not lie inside one reservation"
            raise _invalid("cuMemMap", hint)

    def set_access(self, address: int, size: int, access: AccessFlags) -> None:
        """Set what this GPU may do with whole mappings: of its own memory, the host's, or a reachable GPU's."""
        self._enter("cuMemSetAccess")
        self._call("cuMemSetAccess", address, size, self._grants[access], 1)

    def get_access(self, address: int) -> AccessFlags:
        """Return what this GPU may do with the mapped byte at `address`."""
        self._enter("cuMemGetAccess")
        return AccessFlags(int(self._call("cuMemGetAccess", self._gpu.own_location(), address)))

    def unmap(self, address: int, size: int) -> None:
        """Unmap whole mappings. Does not wait for kernels: call `synchronize` first, or the GPU faults (Xid 31)."""
        self._enter("cuMemUnmap")
        self._call("cuMemUnmap", address, size)

    def move(self, address: int, new_address: int, size: int, count: int = 1) -> None:
        """Move extents one after the other, starting at the end towards which they move, so that ranges may overlap."""
        self._enter("cuMemMap")
        _check_size(size, self._device.granularity, "cuMemMap")
        if not 0 < count <= MAX_BYTES // size or abs(new_address - address) < size:
            hint = f"cannot move {count} extents of {size} bytes from {address:#x} to {new_address:#x}: too close"
            raise _invalid("cuMemMap", hint)
        self._check_reserved(new_address, size * count)
        places = range(0, size * count, size)
        with ExitStack() as undo:
            for place in places if new_address < address else reversed(places):
                self._move(address + place, new_address + place, size)
                undo.callback(self._move, new_address + place, address + place, size)
            undo.pop_all()

    def _move(self, address: int, new_address: int, size: int) -> None:
        """Map an extent at the new address before unmapping it at the old one, so it always has a mapping."""
        extent = self._call("cuMemRetainAllocationHandle", address)
        with ExitStack() as undo:
            undo.callback(self._call, "cuMemRelease", extent)
            access = self.get_access(address)
            self._call("cuMemMap", new_address, size, 0, extent, 0)
            try:
                self._call("cuMemSetAccess", new_address, size, self._grants[access], 1)
                self._call("cuMemUnmap", address, size)
            except BaseException:
                self._call("cuMemUnmap", new_address, size)
                raise

    def synchronize(self) -> None:
        """Wait for this process's work on the GPU. Without a context there is no work."""
        self._enter("cuCtxSynchronize")
        if self._context is not None:
            self.in_context("cuCtxSynchronize")

    def in_context(self, name: str, *arguments: Any) -> Any:
        """Call the CUDA function `name` in this driver's context: for the other `cuda` modules.

        Raises `DriverError` if CUDA fails, or if this driver was made without a context.
        """
        self._check_usable(name)
        if self._context is None:
            hint = "this driver has no context: open it with open_driver('cuda', context=True)"
            raise DriverError(name, "CUDA_ERROR_INVALID_CONTEXT", 201, hint)
        # Another driver of this process, or a framework, may have made another GPU's context current on this thread.
        self._call("cuCtxPushCurrent", self._context)
        try:
            return self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent")

    # Bytes

    def view(self, address: int, size: int) -> memoryview:
        """Refuse: the interpreter cannot read GPU memory. Use `read` and `write`, or a framework."""
        hint = f"{size} bytes at {address:#x} are on the GPU: copy them with read(), or use a framework"
        raise DriverError("view", *NOT_SUPPORTED, hint)

    def write(self, address: int, data: bytes | memoryview) -> None:
        """Copy `data` to mapped bytes, and wait. For tests and small headers. Needs `context=True`."""
        self._check_access(address, len(data), AccessFlags.READ_WRITE, "cuMemcpyHtoD")
        self.in_context("cuMemcpyHtoD", address, data, len(data))
        # The copy returns when it has read `data`, but up to 64 KiB may still be in transit. If the caller unmaps the
        # address then, the context is lost (observed on an H200, as CUDA_ERROR_LAUNCH_FAILED at a later call).
        self.in_context("cuStreamSynchronize", 0)

    def read(self, address: int, size: int) -> bytes:
        """Return a copy of mapped bytes. For tests and small headers. Needs `context=True`."""
        self._check_access(address, size, AccessFlags.READ, "cuMemcpyDtoH")
        data = bytearray(size)
        self.in_context("cuMemcpyDtoH", data, address, size)
        return bytes(data)

    def _check_access(self, address: int, size: int, needed: AccessFlags, call: str) -> None:
        """Raise unless every granule of the range allows this GPU the access `needed`.

        Checked before the copy, because a copy that faults on the GPU destroys the context of the whole process.
        """
        self._enter(call)
        if size <= 0:
            raise _invalid(call, f"{size} bytes are not a range")
        granule = self._device.granularity
        for at in (address, *range(address - address % granule + granule, address + size, granule)):
            if self.get_access(at).value & needed.value != needed.value:
                raise _invalid(call, f"{at:#x} does not allow {needed.name} to {self._device.uuid}")

    # Copies

    def pin(self, size: int) -> int:
        """Allocate page-locked memory, so that copies run at the speed of the link. Needs `context=True`."""
        # The bindings raise an OverflowError for a size that does not fit the call.
        if not 0 < size <= MAX_BYTES:
            raise _invalid("cuMemHostRegister", f"{size} bytes cannot be pinned")
        address = pin(self.in_context, size)
        self._pinned[address] = size
        return address

    def unpin(self, address: int) -> None:
        """Wait for the GPU's work, then free page-locked memory."""
        size = self._pinned.pop(address, None)
        if size is None:
            raise _invalid("cuMemHostUnregister", f"nothing is pinned at {address:#x}")
        try:
            self.synchronize()
            unpin(self.in_context, address, size)
        except BaseException:
            self._pinned[address] = size  # so that the caller can try again
            raise

    def copier(self) -> Copier:
        """Return a copier with a new stream. Needs `context=True`."""
        return CudaCopier(self.in_context, self._check_copy)

    def _check_copy(self, address: int, size: int, needed: AccessFlags) -> None:
        if not is_pinned(self._pinned, address, size):
            self._check_access(address, size, needed, "cuMemcpyAsync")

    # The device's own figures

    def memory(self, location: Location) -> MemoryInfo | None:
        """Return NVML's figures for the GPU; None for the host, for which CUDA has no figures.

        NVML has none of a GPU that shares the machine's memory. CUDA tells them in a context, so a worker has them.
        """
        self._check_usable("nvmlDeviceGetMemoryInfo")
        if location is not Location.DEVICE:
            return None
        info = self._nvml.memory()
        if info is None and self._context is not None:
            free, total = self.in_context("cuMemGetInfo")
            info = MemoryInfo(int(total), int(free))
        return info

    def survivors(self) -> dict[str, int]:
        """Return {}: the GPU itself knows what is in use."""
        self._check_usable("survivors")
        return {}

    def processes(self) -> list[tuple[int, int]]:
        """Return (pid, bytes used) of the processes that compute, as NVML reports them, including contexts.

        A dead process stays listed while a child holds its descriptors. Memory that only a descriptor keeps is listed
        for no process.
        """
        self._check_usable("nvmlDeviceGetComputeRunningProcesses")
        return self._nvml.processes()

    # The end

    def abandon(self) -> None:
        """In a forked child: close every inherited descriptor of the GPU without calling CUDA.

        CUDA does not survive a fork, so any call could hang. Its mappings are not inherited. While the descriptors are
        open, the memory and the context of the dead parent stay on the GPU.
        """
        self._closed = True
        self._handles = {}
        close_descriptors("/dev/nvidia")

    def close(self) -> None:
        """Release the handles, the pinned memory, NVML, and this driver's reference to the primary context.

        If nothing else retains the context, it ends here, with all its work: close the driver last.
        """
        if self._closed:
            return
        self._enter("cuDevicePrimaryCtxRelease")
        self._closed = True
        with ExitStack() as steps:
            steps.callback(self._nvml.close)
            if self._context is not None:
                steps.callback(self._call, "cuDevicePrimaryCtxRelease", self._gpu.ordinal)
            while self._handles:
                steps.callback(self._call, "cuMemRelease", self._handles.popitem()[1])
            pinned, self._pinned = self._pinned, {}
            for address, size in pinned.items():
                steps.callback(unpin, self._call, address, size)
            if pinned:
                steps.callback(self._call, "cuCtxSynchronize")  # runs first: a copy may still be in progress

    # Shared by the calls above

    def _enter(self, call: str) -> None:
        """Raise if the driver is unusable. Make the context current on a thread that calls for the first time."""
        self._check_usable(call)
        if self._context is not None and not getattr(self._threads, "ready", False):
            self._call("cuCtxSetCurrent", self._context)
            self._threads.ready = True

    def _check_usable(self, call: str) -> None:
        if self._closed:
            raise DriverError(call, "CUDA_ERROR_DEINITIALIZED", 4, "this driver is closed")
        if self._process is not CudaProcess.here:
            hint = "CUDA does not survive a fork: start processes with spawn"
            raise DriverError(call, "CUDA_ERROR_NOT_INITIALIZED", 3, hint)

    def _book(self, extent: Any, size: int, location: Location) -> Handle:
        handle = Handle(next(_handle_values), size, location)
        self._handles[handle] = extent
        return handle

    def _extent(self, handle: Handle, call: str) -> Any:
        extent = self._handles.get(handle)
        if extent is None:
            raise _unknown(handle, call)
        return extent


def _unknown(handle: Handle, call: str) -> DriverError:
    return _invalid(call, f"handle {handle.value} was released, or belongs to another driver")


def _invalid(call: str, why: str) -> DriverError:
    return DriverError(call, "CUDA_ERROR_INVALID_VALUE", 1, why)


def _check_size(size: int, granularity: int, call: str) -> None:
    # The bindings raise an OverflowError for a size that does not fit the call.
    if not 0 < size < 1 << 63 or size % granularity:
        raise _invalid(call, f"a size is a positive multiple of {granularity} bytes, not {size}")
