"""NVML's figures of one GPU: its memory, its number and the processes that compute on it.

Owns the initialisation of NVML and the translation of its errors. It must never make a CUDA call or need a context: the
broker asks ten times a second, and a context would cost 518 MiB of the GPU.
"""

from __future__ import annotations

from typing import Any

from ..driver import DriverError, DriverUnavailable, MemoryInfo

INSTALL_HINT = "the GPU's libraries for Python are missing: pip install 'membroker[cuda]'"


class NvmlDevice:
    """One GPU, or one MIG slice of a GPU, found by the 32 hex digits of its UUID.

    Raises `DriverUnavailable` if NVML or its Python package is missing, or if NVML does not know the device.
    """

    def __init__(self, uuid_text: str) -> None:
        self._nvml = _load()
        self._call("nvmlInit", kind=DriverUnavailable)
        try:
            self.uuid, self._handle = self._find(uuid_text)
            self.name = str(self._call("nvmlDeviceGetName", self._handle))
            self.index = self._index()
            self.driver_version = str(self._call("nvmlSystemGetDriverVersion"))
        except BaseException:
            self._nvml.nvmlShutdown()
            raise

    def memory(self) -> MemoryInfo:
        """Return the GPU's total and free bytes, for all processes (8.5 µs a call)."""
        info = self._call("nvmlDeviceGetMemoryInfo", self._handle)
        return MemoryInfo(int(info.total), int(info.free))

    def processes(self) -> list[tuple[int, int]]:
        """Return (pid, bytes) of the processes that compute; bytes are 0 if NVML does not tell."""
        processes = self._call("nvmlDeviceGetComputeRunningProcesses", self._handle)
        return [(int(each.pid), int(each.usedGpuMemory or 0)) for each in processes]

    def close(self) -> None:
        """Shut NVML down."""
        self._call("nvmlShutdown")

    def _find(self, uuid_text: str) -> tuple[str, Any]:
        """Return NVML's form of the UUID and its handle: CUDA does not say whether the UUID is that of a slice."""
        for prefix in ("GPU-", "MIG-"):
            try:
                text = prefix + uuid_text
                return text, self._call("nvmlDeviceGetHandleByUUID", text, kind=DriverUnavailable)
            except DriverUnavailable as error:
                last = error
        raise last

    def _index(self) -> int:
        """Return NVML's number of the GPU; for a slice, that of its GPU."""
        card = self._handle
        if self.uuid.startswith("MIG-"):
            card = self._call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", card)
        return int(self._call("nvmlDeviceGetIndex", card))

    def _call(self, name: str, *arguments: Any, kind: type[DriverError] = DriverError) -> Any:
        """Call the NVML function `name`. An error gets the name of NVML's constant, such as `NVML_ERROR_NOT_FOUND`."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError as error:
            code, constants = int(error.value), vars(self._nvml).items()
            names = (name for name, value in constants if name.startswith("NVML_ERROR_") and value == code)
            raise kind(name, next(names, "NVML_ERROR_UNKNOWN"), code, str(error)) from error


def _load() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise DriverUnavailable("import pynvml", "MISSING", 0, INSTALL_HINT) from error
    return pynvml
