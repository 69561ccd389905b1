"""What is timed: works of two calls, one that takes memory and one that gives it back, with or without a broker.

A work does the calls and nothing beside them. It must never measure.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from membroker import VirtualMemoryPool
from membroker.session.session import Session
from membroker.v1 import broker_pb2
from membroker.v1.handoff_pb2 import Frame
from membroker.vmm import open_driver
from membroker.vmm.sizes import MIB
from membroker.wire.descriptors import close_all

from ..harness.crew import serving
from ..harness.daemon import TWIN_BYTES, connect
from ..harness.jobs import Held, Job
from ..harness.packets import connected, serve_packets
from .bare import Bare, open_bare
from .figures import IN_PROCESS

CROWD = "crowd"
_ASK = struct.Struct("QQ")
"""A size, and how many extents of it; 0 extents says that memory was released."""
_PACKET = 64
"""Extents in one packet, as of the broker's."""


class BareWork(Job):
    """What a driver does in process: `fill` makes and maps extents at addresses, which are fresh or kept."""

    def __init__(
        self, bare: Bare, size: int, fill: Callable[[int], Sequence[Any]], *, keeps_addresses: bool = False
    ) -> None:
        self._bare, self._size, self._fill = bare, size, fill
        self._kept = bare.reserve(size) if keeps_addresses else 0
        self._address = 0
        self._handles: Sequence[Any] = ()
        super().__init__(take=self._take, give=self._give)

    def _take(self) -> None:
        self._address = self._kept or self._bare.reserve(self._size)
        self._handles = self._fill(self._address)

    def _give(self) -> None:
        self._bare.unback(self._address, self._size, self._handles)
        if not self._kept:
            self._bare.unreserve(self._address, self._size)

    def close(self) -> None:
        if self._kept:
            self._bare.unreserve(self._kept, self._size)


def bare_extent(bare: Bare, size: int) -> Job:
    """Return the work of one extent: addresses, memory, mapping."""
    return BareWork(bare, size, partial(bare.back, size=size))


