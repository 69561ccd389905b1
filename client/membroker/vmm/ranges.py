"""Address ranges, physical memory and mappings as context managers.

Owns the order of closing, which callers cannot get wrong. Each object may be closed at any time: memory lives while it
is mapped, and addresses are released when the last mapping in them is closed. So blocks may end in any order, and an
error from a close does not hide the error that ended the block. It must never talk to a broker; `Region` does that.

The garbage collector unmaps nothing, because it may run in the middle of a driver call, in any thread. A forgotten
object causes a `ResourceWarning`. In a forked child every object is closed, because it belongs to the parent.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Self

from ..closing import Closing
from ..errors import AlreadyMapped, ClosedError, InvalidOffset, InvalidRequest, NotMapped
from .driver import AccessFlags, Driver, Handle, Location
from .sizes import MAX_BYTES, Size, is_power_of_two, parse_size, round_up


def allocation_granularity(driver: Driver, recommended: bool = False) -> int:
    """Return the unit of sizes, offsets and addresses on this device, in bytes.

    With `recommended`, return the unit that the device works best with (`cuMemGetAllocationGranularity`). It is the
    granularity itself if the device recommends nothing, as the host driver and an H200 (2 MiB both, driver 580).
    """
    device = driver.device
    return device.recommended_granularity or device.granularity if recommended else device.granularity


class Closable(Closing):
    """An object that is closed once, by `close` or at the end of a `with` block, from any thread."""

    # An object whose constructor failed counts as closed.
    _closed = True

    def _open(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it was closed, or inherited over a fork."""
        return self._closed or self._pid != os.getpid()

    def check_open(self) -> None:
        """Raise `ClosedError` if it is closed."""
        if self.closed:
            raise ClosedError(f"{self} is closed, or belongs to the process that this one was forked from")

    def close(self) -> None:
        """Release it. Closing again does nothing. After a failure, which is raised, it is still open."""
        if self.closed:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._give_back()
        except BaseException:
            self._closed = False
            raise

    def _give_back(self) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"

    def __del__(self) -> None:
        if not self._closed and self._pid == os.getpid():
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)


class AddressRange(Closable):
    """`size` bytes of reserved addresses from `base` on, rounded up to the granularity, without memory.

    `size` may be text, such as `"8GiB"`. `alignment` is in bytes, a power of two; 0 asks for the granularity. Raises
    `InvalidRequest`, `DriverError`.

    Addresses belong to the process: memory of any device of `driver`'s kind may be mapped there.
    """

    def __init__(self, driver: Driver, size: Size, alignment: int = 0) -> None:
        granularity = driver.device.granularity
        self.driver = driver
        self.size: int = _granules("a range of addresses", size, granularity)
        if alignment and not (is_power_of_two(alignment) and alignment <= MAX_BYTES):
            raise InvalidRequest(f"an alignment is a power of two below 2^63, or 0, not {alignment}")
        self.alignment: int = max(alignment, granularity)
        self.base: int = driver.reserve(self.size, alignment)
        # By offset; None while the mapping is being made.
        self._mapped: dict[int, MappedRange | None] = {}
        self._unreserved = False
        self._open()

    @property
    def end(self) -> int:
        """The first address after the range."""
        return self.base + self.size

    def contains(self, address: int, size: int = 1) -> bool:
        """Return whether all `size` bytes at `address` lie inside the range."""
        return lies_within(self.size, address - self.base, size)

    @property
    def mappings(self) -> list[MappedRange]:
        """Every open `MappedRange` here, in order."""
        mapped = dict(self._mapped)
        return [mapping for offset in sorted(mapped) if (mapping := mapped[offset])]

    def mappings_in(self, offset: int, size: int) -> list[MappedRange]:
        """Return the mappings that fill [offset, offset + size) side by side.

        Raises `InvalidOffset` outside the range, and `NotMapped` for a hole, or for a part of a mapping.
        """
        if not lies_within(self.size, offset, size) or size == 0:
            raise InvalidOffset(f"[{offset}, +{size}) is not inside the {self.size} bytes of {self}")
        found, at = [], offset
        while at < offset + size:
            mapping = self._mapped.get(at)
            if mapping is None or mapping.size > offset + size - at:
                raise NotMapped(f"no mapping that ends by {offset + size} begins at offset {at} of {self}")
            found.append(mapping)
            at += mapping.size
        return found

    def close(self) -> None:
        """Refuse new mappings, and release the addresses when the last mapping in them is closed.

        If nothing is mapped, the addresses are released now. Raises `DriverError`, and stays open, if something is
        mapped that no `MappedRange` stands for.
        """
        super().close()

    def _expect(self, offset: int) -> None:
        """Reserve `offset` for a mapping that is about to be made, until `_forget`."""
        with self._lock:
            self.check_open()
            if offset in self._mapped:
                raise AlreadyMapped(f"something is mapped at offset {offset} of {self}: unmap it first")
            self._mapped[offset] = None

    def _forget(self, offset: int) -> None:
        """Forget the mapping at `offset`. The caller then calls `_give_back`."""
        with self._lock:
            del self._mapped[offset]

    def _give_back(self) -> None:
        """Release the addresses if this is closed and nothing is mapped here any more."""
        with self._lock:
            if not self._closed or self._mapped or self._unreserved:
                return
            self._unreserved = True
        try:
            self.driver.unreserve(self.base, self.size)
        except BaseException:
            self._closed = self._unreserved = False
            raise

    def __str__(self) -> str:
        return f"VA[0x{self.base:016x}..0x{self.end:016x}, {self.size} bytes, align={self.alignment}]"


