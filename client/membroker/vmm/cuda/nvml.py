"""NVML's figures of one GPU: its memory, its number and the processes that compute on it.

Owns the initialisation of NVML and the translation of its errors. It must never make a CUDA call or need a context: the
broker asks ten times a second, and a context would cost 518 MiB of the GPU.
"""

from __future__ import annotations

from typing import Any

from ..driver import DriverError, DriverUnavailable, MemoryInfo

INSTALL_HINT = (
    "the GPU's libraries for Python are missing: pip install 'membroker[cuda]', or, where an engine pins its own, "
    "cuda-bindings and nvidia-ml-py alone"
)
_NO_LIBRARY_HINT = (
    "libnvidia-ml.so.1 is missing: it belongs to the NVIDIA driver, and a container gets it if "
    "NVIDIA_DRIVER_CAPABILITIES has both: compute,utility"
)
_NOT_SUPPORTED, _LIBRARY_NOT_FOUND = 3, 12


class NvmlDevice:
    """One GPU, or one MIG slice of a GPU, found by the 32 hex digits of its UUID.

    Raises `DriverUnavailable` if NVML or its Python package is missing, or if NVML does not know the device.
    """

    uuid: str

    def __init__(self, uuid_text: str) -> None:
        self._nvml = _load()
        self._call("nvmlInit", kind=DriverUnavailable)
        try:
            self.uuid, self._handle = self._find(uuid_text)
            self.name: str = str(self._call_if_supported("nvmlDeviceGetName", self._handle) or "NVIDIA GPU")
            self.index: int | None = self._index()
            self.driver_version: str = str(self._call_if_supported("nvmlSystemGetDriverVersion") or "")
        except BaseException:
            self._nvml.nvmlShutdown()
            raise

    def memory(self) -> MemoryInfo | None:
        """Return the GPU's total and free bytes, for all processes (8.5 µs a call).

        None for a GPU that shares the machine's memory, as GB10 and Jetson do: NVML has no figure of it.
        """
        info = self._call_if_supported("nvmlDeviceGetMemoryInfo", self._handle)
        return None if info is None else MemoryInfo(int(info.total), int(info.free))

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

    def _index(self) -> int | None:
        """Return NVML's number of the GPU; for a slice, that of its GPU. None if NVML has no numbers here."""
        card = self._handle
        if self.uuid.startswith("MIG-"):
            card = self._call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", card)
        index = self._call_if_supported("nvmlDeviceGetIndex", card)
        return None if index is None else int(index)

    def _call_if_supported(self, name: str, *arguments: Any) -> Any:
        """Call an NVML function without which a GPU can be used; None if it is not supported for this GPU."""
        try:
            return self._call(name, *arguments)
        except DriverError as error:
            if error.code == _NOT_SUPPORTED:
                return None
            raise

    def _call(self, name: str, *arguments: Any, kind: type[DriverError] = DriverError) -> Any:
        """Call the NVML function `name`. An error gets the name of NVML's constant, such as `NVML_ERROR_NOT_FOUND`."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError as error:
            code, constants = int(error.value), vars(self._nvml).items()
            names = (name for name, value in constants if name.startswith("NVML_ERROR_") and value == code)
            hint = _NO_LIBRARY_HINT if code == _LIBRARY_NOT_FOUND else str(error)
            raise kind(name, next(names, "NVML_ERROR_UNKNOWN"), code, hint) from error


def _load() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise DriverUnavailable("import pynvml", "MISSING", 0, INSTALL_HINT) from error
    return pynvml
