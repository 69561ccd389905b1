"""Finalizers and signal handlers that release memory while they interrupt a call of the library."""

from __future__ import annotations

import subprocess
import sys

from tests.support.daemons import DEADLINE_SECONDS

SCRIPT = """
import gc, time
from membroker.memory.buffer import Buffer
from membroker.memory.local_source import LocalSource
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm import libc

source, other = LocalSource("host"), LocalSource("host")
pool = VirtualMemoryPool(source, "64MiB", "2MiB")
mmap = libc._mmap


class Block:
    def __init__(self):
        self.address, self.buffer = pool.allocate_anywhere("2MiB"), Buffer(source, "2MiB")
        self.me = self

    def __del__(self):
        pool.free(self.address)
        self.buffer.close()
        other.close()
        print("deleted")


def collect_and_map(*arguments):
    libc._mmap = mmap
    gc.collect()
    return mmap(*arguments)


Block()
gc.collect()
print(source.physical_usage_bytes, other._ended)

other = LocalSource("host")
Block()
libc._mmap = collect_and_map
last = pool.allocate_anywhere("2MiB")  # holds the lock of the addresses while it maps
end = time.monotonic() + 120
while not (other._ended and source.physical_usage_bytes == 2 << 20) and time.monotonic() < end:
    time.sleep(0.01)
print(source.physical_usage_bytes, other._ended)
"""


def test_the_collector_interrupts_a_call_that_holds_a_lock() -> None:
    """Blocks of a cache that refer to each other free their pages when they are collected, at any point of a program.

    In the program's own code that happens at once. In a call of the library, another thread does it.
    """
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["deleted", "0 True", "deleted", "2097152 True"]


HANDLER = """
import os, signal, time
from membroker.memory.local_source import LocalSource
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm import libc

source = LocalSource("host")
pool, idle = VirtualMemoryPool(source, "64MiB", "2MiB"), VirtualMemoryPool(source, "64MiB", "2MiB")
idle.allocate(0, 1)
mmap = libc._mmap


def be_told(*arguments):
    libc._mmap = mmap
    os.kill(os.getpid(), signal.SIGTERM)
    return mmap(*arguments)


signal.signal(signal.SIGTERM, lambda *_: source.close())
libc._mmap = be_told
try:
    pool.allocate_anywhere("2MiB")  # holds the lock of the addresses while it maps
except Exception as error:
    print(error)
end = time.monotonic() + 120
while not source._ended and time.monotonic() < end:
    time.sleep(0.01)
print(source.physical_usage_bytes, source._ended)
"""


def test_a_signal_handler_interrupts_a_call_that_holds_a_lock() -> None:
    """A program closes all it has on SIGTERM, in the handler: the lock is its own thread's, which waits there."""
    ended = subprocess.run([sys.executable, "-c", HANDLER], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == "0 True"