class PhysicalMemory(Closable):
    """One extent of one device, held by a handle.

    Closing drops the handle. A mapping or a descriptor keeps the memory, so it is usual to close this right after
    mapping.
    """

    handle: Handle
    driver: Driver

    def __init__(self, driver: Driver, handle: Handle) -> None:
        self.driver, self.handle = driver, handle
        self._mappings = 0
        self._open()

    @classmethod
    def create(cls, driver: Driver, size: Size, location: Location = Location.DEVICE) -> Self:
        """Create an extent of `size` bytes, or text, rounded up to the granularity, zero-filled.

        Raises `InvalidRequest`, `DriverError` (`DriverOutOfMemory`).
        """
        granules = _granules("physical memory", size, driver.device.granularity)
        return cls(driver, driver.create(granules, location))

    @classmethod
    def from_descriptor(cls, driver: Driver, descriptor: int, size: int, location: Location = Location.DEVICE) -> Self:
        """Import the extent of `size` bytes behind `descriptor`, which the caller still owns."""
        return cls(driver, driver.import_extent(descriptor, size, location))

    @property
    def size(self) -> int:
        """The extent's bytes."""
        return self.handle.size

    @property
    def device_ordinal(self) -> int:
        """The number of the driver's device in this process."""
        return self.driver.device.ordinal

    @property
    def mapped(self) -> bool:
        """Whether a `MappedRange` of this object is open. Other handles and processes may map the extent too."""
        return self._mappings > 0

    def export(self) -> int:
        """Return a new descriptor of the extent. The caller closes it."""
        self.check_open()
        return self.driver.export(self.handle)

    def _enter(self) -> None:
        """Count a mapping that is about to be made."""
        with self._lock:
            self.check_open()
            self._mappings += 1

    def _leave(self) -> None:
        with self._lock:
            self._mappings -= 1

    def _give_back(self) -> None:
        self.driver.release(self.handle)

    def __str__(self) -> str:
        return f"PhysAlloc[handle=0x{self.handle.value:016x}, {self.size} bytes, dev={self.device_ordinal}]"