def bare_pages(bare: Bare, size: int, page: int, *, access_each: bool) -> Job:
    """Return the work of many extents side by side in addresses that stay reserved."""
    fill = partial(bare.back_pages, page=page, count=size // page, access_each=access_each)
    return BareWork(bare, size, fill, keeps_addresses=True)


def bare_import(bare: Bare, descriptors: Sequence[int], size: int, *, read_only: bool) -> Job:
    """Return the work of extents that exist, each of a size, at fresh addresses.

    `read_only` as an attached segment is: the host driver allows a sealed one nothing else.
    """
    fill = partial(bare.back_imported, descriptors=descriptors, size=size, read_only=read_only)
    return BareWork(bare, size * len(descriptors), fill)


class Pair(BareWork):
    """A bare handoff: one process creates extents, this one maps them; a packet there, the descriptors back, no more.

    No books, no protection, no frames: the least that borrowing can cost where another process owns the GPU, in Python.
    """

    def __init__(self, bare: Bare, path: Path, page: int, count: int = 1, *, keeps_addresses: bool = False) -> None:
        super().__init__(bare, page * count, self._receive, keeps_addresses=keeps_addresses)
        self._page, self._count, self._socket = page, count, connected(path)

    def _receive(self, address: int) -> Sequence[Any]:
        handles: list[Any] = []
        self._socket.send(_ASK.pack(self._page, self._count))
        while len(handles) < self._count:
            _, descriptors, _, _ = socket.recv_fds(self._socket, _ASK.size, _PACKET)
            at = address + len(handles) * self._page
            handles += self._bare.back_imported(at, descriptors, self._page, read_only=False)
            close_all(descriptors)
        return handles

    def _give(self) -> None:
        super()._give()
        self._socket.send(_ASK.pack(self._page, 0))

    def close(self) -> None:
        super().close()
        self._socket.close()


@contextmanager
def lender(driver: str, *, ahead: bool = False) -> Iterator[Path]:
    """Run a process that lends to pairs and does nothing else. `ahead` keeps one ready of the size asked for last."""
    with tempfile.TemporaryDirectory(prefix="membroker-bench-pair-") as directory:
        path = Path(directory, "lender")
        with serving(_lend, path, driver, ahead):
            yield path


def _lend(path: Path, kind: str, ahead: bool, ready: Callable[[], None]) -> None:
    driver = open_driver("host", total_bytes=TWIN_BYTES) if kind == "host" else open_driver(kind)
    anchor = driver.lend(2 * MIB, 1)  # as a broker keeps one: without, an export takes a millisecond
    made: list[int] = []

    def answer(peer: socket.socket, asked: bytes) -> None:
        """Send so many extents; of what is ready there is one, of the right size, or none."""
        size, count = _ASK.unpack(asked)
        left = count
        while left:
            descriptors = [made.pop()] if made else driver.lend(size, min(left, _PACKET))
            socket.send_fds(peer, [b"lent"], descriptors)
            close_all(descriptors)
            left -= len(descriptors)
        if count and ahead:
            made.extend(driver.lend(size, 1))

    try:
        serve_packets(path, answer, ready)
    finally:
        close_all(anchor)


class PoolGrowth(Job):
    """Growth by one page that was prepared. A released page is spare again."""

    def __init__(self, pool: VirtualMemoryPool) -> None:
        self._pool, self._page, self._base = pool, pool.page_size, pool.base_address
        self._offset = 0
        super().__init__(take=self._take, give=self._give)

    def _take(self) -> None:
        self._offset = self._pool.grow(self._page) - self._base

    def _give(self) -> None:
        self._pool.free(self._offset, self._page)


def pool_pages(pool: VirtualMemoryPool, size: int) -> Job:
    """Return the work of many pages; with spare pages, from what the pool holds."""
    return Job(take=partial(pool.allocate, 0, size), give=partial(pool.free, 0, size))


def pool_offload(pool: VirtualMemoryPool, size: int, *, keep_pinned: bool) -> Job:
    """Return the work of a pool that sleeps and wakes: all is also unmapped and released, borrowed and mapped."""
    pool.allocate(0, size)
    return Job(take=pool.offload, give=partial(pool.restore, keep_pinned=keep_pinned))


class BareCopy(Job):
    """A copy of all bytes to pinned memory that is there, and back, in one piece each, by the driver alone.

    `pin_each` pins that memory again for each copy to it, and frees it after the copy back.
    """

    def __init__(self, bare: Bare, size: int, *, pin_each: bool) -> None:
        self._bare, self._size, self._pin_each = bare, size, pin_each
        self._address = bare.reserve(size)
        self._handles = bare.back(self._address, size)
        self._pinned = 0 if pin_each else bare.driver.pin(size)
        super().__init__(take=self._take, give=self._give)

    def _take(self) -> None:
        if self._pin_each:
            self._pinned = self._bare.driver.pin(self._size)
        self._bare.copy(self._pinned, self._address, self._size)

    def _give(self) -> None:
        self._bare.copy(self._address, self._pinned, self._size)
        if self._pin_each:
            self._unpin()

    def _unpin(self) -> None:
        address, self._pinned = self._pinned, 0
        self._bare.driver.unpin(address)

    def close(self) -> None:
        if self._pinned:
            self._unpin()
        self._bare.unback(self._address, self._size, self._handles)
        self._bare.unreserve(self._address, self._size)


class Keeper:
    """Keeps a copy of each descriptor that a call delivers (a `Placement`)."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        """Copy the next descriptors."""
        self.descriptors += map(os.dup, descriptors)

    def undo(self) -> None:
        """Close all."""
        close_all(self.descriptors)
        self.descriptors = []


def segment_descriptors(endpoint: Path, resource: str) -> list[int]:
    """Return copies of a segment's descriptors, which the broker exported."""
    session, keeper = Session(endpoint, client="benchmarks", timeout=60), Keeper()
    try:
        session.reconnecting.call(Frame(attach_segment=broker_pb2.AttachSegmentRequest(name=resource)), keeper)
    except BaseException:
        keeper.undo()
        raise
    finally:
        session.close()
    return keeper.descriptors


class CrowdWorker(Job):
    """One of many processes: it has one context on the GPU, and does any of the works, told which by the row's name.

    `routes` have the endpoint and the transport of each way to borrow, `lenders` where processes lend that do nothing
    else.
    """

    warm_up = 20

    def __init__(
        self, driver: str, size: int, routes: Mapping[str, tuple[Path, str]], lenders: Mapping[str, Path]
    ) -> None:
        super().__init__()
        self._ending = ExitStack()
        bare = open_bare(driver)
        self._ending.callback(bare.close)
        self._works = {IN_PROCESS: bare_extent(bare, size)}
        for by, path in lenders.items():
            self._works[by] = Pair(bare, path, size)
            self._ending.callback(self._works[by].close)
        for by, (endpoint, transport) in routes.items():
            model = self._ending.enter_context(connect(endpoint, transport)).model(CROWD)
            self._works[by] = Held(partial(model.allocate, size))
        for work in self._works.values():
            work.warm_up = self.warm_up

    def named(self, name: str) -> Job:
        return self._works[name]

    def warm(self) -> None:
        for work in self._works.values():
            work.warm()

    def close(self) -> None:
        self._ending.close()
