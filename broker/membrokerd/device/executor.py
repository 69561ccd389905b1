"""Every driver call of the daemon, one after the other: short ones in the event loop, all others on a thread.

A packet that can be made quickly is made in the event loop, because two hops between threads cost 0.3 ms, and a create
and export 43 us (H200). What is quick depends on the device's load: the same create took 0.3 ms at p99.9 beside a
process that unmapped 18,000 extents, and 15 ms beside 31 processes that mapped without a pause. The thread does what
takes longer, and all that is asked for while it is busy. It serves the tenant that has used the least of its time, so
that one with many busy sessions, or large packets, does not keep the others waiting. The daemon's own jobs come before
those of all tenants.

It makes packets (gate, create, export, drop the handle) and reads what the device shows. It hands over what it has
made, and forgets it: the broker keeps nothing of a private extent. It decides nothing but the device gate, which must
look at the device right before a create.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from membroker.vmm import (
    Driver,
    DriverError,
    DriverLimit,
    DriverOutOfMemory,
    DriverUnavailable,
    Location,
    MemoryInfo,
)
from membroker.wire.descriptors import close_all

from ..core import policy
from ..core.denied import Denied, Reason
from ..core.effects import Make
from ..system import logs
from ..system.failpoints import reach
from ..system.process import NO_DESCRIPTOR
from ..system.tenant_queues import TenantQueues

_T = TypeVar("_T")

INLINE_SECONDS = 0.001
INLINE_BYTES = 2 << 30
"""A packet is made in the event loop, where everybody waits for it, if it has at most so many bytes, and will take at
most so long, by the time that the packets before it took. A create costs by the handle, and 80 us a GiB (H200)."""

RESULTS_AHEAD = 8
"""How many results may wait for the event loop while the thread goes on. It bounds what one turn of the loop hears: to
send a packet, or to book a death, takes up to a millisecond. And it lets jobs wait instead of results, because jobs are
taken from the tenants in turn, while results are heard in their order."""

GATE_SECONDS = 0.2
GATE_AMPLE = 1 << 30
"""Reading the device takes 15 us beside a worker (H200), half as long as a create. So a figure that an audit or the
gate has read is used for `GATE_SECONDS`, less what was made since, as long as that leaves `GATE_AMPLE` bytes more than
are asked for. If another process takes that memory meanwhile, the create fails, as it would if the process took it
between a reading and the create."""

_LOCATIONS = {location.value: location for location in Location}

Observe = Callable[[str, float], None]
"""Told of each driver call: its name, and its seconds."""

OWN = ""
"""In place of a tenant: the daemon's own jobs, which come before those of all tenants. Closing stock is one of them: it
makes room for packets of any tenant. Audits are others: a figure need not wait for packets that are not made yet."""

_Job = Callable[[], None]

Figures = Mapping[str, MemoryInfo | None]
"""What each location shows, by `Location.value`."""


class Executor:
    """One thread over one driver. The event loop hears of the results in the order in which the jobs were done.

    Of one tenant, and of the daemon itself, the jobs are done in the order in which they were asked for.
    """

    def __init__(self, driver: Driver, gate_reserve: int, observe: Observe = lambda call, seconds: None) -> None:
        self._driver = driver
        self._reserve = gate_reserve
        self._observe = observe
        self._asked: queue.SimpleQueue[tuple[str, _Job]] = queue.SimpleQueue()
        """Jobs that the thread has not taken yet, each with its tenant, or `OWN`."""
        self._waiting: TenantQueues[_Job] = TenantQueues(first=OWN)
        """Jobs that the thread has taken. Only the thread uses it."""
        self._ahead = threading.Semaphore(RESULTS_AHEAD)
        """What is left of `RESULTS_AHEAD`."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="membrokerd-driver", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._anchor: int | None = None
        self._rooms: dict[Location, tuple[float, int]] = {}
        """What each location had free when it was last read, less what was made since, and when that was."""
        self._extent_seconds = 50e-6
        """How long an extent took lately, to be made and exported."""
        self.lost = ""
        """What the driver said when the device stopped answering; "" while it answers."""
        self._doubted = False
        """Whether the device has to prove that it makes extents: it did not answer, or a create failed."""
        self._unreported = 0
        """Jobs whose results the event loop has not heard yet."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start taking jobs; results are called on `loop`."""
        self._loop = loop
        self._thread.start()

    def drop_anchor(self) -> int:
        """Keep one granule exported for the daemon's whole life, and return its bytes.

        While any descriptor is open, exporting and closing others is 30 to 60 times cheaper (measured on an H200).
        It also proves at the start that the driver can create, export and import at all: raises `DriverUnavailable`.
        """
        size = self._driver.device.granularity
        try:
            (self._anchor,) = self._lend(size, 1, Location.DEVICE)
            self._driver.release(self._driver.import_extent(self._anchor, size))
        except DriverOutOfMemory:
            raise
        except DriverError as error:
            hint = "this device cannot create, export and import an extent, which is what a broker does"
            raise DriverUnavailable(error.call, error.name, error.code, hint) from error
        return size

    def make(self, make: Make, done: Callable[[list[int] | Denied], None]) -> None:
        """Make a packet; `done` gets its descriptors, in the order of the ids, or why nothing of it was made."""
        count = len(make.ids)
        quick = self._extent_seconds * count <= INLINE_SECONDS and make.extent_bytes * count <= INLINE_BYTES
        if quick and not self._unreported:
            done(self._make(make))
        else:
            self._submit(make.tenant, lambda: self._make(make), done)

    def seal(self, tenant: str, descriptors: Sequence[int], done: Callable[[Denied | None], None]) -> None:
        """Seal extents of a tenant; `done` gets why it failed, or None. The caller still owns the descriptors."""
        self._submit(tenant, lambda: self._seal(descriptors), done)

    def close(self, tenant: str, descriptors: Sequence[int], done: Callable[[None], None] = lambda _: None) -> None:
        """Close descriptors that may be the last of their memory: on a GPU that frees it, 5 ms for 8 GiB."""
        self._submit(tenant, lambda: self._close(descriptors), done)

    def look(self, done: Callable[[Figures], None]) -> None:
        """Read what the device shows. `done` gets it after the outcome of each packet that the figure includes, and
        before all others.

        It also decides whether the device is lost. The thread asks a doubted device, because the answer may take long.
        """
        if self._unreported or self._doubted:
            self._submit(OWN, self._look, done)
        else:
            done(self._look())

    def list_processes(self, done: Callable[[list[tuple[int, int]] | Denied], None]) -> None:
        """Ask which processes use the device. The thread does it, because NVML and /proc take milliseconds."""
        self._submit(OWN, self.processes, done)

    def figures(self) -> dict[str, MemoryInfo | None]:
        """Return what each location shows now."""
        return {location.value: self._figure(location) for location in Location}

    def _look(self) -> dict[str, MemoryInfo | None]:
        try:
            figures, now = self.figures(), time.monotonic()
            self._rooms = {Location(where): (now, info.free) for where, info in figures.items() if info is not None}
            if self._doubted:
                self._prove()
        except Exception as error:  # noqa: BLE001 - a GPU that fell off the bus must not end this thread
            self._doubted = True
            self._rooms = {}
            if not self.lost:
                self.lost = str(error) or type(error).__name__
                logs.warn("the device does not answer: nothing more is lent until it does", error=self.lost)
            return {location.value: None for location in Location}
        if self.lost:
            logs.log("the device answers again, and memory is lent again")
            self.lost = ""
        return figures

    def _prove(self) -> None:
        """Make an extent and let it go; raises what the driver says if the device cannot. A lack of room is an answer.

        After a reset NVML may answer while this process's CUDA is still dead, so a figure alone proves nothing.
        """
        try:
            lend = partial(self._driver.lend, self._driver.device.granularity, 1, Location.DEVICE)
            close_all(self._timed("lend", lend))
        except (DriverOutOfMemory, DriverLimit):
            pass
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR:
                raise
        self._doubted = False

    def stop(self) -> None:
        """Finish the jobs that are queued, then end the thread and release the anchor."""
        if self._thread.is_alive():
            self._stopping = True
            self._asked.put((OWN, lambda: None))  # it wakes the thread
            self._ahead.release(self._unreported + 1)  # nobody hears of results any more
            self._thread.join()
        if self._anchor is not None:
            os.close(self._anchor)
            self._anchor = None

    def _run(self) -> None:
        waiting, clock = self._waiting, time.perf_counter
        while True:
            while not self._asked.empty() or not (waiting or self._stopping):
                waiting.put(*self._asked.get())
            if not waiting:
                return
            tenant, job = waiting.take()
            self._ahead.acquire()
            began = clock()
            job()
            waiting.charge(tenant, clock() - began)

    def _submit(self, tenant: str, work: Callable[[], _T], done: Callable[[_T], None]) -> None:
        loop = self._loop
        assert loop is not None, "the executor is not started"

        def report(result: _T) -> None:
            self._unreported -= 1
            self._ahead.release()
            done(result)

        def job() -> None:
            result = work()
            loop.call_soon_threadsafe(report, result)

        self._unreported += 1
        self._asked.put((tenant, job))

    def _make(self, make: Make) -> list[int] | Denied:
        location = _LOCATIONS[make.location]
        size = make.extent_bytes * len(make.ids)
        try:
            refused = self._refuse(make, location, size)
            if refused:
                return refused
            reach("create")
            try:
                descriptors = self._lend(make.extent_bytes, len(make.ids), location, sealable=bool(make.segment))
            except DriverOutOfMemory as error:
                return self._ran_out(make, location, size, error)
            reach("created")
            return descriptors
        except Exception as error:  # noqa: BLE001 - this thread serves everybody and must outlive any driver's fault
            self._doubted = True
            return _failed("make", error, _numbers(make))

    def _close(self, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            try:
                os.close(descriptor)
            except OSError as error:
                logs.fault(error, call="close")

    def _seal(self, descriptors: Sequence[int]) -> Denied | None:
        try:
            reach("seal")
            for descriptor in descriptors:
                self._timed("seal", partial(self._driver.seal, descriptor))
            reach("sealed")
        except Exception as error:  # noqa: BLE001 - as above
            return _failed("seal", error, {})
        return None

    def processes(self) -> list[tuple[int, int]] | Denied:
        """Return which processes use the device, as (pid, bytes), or why the driver does not say."""
        try:
            return self._timed("processes", self._driver.processes)
        except Exception as error:  # noqa: BLE001 - as above
            if isinstance(error, DriverError | OSError):
                logs.warn("the driver does not say which processes use the device", error=str(error))
            return _failed("processes", error, {})

    def _refuse(self, make: Make, location: Location, size: int) -> Denied | None:
        """Return why the device has no room for `size` bytes, or None."""
        now = time.monotonic()
        read_at, room = self._rooms.get(location, (0.0, 0))
        if now - read_at < GATE_SECONDS and policy.gate(room - GATE_AMPLE, size, self._reserve):
            self._rooms[location] = (read_at, room - size)
            return None
        free = self._free(location)
        if not policy.gate(free, size, self._reserve):
            room = max(0, (free or 0) - self._reserve)
            numbers = {"device_free_bytes": free or 0, "available_bytes": room, "reserve_bytes": self._reserve}
            return Denied(Reason.DEVICE_FULL, _numbers(make) | numbers)
        if free is not None:
            self._rooms[location] = (now, free - size)
        return None

    def _ran_out(self, make: Make, location: Location, size: int, error: DriverOutOfMemory) -> Denied:
        """Return the refusal of a create that the gate had allowed, by a figure that is read now."""
        self._rooms.pop(location, None)
        numbers = {**_numbers(make), "driver_says": str(error)}
        return self._refuse(make, location, size) or Denied(Reason.DEVICE_FULL, numbers)

    def _lend(self, size: int, count: int, location: Location, *, sealable: bool = False) -> list[int]:
        start = time.perf_counter()
        try:
            return self._driver.lend(size, count, location, sealable=sealable)
        finally:
            seconds = time.perf_counter() - start
            self._extent_seconds += (seconds / count - self._extent_seconds) / 4
            self._observe("lend", seconds)

    def _figure(self, location: Location) -> MemoryInfo | None:
        return self._timed("memory", partial(self._driver.memory, location))

    def _free(self, location: Location) -> int | None:
        """Return what the gate may count on: a GPU does not report host memory, so the kernel is asked."""
        info = self._figure(location)
        if info is None and location is Location.HOST:
            return _available_host_bytes()
        return info.free if info else None

    def _timed(self, call: str, work: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self._observe(call, time.perf_counter() - start)


def _failed(call: str, error: Exception, numbers: dict[str, int | str]) -> Denied:
    """Return why a call could not be done, by what it raised. Nothing of the call is left."""
    says = numbers | {"driver_says": str(error)}
    if isinstance(error, DriverLimit) or (isinstance(error, OSError) and error.errno in NO_DESCRIPTOR):
        return Denied(Reason.DESCRIPTORS_EXHAUSTED, says)
    if isinstance(error, DriverError | OSError):
        return Denied(Reason.DRIVER_FAILED, says)
    logs.fault(error, call=call)
    return Denied(Reason.INTERNAL, numbers)


def _numbers(make: Make) -> dict[str, int | str]:
    size = make.extent_bytes * len(make.ids)
    return {"level": "device", "location": make.location, "requested_bytes": size}


def _available_host_bytes() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
