"""CUDA's checkpoint calls as they were measured on an H100 (driver 580.159), for processes that are only numbers.

A restore beside a full device fails with error 2. From then on restore answers 304, also when there is room, and unlock
401. A process that has ever imported shared memory dies of its checkpoint, which answers 304. Processes of other users
answer 304.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from membroker.guest.suspender import ProcessState
from membroker.vmm.driver import DriverError, DriverOutOfMemory


@dataclass(slots=True)
class FakeProcess:
    size: int
    state: ProcessState = "running"
    has_imported: bool = False
    is_others: bool = False
    fails: str = ""
    """The call that fails the next time."""


class FakeSuspender:
    """A device of `capacity` bytes, of which others use `used`."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self.processes: dict[int, FakeProcess] = {}
        self.calls: list[tuple[str, int]] = []

    def usage(self, pids: Collection[int]) -> Mapping[int, int]:
        found = {pid: self.processes[pid] for pid in pids if pid in self.processes}
        return {pid: one.size for pid, one in found.items() if one.state in ("running", "locked")}

    def free_bytes(self) -> int:
        return self.capacity - self.used - sum(self.usage(self.processes).values())

    def state(self, pid: int) -> ProcessState:
        return self._process("state", pid).state

    def lock(self, pid: int, seconds: float) -> None:
        assert seconds > 0
        self._move("lock", pid, "running", "locked")

    def suspend(self, pid: int) -> None:
        if self._process("suspend", pid).has_imported:
            del self.processes[pid]  # by SIGSEGV
            raise DriverError("suspend", "CUDA_ERROR_OPERATING_SYSTEM", 304)
        self._move("suspend", pid, "locked", "suspended")

    def restore(self, pid: int) -> None:
        process = self._process("restore", pid)
        if process.state == "failed":
            raise DriverError("restore", "CUDA_ERROR_OPERATING_SYSTEM", 304)
        if process.size > self.free_bytes():
            process.state = "failed"
            raise DriverOutOfMemory("restore", "CUDA_ERROR_OUT_OF_MEMORY", 2)
        self._move("restore", pid, "suspended", "locked")

    def unlock(self, pid: int) -> None:
        self._move("unlock", pid, "locked", "running")

    def close(self) -> None:
        pass

    def _process(self, call: str, pid: int) -> FakeProcess:
        process = self.processes.get(pid)
        if process is None or process.is_others:
            raise DriverError(call, "CUDA_ERROR_OPERATING_SYSTEM", 304)
        return process

    def _move(self, call: str, pid: int, before: ProcessState, after: ProcessState) -> None:
        process = self._process(call, pid)
        self.calls.append((call, pid))
        if process.fails == call:
            process.fails = ""
            raise DriverError(call, "CUDA_ERROR_NOT_READY", 600)
        if process.state != before:
            raise DriverError(call, "CUDA_ERROR_ILLEGAL_STATE", 401)
        process.state = after
