"""`CudaDriver`: one NVIDIA card by CUDA's virtual memory management. Only the `cuda` modules here name `cuMem*`.

Owns the driver's handles of this process and the translation of its errors. It must never create a context
for a broker: that costs the card 518 MiB in each process, and a sticky error of a context takes its process
down. Measured on a card of its own: `cuInit` and `cuDeviceGet` are enough to create, export and release.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from bisect import bisect_right, insort
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from membroker.vmm._copies import Copier, PinnedBlocks
from membroker.vmm._cuda_copies import CudaCopier, pin, unpin
from membroker.vmm._nvml import INSTALL_HINT, NvmlDevice
from membroker.vmm.driver import (
    AccessFlags,
    DeviceInfo,
    DriverError,
    DriverOutOfMemory,
    DriverUnavailable,
    Handle,
    Location,
    MemoryInfo,
)
from membroker.vmm.sizes import MAX_BYTES, is_power_of_two

_INVALID = ("CUDA_ERROR_INVALID_VALUE", 1)
_OUT_OF_MEMORY = 2
_NOT_SUPPORTED = ("CUDA_ERROR_NOT_SUPPORTED", 801)
# One counter for all drivers of the process: a handle of one driver is unknown to every other.
_handle_values = itertools.count(1)


class _Reservations:
    """What this process has reserved, through whichever driver: CUDA's addresses are the process's."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def add(self, address: int, size: int) -> None:
        with self._lock:
            insort(self._rows, (address, size))

    def remove(self, address: int, size: int) -> None:
        with self._lock:
            self._rows.remove((address, size))

    def have(self, address: int, size: int) -> bool:
        """Say whether `size` bytes at `address` lie inside one of them."""
        with self._lock:
            place = bisect_right(self._rows, (address, MAX_BYTES)) - 1
            start, length = self._rows[place] if place >= 0 else (0, 0)
        return size <= length and address - start <= length - size


_reservations = _Reservations()


