"""The host driver's table of errors: from a system call's errno to the `DriverError` that says what to do.

Owns which errno means out of memory, which means that a limit was reached, and the name of that limit. It must never be
used for CUDA, whose errors are named in `cuda`.
"""

from __future__ import annotations

import errno

from .driver import DriverError, DriverLimit, DriverOutOfMemory
from .mappings import MARGIN, limit_hint, mapping_count, mapping_limit

_LIMITS = {
    ("memfd_create", errno.EMFILE): "raise this process's RLIMIT_NOFILE (ulimit -n)",
    ("memfd_create", errno.ENFILE): "raise fs.file-max",
    ("open", errno.EMFILE): "raise this process's RLIMIT_NOFILE (ulimit -n)",
    ("dup", errno.EMFILE): "raise this process's RLIMIT_NOFILE (ulimit -n)",
    ("inotify_init1", errno.EMFILE): "raise fs.inotify.max_user_instances, or RLIMIT_NOFILE (ulimit -n)",
    ("inotify_init1", errno.ENFILE): "raise fs.file-max",
    ("inotify_add_watch", errno.ENOSPC): "raise fs.inotify.max_user_watches: each extent needs one watch",
}


def invalid(call: str, why: str) -> DriverError:
    """Return the error for a call that breaks a rule; `EINVAL` is CUDA's `CUDA_ERROR_INVALID_VALUE`."""
    return DriverError(call, "EINVAL", errno.EINVAL, why)


class driver_call:
    """Turn an `OSError` of the block into the `DriverError` of the system call named `call`."""

    def __init__(self, call: str) -> None:
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise translated(self._call, error) from error


def translated(call: str, error: OSError) -> DriverError:
    """Return the `DriverError` of an `OSError` in the system call named `call`."""
    code = error.errno or 0
    name = errno.errorcode.get(code, "UNKNOWN")
    hint = _LIMITS.get((call, code)) or (_map_count_hint() if code == errno.ENOMEM else "")
    if hint:
        return DriverLimit(call, name, code, hint)
    kind = DriverOutOfMemory if code == errno.ENOMEM else DriverError
    return kind(call, name, code, error.strerror or "")


def _map_count_hint() -> str:
    """Return the hint if the process has too many mappings, else "": the kernel returns ENOMEM for both."""
    return limit_hint() if mapping_count() >= mapping_limit() - MARGIN else ""
