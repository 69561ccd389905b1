"""NVML's figures of one GPU: its memory, its number and the processes that compute on it.

Owns the initialisation of NVML and the translation of its errors. It must never make a CUDA call or need a context: the
broker asks ten times a second, and a context would cost 518 MiB of the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..driver import DriverError, DriverUnavailable, MemoryInfo

INSTALL_HINT = "the GPU's libraries for Python are missing: pip install 'membroker[cuda]'"


class NvmlDevice:
    """One GPU, or one MIG slice of a GPU, found by the 32 hex digits of its UUID.

    Raises `DriverUnavailable` if NVML or its Python package is missing, or if NVML does not know the device.
    """

    def __init__(self, uuid_text: str) -> None:
        self._nvml = _load()
        with _nvml_call(self._nvml, "nvmlInit", DriverUnavailable):
            self._nvml.nvmlInit()
        try:
            self.uuid, self._handle = self._find(uuid_text)
            with _nvml_call(self._nvml, "nvmlDeviceGetName"):
                self.name = str(self._nvml.nvmlDeviceGetName(self._handle))
            self.index = self._index()
            with _nvml_call(self._nvml, "nvmlSystemGetDriverVersion"):
                self.driver_version = str(self._nvml.nvmlSystemGetDriverVersion())
        except BaseException:
            self._nvml.nvmlShutdown()
            raise

    def memory(self) -> MemoryInfo:
        """Return the GPU's total and free bytes, for all processes (8.5 µs a call)."""
        with _nvml_call(self._nvml, "nvmlDeviceGetMemoryInfo"):
            info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return MemoryInfo(int(info.total), int(info.free))

    def processes(self) -> list[tuple[int, int]]:
        """Return (pid, bytes) of the processes that compute; bytes are 0 if NVML does not tell."""
        with _nvml_call(self._nvml, "nvmlDeviceGetComputeRunningProcesses"):
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return [(int(each.pid), int(each.usedGpuMemory or 0)) for each in processes]

    def close(self) -> None:
        """Shut NVML down."""
        with _nvml_call(self._nvml, "nvmlShutdown"):
            self._nvml.nvmlShutdown()

    def _find(self, uuid_text: str) -> tuple[str, Any]:
        """Return NVML's form of the UUID and its handle: CUDA does not say whether the UUID is that of a slice."""
        for prefix in ("GPU-", "MIG-"):
            try:
                return prefix + uuid_text, self._nvml.nvmlDeviceGetHandleByUUID(prefix + uuid_text)
            except self._nvml.NVMLError as error:
                last = error
        raise _translate(self._nvml, "nvmlDeviceGetHandleByUUID", last, DriverUnavailable)

    def _index(self) -> int:
        """Return NVML's number of the GPU; for a slice, that of its GPU."""
        card = self._handle
        if self.uuid.startswith("MIG-"):
            with _nvml_call(self._nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"):
                card = self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)
        with _nvml_call(self._nvml, "nvmlDeviceGetIndex"):
            return int(self._nvml.nvmlDeviceGetIndex(card))


def _load() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise DriverUnavailable("import pynvml", "MISSING", 0, INSTALL_HINT) from error
    return pynvml


@contextmanager
def _nvml_call(nvml: Any, call: str, kind: type[DriverError] = DriverError) -> Iterator[None]:
    try:
        yield
    except nvml.NVMLError as error:
        raise _translate(nvml, call, error, kind) from error


def _translate(nvml: Any, call: str, error: Any, kind: type[DriverError]) -> DriverError:
    """Return the driver's error; the name is NVML's constant, such as `NVML_ERROR_NOT_FOUND`."""
    code = int(error.value)
    names = (name for name, value in vars(nvml).items() if name.startswith("NVML_ERROR_") and value == code)
    return kind(call, next(names, "NVML_ERROR_UNKNOWN"), code, str(error))
