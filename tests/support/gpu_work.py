"""What worker processes do on a GPU: write, look, compute, and take all that is left, as another program would.

The tests' lines import it in a worker. With torch where that is there, by the driver's own calls where not.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda

from membroker import Model
from membroker.segment import Segment
from membroker.vmm import Driver, DriverError, Location, open_driver
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.raw import Steps as Raw
from tests.support.sizes import GIB, MIB

__all__ = [
    "GIB",
    "Computing",
    "Raw",
    "Stranger",
    "digest",
    "fill",
    "holds",
    "torch_on_the_gpu",
    "warm_up",
    "write_blocks",
]

GRANULE = 2 * MIB
BLOCK = 64 * MIB
SPOTS = 8
MATRIX = 4096
"""Rows and columns of the matrices that torch multiplies: 64 MiB each."""


def fill(driver: Driver, address: int, size: int, value: int) -> None:
    """Set bytes of the GPU, by the GPU itself."""
    driver.synchronize()  # which makes its context this thread's
    _check("cuMemsetD8", cuda.cuMemsetD8(address, value, size))
    driver.synchronize()


def holds(driver: Driver, address: int, size: int, value: int) -> bool:
    """Say whether bytes of the GPU have this value: the first, the last, and some between."""
    length = min(MIB, size)
    step = max(length, (size - length) // (SPOTS - 1))
    offsets = {*range(0, size - length + 1, step), size - length}
    return all(driver.read(address + offset, length) == bytes([value]) * length for offset in offsets)


def warm_up(driver: Driver) -> None:
    """Load what `fill` and `holds` need of the driver, so that the context grows no more."""
    driver.synchronize()
    address = int(_check("cuMemAlloc", cuda.cuMemAlloc(GRANULE)))
    fill(driver, address, GRANULE, 1)
    data = bytearray(16)
    _check("cuMemcpyDtoH", cuda.cuMemcpyDtoH(data, address, len(data)))
    assert data == b"\x01" * len(data)
    _check("cuMemFree", cuda.cuMemFree(address))


def _check(call: str, answer: Any) -> Any:
    result, *values = answer
    if int(result):
        raise RuntimeError(f"{call} failed: {result}")
    return values[0] if values else None


def torch_on_the_gpu() -> Any:
    """Return torch, or None where it is not installed or sees no GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


class _Array:
    """Bytes as a CUDA array that torch takes: it refuses what says that it is read-only."""

    def __init__(self, owner: Any, size: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (owner.address, False),
            "version": 3,
        }


def write_blocks(segment: Segment, seed: int) -> None:
    """Fill a segment with blocks that begin with their own offset."""
    block = bytearray(hashlib.shake_128(seed.to_bytes(8, "little")).digest(MIB) * (BLOCK // MIB))
    for offset in range(0, segment.size, BLOCK):
        block[:8] = offset.to_bytes(8, "little")
        segment.write(offset, memoryview(block)[: segment.size - offset])


def digest(segment: Segment, driver: Driver) -> str:
    """Return a checksum of all of a segment: the GPU's own sums where torch is there, else of a copy."""
    torch = torch_on_the_gpu()
    if torch is None:
        found = 0
        for offset in range(0, segment.size, BLOCK):
            found = zlib.crc32(segment.read(offset, min(BLOCK, segment.size - offset)), found)
        return f"{found:08x}"
    place = torch.device("cuda", driver.device.ordinal)
    words = torch.as_tensor(_Array(segment, segment.size), device=place).view(torch.int64).view(-1, 1024)
    sums = [words.sum(0), words.sum(1)]
    text = b"".join(each.cpu().numpy().tobytes() for each in sums)
    return hashlib.sha256(text).hexdigest()


class Computing:
    """A thread that computes on a borrowed buffer until it is stopped. `rounds` says how far it is."""

    def __init__(self, model: Model, size: int) -> None:
        self._driver = model.driver
        self._buffer = model.allocate(size)
        self._ended = threading.Event()
        self.rounds = 0
        self.error = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            torch = torch_on_the_gpu()
            step = self._plain() if torch is None else self._multiplying(torch)
            while not self._ended.is_set():
                step()
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 - the test asks for it
            self.error = repr(error)

    def _plain(self) -> Callable[[], None]:
        def step() -> None:
            value = self.rounds % 251
            fill(self._driver, self._buffer.address, self._buffer.size, value)
            assert holds(self._driver, self._buffer.address, self._buffer.size, value), "wrong bytes"

        return step

    def _multiplying(self, torch: Any) -> Callable[[], None]:
        place = torch.device("cuda", self._driver.device.ordinal)
        every = torch.as_tensor(self._buffer, device=place).view(torch.float32)
        ones, shares, product = every[: 3 * MATRIX * MATRIX].view(3, MATRIX, MATRIX)
        ones.fill_(1)
        shares.fill_(1 / MATRIX)

        def step() -> None:
            product.zero_()
            torch.mm(ones, shares, out=product)
            assert product[17, 42].item() == 1, "a wrong product"
            assert product[-1, -1].item() == 1, "a wrong product"

        return step

    def stop(self) -> int:
        """End the thread, give the buffer back, and return how many rounds there were. Raises what went wrong."""
        self._ended.set()
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive(), "it computes forever"
        assert not self.error, self.error
        self._buffer.close()
        return self.rounds


class Stranger:
    """A process that knows no broker and takes memory by `cuMemAlloc` or `cudaMalloc`."""

    def __init__(self, device: str, call: str) -> None:
        self._driver = open_driver("cuda", device, context=True)
        self._call = call

    def leave(self, left: int) -> int:
        """Take all of the GPU but `left` bytes, as far as the driver gives it; return what is free then."""
        chunk = 16 * GIB
        for _ in range(10_000):
            excess = (self._free() - left) // GRANULE * GRANULE
            if excess <= 0 or chunk < GRANULE:
                return self._free()
            if not self._take(min(chunk, excess)):
                chunk = min(chunk, excess) // 2 // GRANULE * GRANULE
        raise AssertionError("the GPU does not fill")

    def _free(self) -> int:
        memory = self._driver.memory(Location.DEVICE)
        if memory is None:
            raise DriverError("memory", "UNKNOWN", 1)
        return memory.free

    def _take(self, size: int) -> bool:
        self._driver.synchronize()
        if self._call == "cuMemAlloc":
            result = cuda.cuMemAlloc(size)[0]
        else:
            from cuda.bindings import runtime

            ordinal: int = self._driver.device.ordinal
            _check("cudaSetDevice", runtime.cudaSetDevice(ordinal))
            result = runtime.cudaMalloc(size)[0]
        if int(result) not in (0, 2):
            raise RuntimeError(f"{self._call} failed: {result}")
        return int(result) == 0