class _Process:
    """This process's number. `os.getpid` is a system call, and every call of a driver asks."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.pid = os.getpid()


_process = _Process()


class CudaDriver:
    """The card `device`: an ordinal of this process (CUDA_VISIBLE_DEVICES counts), or NVML's UUID of it.

    `context=False` is the broker's use: extents are created, exported and released, and nothing is mapped for
    work. `context=True` is the worker's: the primary context, which its frameworks share, is retained and
    made current on each thread that calls. Raises `DriverUnavailable`, which says what is missing.
    """

    def __init__(self, device: int | str = 0, context: bool = False) -> None:
        _refuse_wsl()
        self._cuda = load_bindings()
        self._pid = _process.pid
        self._closed = False
        self._handles: dict[Handle, Any] = {}
        self._pinned = PinnedBlocks()
        self._threads = threading.local()
        with ExitStack() as undo:
            self._ordinal = self._find(device)
            self._check_abilities()
            self._nvml = NvmlDevice(self._uuid_text(self._ordinal))
            undo.callback(self._nvml.close)
            kinds = self._cuda.CUmemAllocationHandleType
            self._descriptor_kind = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            self._properties = {location: self._extent_properties(location) for location in Location}
            self._grants = {access: [self._grant(access)] for access in AccessFlags}
            self._device = self._describe()
            self._context = self._call("cuDevicePrimaryCtxRetain", self._ordinal) if context else None
            undo.pop_all()

    @property
    def device(self) -> DeviceInfo:
        """The card; `index` is NVML's, which no environment variable changes."""
        return self._device

    # Extents and descriptors

    def create(self, size: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> Handle:
        """Create an extent, exportable as a descriptor, and on the card RDMA-capable where the card is.

        Every extent is as good as any other to share: `sealable` changes nothing here.
        """
        self._enter("cuMemCreate")
        _check_size(size, self._device.granularity, "cuMemCreate")
        return self._book(self._call("cuMemCreate", size, self._properties[location], 0), size, location)

    def export(self, handle: Handle) -> int:
        """Return a new descriptor (CLOEXEC). CUDA refuses an imported extent: pass its descriptor on instead."""
        self._enter("cuMemExportToShareableHandle")
        extent = self._extent(handle, "cuMemExportToShareableHandle")
        return int(self._call("cuMemExportToShareableHandle", extent, self._descriptor_kind, 0))

    def lend(self, size: int, count: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> list[int]:
        """Create `count` extents and return a descriptor of each: 53 us for one of 2 MiB (H200), while one is open."""
        self._enter("cuMemCreate")
        _check_size(size, self._device.granularity, "cuMemCreate")
        cuda, properties, kind = self._cuda, self._properties[location], self._descriptor_kind
        descriptors: list[int] = []
        try:
            for _ in range(count):
                result, extent = cuda.cuMemCreate(size, properties, 0)
                if result:
                    raise self._failure("cuMemCreate", result)
                result, descriptor = cuda.cuMemExportToShareableHandle(extent, kind, 0)
                (released,) = cuda.cuMemRelease(extent)
                if result:
                    raise self._failure("cuMemExportToShareableHandle", result)
                descriptors.append(int(descriptor))
                if released:
                    raise self._failure("cuMemRelease", released)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return descriptors

    def map_descriptors(
        self, address: int, descriptors: Sequence[int], size: int, access: AccessFlags = AccessFlags.READ_WRITE
    ) -> None:
        """Bind the extents behind `descriptors` side by side from `address` on; 56 us for one of 2 MiB (H200)."""
        self._enter("cuMemMap")
        self._check_reserved(address, size * len(descriptors))
        cuda, kind, at = self._cuda, self._descriptor_kind, address
        try:
            for descriptor in descriptors:
                result, extent = cuda.cuMemImportFromShareableHandle(descriptor, kind)
                if result:
                    raise self._failure("cuMemImportFromShareableHandle", result)
                (result,) = cuda.cuMemMap(at, size, 0, extent, 0)
                (released,) = cuda.cuMemRelease(extent)
                if result:
                    raise self._failure("cuMemMap", result)
                at += size
                if released:
                    raise self._failure("cuMemRelease", released)
            (result,) = cuda.cuMemSetAccess(address, at - address, self._grants[access], 1)
            if result:
                raise self._failure("cuMemSetAccess", result)
        except BaseException:
            if at > address:
                self._call("cuMemUnmap", address, at - address)
            raise

    def seal(self, descriptor: int) -> None:
        """Do nothing: a card lets whoever imports an extent map it as it likes."""
        self._enter("seal")

    def import_extent(self, descriptor: int, size: int, location: Location = Location.DEVICE) -> Handle:
        """Return a handle to the extent behind `descriptor`. A wrong `size` shows at `map`."""
        self._enter("cuMemImportFromShareableHandle")
        _check_size(size, self._device.granularity, "cuMemImportFromShareableHandle")
        extent = self._call("cuMemImportFromShareableHandle", descriptor, self._descriptor_kind)
        return self._book(extent, size, location)

    def release(self, handle: Handle) -> None:
        """Drop this reference. The last one in any process frees the memory: 5 ms for 8 GiB."""
        self._enter("cuMemRelease")
        extent = self._extent(handle, "cuMemRelease")
        # Taken out first, in one step: of two threads that release the same handle one is refused here.
        if self._handles.pop(handle, None) is None:
            raise _unknown(handle, "cuMemRelease")
        self._call("cuMemRelease", extent)

    # Addresses and mappings

    def reserve(self, size: int, alignment: int = 0) -> int:
        """Reserve `size` bytes of addresses; 16 TiB in one call cost nothing."""
        self._enter("cuMemAddressReserve")
        _check_size(size, self._device.granularity, "cuMemAddressReserve")
        if alignment and not (is_power_of_two(alignment) and alignment <= MAX_BYTES):
            hint = f"an alignment is a power of two below 2^63, not {alignment}"
            raise DriverError("cuMemAddressReserve", *_INVALID, hint)
        result, reserved = self._cuda.cuMemAddressReserve(size, alignment, 0, 0)
        if result:
            raise self._failure("cuMemAddressReserve", result)
        address = int(reserved)
        _reservations.add(address, size)
        return address

    def unreserve(self, address: int, size: int) -> None:
        """Give a whole reservation back."""
        self._enter("cuMemAddressFree")
        (result,) = self._cuda.cuMemAddressFree(address, size)
        if result:
            raise self._failure("cuMemAddressFree", result)
        _reservations.remove(address, size)

    def map(self, address: int, handle: Handle) -> None:
        """Bind the extent to `address`; nothing may touch it until `set_access`."""
        self._enter("cuMemMap")
        self._check_reserved(address, handle.size)
        self._call("cuMemMap", address, handle.size, 0, self._extent(handle, "cuMemMap"), 0)

    def _check_reserved(self, address: int, size: int) -> None:
        """Refuse what the card does not: it maps over the end of a reservation (seen on an H200, 580.159)."""
        if not _reservations.have(address, size):
            hint = f"{size} bytes at {address:#x} do not lie inside one reservation"
            raise DriverError("cuMemMap", "CUDA_ERROR_INVALID_VALUE", 1, hint)

    def set_access(self, address: int, size: int, access: AccessFlags) -> None:
        """Set what this card may do with whole mappings: of its own memory, the host's, or a card's that it reaches."""
        self._enter("cuMemSetAccess")
        self._call("cuMemSetAccess", address, size, self._grants[access], 1)

    def get_access(self, address: int) -> AccessFlags:
        """Return what this card may do with the mapped byte at `address`."""
        self._enter("cuMemGetAccess")
        return AccessFlags(int(self._call("cuMemGetAccess", self._own_location(), address)))

    def unmap(self, address: int, size: int) -> None:
        """Unbind whole mappings. Does not wait for kernels: `synchronize` first, or the card faults (Xid 31)."""
        self._enter("cuMemUnmap")
        (result,) = self._cuda.cuMemUnmap(address, size)
        if result:
            raise self._failure("cuMemUnmap", result)

    def move(self, address: int, new_address: int, size: int, count: int = 1) -> None:
        """Move extents one after the other, from the end to which they move, so that they may lie over one another."""
        self._enter("cuMemMap")
        _check_size(size, self._device.granularity, "cuMemMap")
        if not 0 < count <= MAX_BYTES // size or abs(new_address - address) < size:
            hint = f"{count} extents of {size} bytes do not go from {address:#x} to {new_address:#x}: one size at least"
            raise DriverError("cuMemMap", *_INVALID, hint)
        self._check_reserved(new_address, size * count)
        places = range(0, size * count, size)
        with ExitStack() as undo:
            for place in places if new_address < address else reversed(places):
                self._move(address + place, new_address + place, size)
                undo.callback(self._move, new_address + place, address + place, size)
            undo.pop_all()

    def _move(self, address: int, new_address: int, size: int) -> None:
        """Map an extent at the new address before it is unmapped at the old one: it is never without a mapping."""
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
        """Wait for this process's work on the card; without a context there is none."""
        self._enter("cuCtxSynchronize")
        if self._context is not None:
            self._in_context("cuCtxSynchronize")

    def in_context(self, name: str, *arguments: Any) -> Any:
        """Call the driver's function `name` in this driver's context: for the other `cuda` modules.

        Raises `DriverError` with what the driver says, and where this one was made without a context.
        """
        self._check_usable(name)
        if self._context is None:
            hint = "this driver has no context: make it with open_driver('cuda', context=True)"
            raise DriverError(name, "CUDA_ERROR_INVALID_CONTEXT", 201, hint)
        return self._in_context(name, *arguments)

    def _in_context(self, name: str, *arguments: Any) -> Any:
        # Another driver of this process, or a framework, may have made another card's context this thread's.
        cuda = self._cuda
        (result,) = cuda.cuCtxPushCurrent(self._context)
        if result:
            raise self._failure("cuCtxPushCurrent", result)
        try:
            return self._call(name, *arguments)
        finally:
            result, *_ = cuda.cuCtxPopCurrent()
            if result:
                raise self._failure("cuCtxPopCurrent", result)

    # Bytes

    def view(self, address: int, size: int) -> memoryview:
        """Refuse: the interpreter cannot read a card's memory. Use `read` and `write`, or a framework."""
        hint = f"{size} bytes at {address:#x} are the card's: copy them with read(), or use a framework"
        raise DriverError("view", *_NOT_SUPPORTED, hint)

    def write(self, address: int, data: bytes | memoryview) -> None:
        """Copy `data` to mapped bytes and wait; for tests and small headers. Needs `context=True`."""
        self._check_access(address, len(data), AccessFlags.READ_WRITE, "cuMemcpyHtoD")
        self.in_context("cuMemcpyHtoD", address, data, len(data))
        # It returns when it has read `data`, and up to 64 KiB may still be on their way: to an address that the caller
        # unmaps, and that ends the context (seen on an H200, as CUDA_ERROR_LAUNCH_FAILED at a later call).
        self.in_context("cuStreamSynchronize", 0)

    def read(self, address: int, size: int) -> bytes:
        """Return a copy of mapped bytes; for tests and small headers. Needs `context=True`."""
        self._check_access(address, size, AccessFlags.READ, "cuMemcpyDtoH")
        data = bytearray(size)
        self.in_context("cuMemcpyDtoH", data, address, size)
        return bytes(data)

    def _check_access(self, address: int, size: int, needed: AccessFlags, call: str) -> None:
        """Raise unless every granule of the range allows this card `needed`.

        Asked before the copy, because a copy that faults on the card ends the context of the whole process.
        """
        self._enter(call)
        if size <= 0:
            raise DriverError(call, *_INVALID, f"{size} bytes are not a range")
        granule = self._device.granularity
        for at in (address, *range(address - address % granule + granule, address + size, granule)):
            if self.get_access(at).value & needed.value != needed.value:
                raise DriverError(call, *_INVALID, f"{at:#x} does not allow {needed.name} to {self._device.uuid}")

    # Copies

    def pin(self, size: int) -> int:
        """Allocate page-locked memory, with which copies run at the link's speed. Needs `context=True`."""
        # The bindings raise an OverflowError of their own for a size that the driver could not be told.
        if not 0 < size <= MAX_BYTES:
            raise DriverError("cuMemHostRegister", *_INVALID, f"{size} bytes cannot be pinned")
        address = pin(self.in_context, size)
        self._pinned.add(address, size)
        return address

    def unpin(self, address: int) -> None:
        """Free page-locked memory; waits for the card's work."""
        size = self._pinned.take(address)
        if size is None:
            raise DriverError("cuMemHostUnregister", *_INVALID, f"nothing is pinned at {address:#x}")
        try:
            self.synchronize()
            unpin(self.in_context, address, size)
        except BaseException:
            self._pinned.add(address, size)  # to free it again tries again
            raise

    def copier(self) -> Copier:
        """Return a stream of its own. Needs `context=True`."""
        return CudaCopier(self.in_context, self._check_copy)

    def _check_copy(self, address: int, size: int, needed: AccessFlags) -> None:
        if not self._pinned.hold(address, size):
            self._check_access(address, size, needed, "cuMemcpyAsync")

    # The device's own figures

    def memory(self, location: Location) -> MemoryInfo | None:
        """Return what NVML shows for the card; None for the host, where CUDA keeps no such figure."""
        self._check_usable("nvmlDeviceGetMemoryInfo")
        return self._nvml.memory() if location is Location.DEVICE else None

    def survivors(self) -> dict[str, int]:
        """Return none: the card itself knows what it has in use."""
        self._check_usable("survivors")
        return {}

    def processes(self) -> list[tuple[int, int]]:
        """Return (pid, bytes used) of the processes that compute, as NVML shows them, contexts included.

        A dead process stays listed while a child holds its descriptors, and memory that only a descriptor
        keeps is listed for nobody.
        """
        self._check_usable("nvmlDeviceGetComputeRunningProcesses")
        return self._nvml.processes()

    # The end

    def abandon(self) -> None:
        """In a forked child: close every inherited descriptor of the card without calling CUDA.

        CUDA does not survive a fork, so any call could hang; its mappings are not inherited. While the
        descriptors are open the dead parent's memory and its whole context stay on the card.
        """
        self._closed = True
        self._handles = {}
        close_descriptors("/dev/nvidia")

    def close(self) -> None:
        """Release the handles, what is pinned, NVML, and this driver's reference to the primary context.

        Where nobody else retains the context it ends here, and with it what was computing: close last.
        """
        if self._closed:
            return
        self._enter("cuDevicePrimaryCtxRelease")
        self._closed = True
        with ExitStack() as steps:
            steps.callback(self._nvml.close)
            if self._context is not None:
                steps.callback(self._call, "cuDevicePrimaryCtxRelease", self._ordinal)
            while self._handles:
                steps.callback(self._call, "cuMemRelease", self._handles.popitem()[1])
            pinned = self._pinned.take_all()
            for address, size in pinned:
                steps.callback(unpin, self._call, address, size)
            if pinned:
                steps.callback(self._call, "cuCtxSynchronize")  # the first step: a copy may still be under way

    # Finding and describing the card

    def _find(self, device: int | str) -> Any:
        try:
            self._call("cuInit", 0)
        # The bindings load libcuda at their first call and raise a RuntimeError of their own without it.
        except RuntimeError as error:
            hint = "there is no NVIDIA driver here (libcuda.so.1); the host twin needs none"
            raise DriverUnavailable("cuInit", "MISSING", 0, hint) from error
        except DriverError as error:
            raise DriverUnavailable(error.call, error.name, error.code, "CUDA does not start here") from error
        if isinstance(device, str):
            return self._find_uuid(device)
        try:
            return self._call("cuDeviceGet", device)
        except DriverError as error:
            hint = f"there is no card number {device}: this process sees {self._call('cuDeviceGetCount')}"
            raise DriverUnavailable(error.call, error.name, error.code, hint) from error

    def _find_uuid(self, text: str) -> Any:
        seen = []
        for number in range(self._call("cuDeviceGetCount")):
            ordinal = self._call("cuDeviceGet", number)
            seen.append(self._uuid_text(ordinal))
            if text.lower().removeprefix("gpu-").removeprefix("mig-") == seen[-1]:
                return ordinal
        hint = f"no card {text} among those that this process sees: {', '.join(seen) or 'none'}"
        raise DriverUnavailable("cuDeviceGetUuid", "CUDA_ERROR_INVALID_DEVICE", 101, hint)

    def _uuid_text(self, ordinal: Any) -> str:
        # In CUDA 12 only the second version names a MIG slice instead of its card; 13 has that one alone.
        call = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return str(uuid.UUID(bytes=bytes(self._call(call, ordinal).bytes)))

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._ordinal))

    def _check_abilities(self) -> None:
        for name, lack in (
            ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "virtual memory management"),
            ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "extents as file descriptors"),
        ):
            if not self._attribute(name):
                hint = f"this card, or its driver, has no {lack}, which a broker needs"
                raise DriverUnavailable("cuDeviceGetAttribute", *_NOT_SUPPORTED, hint)

    def _own_location(self) -> Any:
        location = self._cuda.CUmemLocation()
        location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = int(self._ordinal)
        return location

    def _grant(self, access: AccessFlags) -> Any:
        grant = self._cuda.CUmemAccessDesc()
        grant.location = self._own_location()
        grant.flags = self._cuda.CUmemAccess_flags(access.value)
        return grant

    def _extent_properties(self, location: Location) -> Any:
        cuda = self._cuda
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._descriptor_kind
        if location is Location.HOST:
            host = cuda.CUmemLocation()
            host.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
            # The node beside the card; -1 on a machine that has only one.
            host.id = max(0, self._attribute("HOST_NUMA_ID"))
            properties.location = host
        else:
            properties.location = self._own_location()
            # Decided at creation and never later, so it is asked for wherever the card can.
            rdma = self._attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
            properties.allocFlags.gpuDirectRDMACapable = int(bool(rdma))
        return properties

    def _describe(self) -> DeviceInfo:
        kinds = self._cuda.CUmemAllocationGranularity_flags
        granularity = self._granularity(kinds.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
        recommended = self._granularity(kinds.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        nvml = self._nvml
        about = (granularity, nvml.index, nvml.driver_version, int(self._ordinal), recommended)
        return DeviceInfo(nvml.uuid, nvml.name, "cuda", *about)

    def _granularity(self, kind: Any) -> int:
        return int(self._call("cuMemGetAllocationGranularity", self._properties[Location.DEVICE], kind))

    # Shared by the calls above

    def _enter(self, call: str) -> None:
        """Raise where the driver is unusable, and make the context current on a thread that is new to it."""
        if self._closed or self._pid != _process.pid:
            raise self._unusable(call)
        if self._context is not None and not getattr(self._threads, "ready", False):
            self._call("cuCtxSetCurrent", self._context)
            self._threads.ready = True

    def _check_usable(self, call: str) -> None:
        if self._closed or self._pid != _process.pid:
            raise self._unusable(call)

    def _unusable(self, call: str) -> DriverError:
        if self._closed:
            return DriverError(call, "CUDA_ERROR_DEINITIALIZED", 4, "this driver is closed")
        hint = "CUDA does not survive a fork: start processes with spawn"
        return DriverError(call, "CUDA_ERROR_NOT_INITIALIZED", 3, hint)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver's function `name`, and return what it returns or raise what it says.

        What an allocation and a free call is written out there instead, which takes 0.2 us less for each call.
        """
        result, *values = getattr(self._cuda, name)(*arguments)
        if result:
            raise self._failure(name, result)
        return values[0] if values else None

    def _failure(self, name: str, result: Any) -> DriverError:
        kind = DriverOutOfMemory if int(result) == _OUT_OF_MEMORY else DriverError
        return kind(name, self._error_name(result), int(result))

    def _error_name(self, result: Any) -> str:
        status, name = self._cuda.cuGetErrorName(result)
        return f"CUDA_ERROR_{int(result)}" if int(status) or not name else str(name, "ascii")

    def _book(self, extent: Any, size: int, location: Location) -> Handle:
        handle = Handle(next(_handle_values), size, location)
        self._handles[handle] = extent
        return handle

    def _extent(self, handle: Handle, call: str) -> Any:
        extent = self._handles.get(handle)
        if extent is None:
            raise _unknown(handle, call)
        return extent


def close_descriptors(prefix: str) -> None:
    """Close every descriptor of this process whose file's path begins with `prefix`."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith(prefix):
                os.close(int(entry))
        # The descriptor that listed the directory is closed again by now.
        except FileNotFoundError:
            continue


def _unknown(handle: Handle, call: str) -> DriverError:
    return DriverError(call, *_INVALID, f"handle {handle.value} was released, or is another driver's")


def _check_size(size: int, granularity: int, call: str) -> None:
    # The bindings raise an OverflowError of their own for a size that the driver could not be told.
    if not 0 < size < 1 << 63 or size % granularity:
        raise DriverError(call, *_INVALID, f"a size is a positive multiple of {granularity} bytes, not {size}")


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
            hint = "WSL passes no memory between processes as descriptors: use Linux itself, or the host twin"
            raise DriverUnavailable("/proc/version", *_NOT_SUPPORTED, hint)
