"""CUDA's checkpoint calls, and NVML's figures.

Owns the calls by name. `cuInit` is made, which a restore needs, and no context: that would cost 518 MiB of the GPU.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..vmm.cuda.gpu import Gpu
from ..vmm.cuda.nvml import NvmlDevice
from ..vmm.driver import DriverError, DriverUnavailable
from .suspender import ProcessState

FIRST_DRIVER = 570
"""The first version of NVIDIA's driver that does this by calls."""
_FIRST_NAMESPACE = "pid:[4026531836]"
"""The machine's own, by Linux's number."""
_STATES: Mapping[str, ProcessState] = {
    "RUNNING": "running",
    "LOCKED": "locked",
    "CHECKPOINTING": "locked",
    "CHECKPOINTED": "suspended",
    "RESTORING": "suspended",
    "FAILED": "failed",
}


def why_not(bindings: Any, driver_version: str, machine: str) -> str:
    """Return why this machine cannot suspend CUDA processes, as half a sentence; "" if nothing speaks against it."""
    major = driver_version.partition(".")[0]
    if machine not in ("x86_64", "AMD64"):
        return f"NVIDIA's driver suspends processes on x86-64 only, and this machine is {machine}"
    if not hasattr(bindings, "cuCheckpointProcessLock"):
        return "cuda-bindings is too old for it: pip install --upgrade cuda-bindings"
    if major.isdecimal() and int(major) < FIRST_DRIVER:
        return f"it needs NVIDIA's driver {FIRST_DRIVER} or later, and this is {driver_version}"
    return ""


def has_pids_of_machine(proc: Path = Path("/proc")) -> bool:
    """Say whether the pids here are those of the machine, as outside containers."""
    return os.readlink(proc / "self/ns/pid") == _FIRST_NAMESPACE


def check_namespace(listed: Collection[int], proc: Path = Path("/proc")) -> bool:
    """Say whether NVML has named a process that is one here; raise `DriverError` if it names others alone.

    In a container it may name processes by the host's pids. Then a program would seem to use nothing, and its memory
    would be lent while it has it.
    """
    if has_pids_of_machine(proc) or any((proc / str(pid)).exists() for pid in listed):
        return True
    if listed:
        detail = "NVML names processes that are not in this container: run it with the host's pids (--pid=host)"
        raise DriverError("nvmlDeviceGetComputeRunningProcesses", "NVML_ERROR_NOT_FOUND", 6, detail)
    return False


class CudaSuspender:
    """Suspends processes on the GPU of this UUID. Raises `DriverUnavailable` with the reason if that cannot be done.

    Without `needs_suspend` it tells what processes use, and need not be able to do more.
    """

    def __init__(self, uuid: str, *, needs_suspend: bool = True) -> None:
        self._gpu = Gpu(uuid)
        self._cuda = self._gpu.cuda
        self._nvml = NvmlDevice(self._gpu.uuid())
        self._knows_pids = False
        """Whether NVML's pids are those of this process's namespace."""
        reason = why_not(self._cuda, self._nvml.driver_version, platform.machine())
        if reason and needs_suspend:
            self._nvml.close()
            raise DriverUnavailable("cuCheckpointProcessLock", "CUDA_ERROR_NOT_SUPPORTED", 801, reason)

    def usage(self, pids: Collection[int]) -> Mapping[int, int]:
        """Return what NVML lists."""
        listed = list(self._nvml.processes())
        self._knows_pids = self._knows_pids or check_namespace([pid for pid, _ in listed])
        return {pid: size for pid, size in listed if pid in pids}

    def free_bytes(self) -> int | None:
        """Return NVML's figure."""
        memory = self._nvml.memory()
        return None if memory is None else memory.free

    def state(self, pid: int) -> ProcessState:
        """Return the state of a process."""
        found = self._gpu.call("cuCheckpointProcessGetState", pid)
        return _STATES[str(found.name).removeprefix("CU_PROCESS_STATE_")]

    def lock(self, pid: int, seconds: float) -> None:
        """Let its calls wait."""
        arguments = self._cuda.CUcheckpointLockArgs()
        arguments.timeoutMs = max(1, int(seconds * 1000))
        self._gpu.call("cuCheckpointProcessLock", pid, arguments)

    def suspend(self, pid: int) -> None:
        """Take its memory away."""
        self._gpu.call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int) -> None:
        """Put its memory back."""
        self._gpu.call("cuCheckpointProcessRestore", pid, None)

    def unlock(self, pid: int) -> None:
        """Let its calls go on."""
        self._gpu.call("cuCheckpointProcessUnlock", pid, None)

    def close(self) -> None:
        """Shut NVML down."""
        self._nvml.close()
