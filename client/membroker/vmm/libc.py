"""The memory calls of libc that the host driver needs, as functions that raise `OSError` with the call's errno.

Owns the ctypes prototypes and the constants. It must never decide anything: the rules are in `host.addresses`, the
figures in `host.watch`, and the translation into `DriverError` in `errno`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PROT_NONE, PROT_READ, PROT_READ_WRITE = 0, 1, 3
IN_DELETE_SELF, IN_Q_OVERFLOW, IN_IGNORED = 0x400, 0x4000, 0x8000

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_NOTHING = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
_MADV_DONTFORK, _MADV_HUGEPAGE = 10, 14
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 0x01, 0x02

# A CDLL releases the GIL during each call, so a large munmap does not block other threads.
_libc = ctypes.CDLL(None, use_errno=True)
# As a signed number, MAP_FAILED is -1, and an address of a process is positive.
_address, _size, _int, _offset = ctypes.c_ssize_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_longlong


def _prototype(name: str, result: type, *arguments: type) -> Callable[..., int]:
    """Return libc's function `name`. It raises `OSError` instead of returning -1."""
    function: Any = _libc[name]
    function.restype, function.argtypes, function.errcheck = result, arguments, _checked
    made: Callable[..., int] = function
    return made


def _checked(result: int, _function: object, _arguments: object) -> int:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


_mmap = _prototype("mmap", _address, _address, _size, _int, _int, _int, _offset)
_mremap = _prototype("mremap", _address, _address, _size, _size, _int, _address)
_munmap = _prototype("munmap", _int, _address, _size)
_mprotect = _prototype("mprotect", _int, _address, _size, _int)
_fallocate = _prototype("fallocate", _int, _int, _int, _offset, _offset)
_inotify_init1 = _prototype("inotify_init1", _int, _int)
_inotify_add_watch = _prototype("inotify_add_watch", _int, _int, ctypes.c_char_p, ctypes.c_uint32)
_madvise = _prototype("madvise", _int, _address, _size, _int)


def mmap_nothing(size: int, address: int = 0) -> int:
    """Map `size` bytes of addresses without memory; `address` 0 lets the kernel choose.

    With an `address`, it replaces what is mapped there in one step, so no other thread's mapping can slip in.
    """
    return _mmap(address, size, PROT_NONE, _NOTHING | _MAP_FIXED if address else _NOTHING, -1, 0)


def mmap_memory(size: int) -> int:
    """Map `size` bytes of the process's own memory, in huge pages if possible. A forked child does not inherit it."""
    address = _mmap(0, size, PROT_READ_WRITE, _NOTHING, -1, 0)
    with suppress(OSError):  # a kernel without huge pages refuses, which does no harm
        _madvise(address, size, _MADV_HUGEPAGE)
    try:
        _madvise(address, size, _MADV_DONTFORK)
    except OSError:
        munmap(address, size)
        raise
    return address


def mmap_file(address: int, size: int, descriptor: int, protection: int = PROT_NONE) -> None:
    """Map the first `size` bytes of `descriptor` at exactly `address`, shared (`PROT_*`); at 0 the kernel chooses."""
    _mmap(address, size, protection, _MAP_SHARED | _MAP_FIXED if address else _MAP_SHARED, descriptor, 0)


def mmap_again(address: int, size: int, new_address: int) -> None:
    """Map the shared mapping at `address` a second time, at exactly `new_address`, with the same access.

    This is mremap with an old size of 0 (man 2 mremap): the old addresses are never free in between.
    """
    _mremap(address, 0, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, new_address)


def munmap(address: int, size: int) -> None:
    """Unmap [address, address + size)."""
    _munmap(address, size)


def mprotect(address: int, size: int, protection: int) -> None:
    """Set the protection of [address, address + size) (`PROT_*`)."""
    _mprotect(address, size, protection)


def punch_hole(descriptor: int, start: int, size: int) -> None:
    """Free the memory of a memfd's bytes [start, start + size). They then read as zero, and the size stays."""
    _fallocate(descriptor, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, start, size)


def inotify_init() -> int:
    """Return a new inotify descriptor, non-blocking and CLOEXEC."""
    return _inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)


def inotify_add_watch(inotify: int, path: str, mask: int) -> int:
    """Watch the file at `path` for the events of `mask` and return the watch's number."""
    return _inotify_add_watch(inotify, path.encode(), mask)
