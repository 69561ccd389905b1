"""A stand-in for GPU memory that can be suspended, on machines without a GPU: a memfd that signals take and return.

Owns both sides: `StandInMemory` is what a program holds, and `StandInSuspender` finds and moves it from outside. A
program with it behaves as a CUDA program does: while it sleeps, what uses the memory waits, and all else goes on.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..vmm.driver import DriverError
from .suspender import ProcessState

NAME = "membroker-stand-in"
TAKE, GIVE = signal.SIGUSR1, signal.SIGUSR2
SECONDS = 60.0
"""How long a program may take to answer a signal."""
LOOK_SECONDS = 0.002


class StandInMemory:
    """Memory that can be suspended. Any thread may use it.

    It must be made before the first other thread, since a thread of its own gets the signals.
    """

    def __init__(self, size: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {TAKE, GIVE})
        self._file = os.memfd_create(NAME, os.MFD_CLOEXEC)
        self._image = bytes(size)
        self._map: mmap.mmap | None = None
        self._changed = threading.Condition()
        self._waiting = 0
        """How many calls wait for it: those have it once before it is taken again, as CUDA's lock waits for calls."""
        self._give()
        threading.Thread(target=self._listen, name="stand-in", daemon=True).start()

    def read(self) -> bytes:
        """Return all of it; wait while it is suspended."""
        with self._awake() as memory:
            return memory[:]

    def write(self, offset: int, data: bytes) -> None:
        """Write some of it; wait while it is suspended."""
        with self._awake() as memory:
            memory[offset : offset + len(data)] = data

    @contextmanager
    def _awake(self) -> Iterator[mmap.mmap]:
        with self._changed:
            if self._map is None:
                self._waiting += 1
                try:
                    while self._map is None:
                        self._changed.wait()
                finally:
                    self._waiting -= 1
                    self._changed.notify_all()
            yield self._map

    def _listen(self) -> None:
        while True:
            (self._take if signal.sigwait({TAKE, GIVE}) == TAKE else self._give)()

    def _take(self) -> None:
        with self._changed:
            while self._map is not None and self._waiting:
                self._changed.wait()
            if self._map is not None:
                self._image = self._map[:]
                self._map.close()
                self._map = None
                os.ftruncate(self._file, 0)

    def _give(self) -> None:
        with self._changed:
            if self._map is None:
                os.ftruncate(self._file, len(self._image))
                self._map = mmap.mmap(self._file, len(self._image))
                self._map[:] = self._image
                self._changed.notify_all()


class StandInSuspender:
    """Suspends programs that hold a `StandInMemory`. It knows no device, so it never says what is free."""

    def __init__(self) -> None:
        self._locked: set[int] = set()

    def usage(self, pids: Collection[int]) -> Mapping[int, int]:
        """Return the sizes of what the processes hold; those that hold nothing now have an entry of 0."""
        return {pid: size for pid in pids if (size := _held(pid)) is not None}

    def free_bytes(self) -> int | None:
        """Return None."""
        return None

    def state(self, pid: int) -> ProcessState:
        """Return the state of a process."""
        if _held(pid) == 0:
            return "suspended"
        return "locked" if pid in self._locked else "running"

    def lock(self, pid: int, seconds: float) -> None:
        """Check that the process is one of this user and runs. One that is stopped would hear the rest too late."""
        del seconds
        _check("lock", " (stopped)" not in _status(pid))
        _check("lock", self.state(pid) == "running" and _held(pid) is not None)
        _signal("lock", pid, 0)
        self._locked.add(pid)

    def suspend(self, pid: int) -> None:
        """Tell the process to take its memory away, and wait until it has."""
        _check("suspend", pid in self._locked)
        self._move("suspend", pid, TAKE)

    def restore(self, pid: int) -> None:
        """Tell the process to have its memory back, and wait until it has."""
        _check("restore", self.state(pid) == "suspended")
        self._move("restore", pid, GIVE)

    def unlock(self, pid: int) -> None:
        """Let it run."""
        _check("unlock", self.state(pid) == "locked")
        self._locked.discard(pid)

    def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def _move(self, call: str, pid: int, number: signal.Signals) -> None:
        end = time.monotonic() + SECONDS
        _signal(call, pid, number)
        while (_held(pid) == 0) != (number == TAKE):
            if _held(pid) is None or time.monotonic() > end:
                raise DriverError(call, "CUDA_ERROR_UNKNOWN", 999, f"process {pid} has not answered")
            time.sleep(LOOK_SECONDS)


def _held(pid: int) -> int | None:
    """Return the bytes of a process's stand-ins, or None if it has none, or is gone."""
    sizes: dict[int, int] = {}
    with suppress(OSError):  # it is gone, or another user's
        for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
            with suppress(FileNotFoundError):  # it has just been closed, as that of a mapping when its memory is taken
                if os.readlink(entry).startswith(f"/memfd:{NAME}"):
                    status = entry.stat()  # a mapping has a descriptor of its own
                    sizes[status.st_ino] = status.st_size
    return sum(sizes.values()) if sizes else None


def _status(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text()
    return ""


def _check(call: str, is_allowed: bool) -> None:
    if not is_allowed:
        raise DriverError(call, "CUDA_ERROR_ILLEGAL_STATE", 401)


def _signal(call: str, pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError as error:
        raise DriverError(call, "CUDA_ERROR_OPERATING_SYSTEM", 304, str(error)) from error