class MappedRange(Closable):
    """All of `memory`, mapped into `addresses` at `offset` bytes from their base.

    The mapping keeps both alive. The same memory may be mapped many times (aliasing), and memory of several devices
    side by side. `access` is what the device of the addresses' driver may do, whichever device has the memory. It can
    also be a mapping from drivers to what their devices may do; `{}` grants nothing yet. Raises `InvalidOffset` if the
    memory does not fit, `InvalidRequest` for drivers of two kinds, `AlreadyMapped`, `ClosedError` and `DriverError`;
    nothing is mapped then.
    """

    address: int
    size: int
    offset: int
    memory: PhysicalMemory
    addresses: AddressRange

    def __init__(
        self,
        addresses: AddressRange,
        memory: PhysicalMemory,
        offset: int = 0,
        access: AccessFlags | Mapping[Driver, AccessFlags] = AccessFlags.READ_WRITE,
    ) -> None:
        grants = {addresses.driver: access} if isinstance(access, AccessFlags) else access
        self.addresses, self.memory, self.offset = addresses, memory, offset
        self.size, self.address = memory.size, addresses.base + offset
        self._drivers = {addresses.driver, memory.driver, *grants}
        for driver in self._drivers:
            self._check_kind(driver)
        # Before taking any lock: after a fork, a thread of the parent may have held it.
        addresses.check_open()
        memory.check_open()
        if not lies_within(addresses.size, offset, self.size):
            raise InvalidOffset(f"{memory} does not fit at offset {offset} of {addresses}")
        with ExitStack() as undo:
            undo.callback(addresses._give_back)
            addresses._expect(offset)
            undo.callback(addresses._forget, offset)
            memory._enter()
            undo.callback(memory._leave)
            memory.driver.map(self.address, memory.handle)
            undo.callback(addresses.driver.unmap, self.address, self.size)
            for driver, flags in grants.items():
                driver.set_access(self.address, self.size, flags)
            self._open()
            addresses._mapped[offset] = self
            undo.pop_all()

    def set_access(self, access: AccessFlags, driver: Driver | None = None) -> None:
        """Set what the device of `driver`, or of the addresses' driver, may do with the whole mapping.

        Closing then also waits for the work of that device. Raises `InvalidRequest`, `ClosedError`, `DriverError`.
        """
        self.check_open()
        driver = driver or self.addresses.driver
        self._check_kind(driver)
        driver.set_access(self.address, self.size, access)
        self._drivers.add(driver)

    def get_access(self, driver: Driver | None = None) -> AccessFlags:
        """Return what the device of `driver`, or of the addresses' driver, may do, as the driver reports it."""
        self.check_open()
        return (driver or self.addresses.driver).get_access(self.address)

    def close(self) -> None:
        """Wait for this process's work on every device that was granted access, then unmap.

        The addresses stay reserved, unless the range was closed and this was its last mapping.
        """
        super().close()
        if self._closed and self._pid == os.getpid():
            self.addresses._give_back()

    def synchronize(self) -> None:
        """Wait for the work of the devices with access."""
        for driver in self._drivers:
            driver.synchronize()

    def _give_back(self) -> None:
        self.synchronize()
        self.addresses.driver.unmap(self.address, self.size)
        self.addresses._forget(self.offset)
        self.memory._leave()

    def _check_kind(self, driver: Driver) -> None:
        ours, theirs = self.addresses.driver.device.driver, driver.device.driver
        if ours != theirs:
            raise InvalidRequest(f"the addresses belong to the {ours} driver, and a {theirs} driver cannot use them")

    def __str__(self) -> str:
        return f"[0x{self.address:016x}, +{self.size}) of {self.memory}"


def lies_within(total: int, offset: int, size: int) -> bool:
    """Return whether the `size` bytes at `offset` lie inside `total` bytes, without adding the two."""
    return 0 <= size <= total and 0 <= offset <= total - size


def _granules(what: str, size: Size, granularity: int) -> int:
    try:
        wanted = parse_size(size)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{what}: {error}") from error
    rounded = round_up(wanted, granularity)
    if not 0 < rounded <= MAX_BYTES:
        raise InvalidRequest(f"{what} must have between 1 and 2^63-1 bytes, rounded up to whole granules, not {size!r}")
    return rounded
