"""Helpers of the checks: extents and mappings for the length of a block, and other processes.

Owns the steps that several checks share. It must never decide what a driver has to do: that is a check's work.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

from ..vmm.driver import AccessFlags, Driver, DriverError, Handle, Location
from ..vmm.sizes import MIB

DEADLINE_SECONDS = 20.0
"""How long a check waits for another process, or for the device to show a death (70 ms were measured)."""

TRUTH_BYTES = 256 * MIB
"""The size of extents that a check looks for in the device's figure: far more than a driver needs for itself."""

PATTERN = b"written by a process that is dead"


MakeDriver = Callable[..., Driver]
"""Makes a driver in this process, or in a child; with `survivors=` if its drivers have any."""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Ask `condition` every few milliseconds until it holds; raise `AssertionError` with `what` if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        expect(time.monotonic() < deadline, f"after {seconds:g} s still not true: {what}")
        time.sleep(0.005)


def expect(condition: bool, message: str) -> None:
    # No assert statement: the suite must not pass because Python runs with -O.
    if not condition:
        raise AssertionError(message)


def refused(what: str, call: Callable[..., object], *arguments: object) -> DriverError:
    try:
        call(*arguments)
    except DriverError as error:
        return error
    raise AssertionError(f"not refused: {what}")


def used_bytes(driver: Driver) -> int:
    memory = driver.memory(Location.DEVICE)
    return memory.used if memory is not None else 0


def opened(make_driver: MakeDriver) -> closing[Driver]:
    return closing(make_driver())


@contextmanager
def both_opened(make_first: MakeDriver, make_second: MakeDriver) -> Iterator[tuple[Driver, Driver]]:
    with opened(make_first) as first, opened(make_second) as second:
        yield first, second


@contextmanager
def extent(driver: Driver, size: int, location: Location = Location.DEVICE) -> Iterator[Handle]:
    handle = driver.create(size, location)
    try:
        yield handle
    finally:
        driver.release(handle)


@contextmanager
def reserved(driver: Driver, size: int, alignment: int = 0) -> Iterator[int]:
    address = driver.reserve(size, alignment)
    try:
        yield address
    finally:
        driver.unreserve(address, size)


@contextmanager
def exported(driver: Driver, handle: Handle) -> Iterator[int]:
    descriptor = driver.export(handle)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def lent(driver: Driver, size: int, count: int, location: Location = Location.DEVICE) -> Iterator[list[int]]:
    descriptors = driver.lend(size, count, location)
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextmanager
def mapped_handle(driver: Driver, handle: Handle, *, keep: bool = False) -> Iterator[int]:
    """Map `handle` at an address of its own; release it at the end, unless it is to be kept."""
    with ExitStack() as undo:
        if not keep:
            undo.callback(driver.release, handle)
        address = undo.enter_context(reserved(driver, handle.size))
        map_extent(driver, address, handle)
        undo.callback(driver.unmap, address, handle.size)
        yield address


@contextmanager
def mapped(driver: Driver, size: int, location: Location = Location.DEVICE) -> Iterator[tuple[int, Handle]]:
    handle = driver.create(size, location)
    with mapped_handle(driver, handle) as address:
        yield address, handle


def map_extent(driver: Driver, address: int, handle: Handle) -> None:
    driver.map(address, handle)
    driver.set_access(address, handle.size, AccessFlags.READ_WRITE)


def import_and_map(driver: Driver, descriptor: int, size: int, address: int) -> None:
    handle = driver.import_extent(descriptor, size)
    try:
        driver.map(address, handle)
        driver.unmap(address, size)
    finally:
        driver.release(handle)


def closed_descriptor() -> int:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def work(driver: Driver, mark: bytes) -> None:
    size = driver.device.granularity
    for _ in range(10):
        with mapped(driver, size) as (address, _handle):
            driver.write(address, mark * 4096)
            expect(driver.read(address, 4096) == mark * 4096, "a thread sees another thread's bytes")


def release_at(driver: Driver, handle: Handle, start: threading.Barrier) -> bool:
    start.wait(DEADLINE_SECONDS)
    try:
        driver.release(handle)
    except DriverError:
        return False
    return True


def follow_one_extent(driver: Driver, keep: Callable[..., None], make_driver: MakeDriver) -> None:
    """Pass an extent to a child, drop it here, and watch the figure until after the child's death.

    The slack of half an extent is for what a driver allots for itself. The child's context, which is larger,
    is there before the figure is first read, and gone before it is last read.
    """
    slack = TRUTH_BYTES // 2
    driver.release(driver.create(TRUTH_BYTES))
    alone = used_bytes(driver)
    with child_process(keep, make_driver) as child:
        child.wait_for_reply()
        before = used_bytes(driver)
        handle = driver.create(TRUTH_BYTES)
        wait_until(lambda: used_bytes(driver) >= before + slack, "a birth shows in the device's figure")
        with exported(driver, handle) as descriptor:
            child.send_descriptor(descriptor)
        child.wait_for_reply()
        driver.release(handle)
        expect(used_bytes(driver) >= before + slack, "the figure fell while another process held the extent")
    wait_until(lambda: used_bytes(driver) <= alone + slack, "the last holder's death shows in the device's figure")


# Other processes


class ChildProcess:
    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process, self._channel = process, channel
        self.pid: int = process.pid

    def receive_descriptor(self) -> int:
        data, descriptors, _flags, _peer = socket.recv_fds(self._channel, 1, 1)
        expect(bool(data) and len(descriptors) == 1, "the other process sent no descriptor")
        return descriptors[0]

    def receive_survivors(self) -> tuple[int, dict[str, int]]:
        """Return the extent and the survivors that `create_and_hand_over` sent."""
        data, descriptors, _flags, _peer = socket.recv_fds(self._channel, 1024, 16)
        expect(bool(data) and len(data.split()) == len(descriptors), "the other process did not send all")
        kept = dict(zip(data.decode("ascii").split(), descriptors, strict=True))
        return kept.pop("extent"), kept

    def send_descriptor(self, descriptor: int) -> None:
        socket.send_fds(self._channel, [b"d"], [descriptor])

    def wait_for_reply(self) -> None:
        expect(self._channel.recv(1) == b"r", "the other process ended before it replied")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(DEADLINE_SECONDS)


@contextmanager
def child_process(role: Callable[..., None], make_driver: MakeDriver) -> Iterator[ChildProcess]:
    """Run `role(channel, make_driver)` in a new interpreter, never a fork: CUDA does not survive one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argument = base64.b64encode(pickle.dumps((role, make_driver))).decode("ascii")
    command = [sys.executable, "-c", "from membroker.testing.harness import run_child; run_child()"]
    with ours:
        ours.settimeout(3 * DEADLINE_SECONDS)
        with theirs:
            arguments = [*command, str(theirs.fileno()), argument]
            process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
        child = ChildProcess(process, ours)
        try:
            yield child
        finally:
            child.kill()


def run_child() -> None:
    """Play the role that the arguments name: the entry of the processes that checks start."""
    descriptor, argument = sys.argv[1:]
    role, make_driver = pickle.loads(base64.b64decode(argument))
    with socket.socket(fileno=int(descriptor)) as channel:
        role(channel, make_driver)
        channel.recv(1)


def create_and_send(channel: socket.socket, make_driver: MakeDriver) -> None:
    driver = make_driver()
    handle = driver.create(driver.device.granularity)
    with mapped_handle(driver, handle, keep=True) as address:
        driver.write(address, PATTERN)
        with exported(driver, handle) as descriptor:
            socket.send_fds(channel, [b"d"], [descriptor])
        channel.recv(1)


def create_and_hand_over(channel: socket.socket, make_driver: MakeDriver) -> None:
    """Play a driver that is killed: one of its extents is the receiver's, another dies with it."""
    driver = make_driver()
    kept = driver.survivors()
    handle = driver.create(TRUTH_BYTES)
    driver.create(driver.device.granularity)
    with exported(driver, handle) as descriptor:
        driver.release(handle)
        socket.send_fds(channel, [" ".join(["extent", *kept]).encode("ascii")], [descriptor, *kept.values()])
    channel.recv(1)


def keep_descriptor(channel: socket.socket, _make_driver: MakeDriver) -> None:
    channel.send(b"r")
    _data, _descriptors, _flags, _peer = socket.recv_fds(channel, 1, 1)
    channel.send(b"r")


def keep_mapping(channel: socket.socket, make_driver: MakeDriver) -> None:
    driver = make_driver()
    channel.send(b"r")
    _data, descriptors, _flags, _peer = socket.recv_fds(channel, 1, 1)
    handle = driver.import_extent(descriptors[0], TRUTH_BYTES)
    map_extent(driver, driver.reserve(TRUTH_BYTES), handle)
    driver.release(handle)
    os.close(descriptors[0])
    channel.send(b"r")
