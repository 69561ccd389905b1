"""The memory calls of libc that the host driver needs, as functions that raise `OSError` with the call's errno.

Owns the ctypes prototypes and the constants. It must never decide anything: the rules are in `host.addresses`, the
figures in `host.watch`, and the translation into `DriverError` in `errno`.
"""

from __future__ import annotations

import ctypes
import os
from typing import NoReturn

PROT_NONE, PROT_READ, PROT_READ_WRITE = 0, 1, 3
IN_DELETE_SELF, IN_Q_OVERFLOW, IN_IGNORED = 0x400, 0x4000, 0x8000

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_NOTHING = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
_MADV_DONTFORK, _MADV_HUGEPAGE = 10, 14
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 0x01, 0x02
_FAILED = ctypes.c_void_p(-1).value

# A CDLL releases the GIL during each call, so a large munmap does not block other threads.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
_libc.inotify_init1.argtypes = [ctypes.c_int]
_libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]


def mmap_nothing(size: int, address: int = 0) -> int:
    """Map `size` bytes of addresses without memory; `address` 0 lets the kernel choose.

    With an `address`, it replaces what is mapped there in one step, so no other thread's mapping can slip in.
    """
    flags = _NOTHING | _MAP_FIXED if address else _NOTHING
    result = _libc.mmap(address, size, PROT_NONE, flags, -1, 0)
    return int(result) if result != _FAILED else _raise_errno()


def mmap_memory(size: int) -> int:
    """Map `size` bytes of the process's own memory, in huge pages if possible. A forked child does not inherit it."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    address = _check_mapped(_libc.mmap(None, size, PROT_READ_WRITE, flags, -1, 0))
    _libc.madvise(address, size, _MADV_HUGEPAGE)  # a kernel without huge pages refuses, which does no harm
    if _libc.madvise(address, size, _MADV_DONTFORK):
        munmap(address, size)
        _raise_errno()
    return address


def mmap_file(address: int, size: int, descriptor: int, protection: int = PROT_NONE) -> None:
    """Map the first `size` bytes of `descriptor` at exactly `address`, shared (`PROT_*`)."""
    if _libc.mmap(address, size, protection, _MAP_SHARED | _MAP_FIXED, descriptor, 0) == _FAILED:
        _raise_errno()


def mmap_again(address: int, size: int, new_address: int) -> None:
    """Map the shared mapping at `address` a second time, at exactly `new_address`, with the same access.

    This is mremap with an old size of 0 (man 2 mremap): the old addresses are never free in between.
    """
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    _check_mapped(_libc.mremap(address, 0, size, flags, new_address))


def _check_mapped(result: int | None) -> int:
    if result is None or result == _FAILED:
        _raise_errno()
    return int(result or 0)


def munmap(address: int, size: int) -> None:
    """Unmap [address, address + size)."""
    if _libc.munmap(address, size):
        _raise_errno()


def mprotect(address: int, size: int, protection: int) -> None:
    """Set the protection of [address, address + size) (`PROT_*`)."""
    if _libc.mprotect(address, size, protection):
        _raise_errno()


def punch_hole(descriptor: int, start: int, size: int) -> None:
    """Free the memory of a memfd's bytes [start, start + size). They then read as zero, and the size stays."""
    if _libc.fallocate(descriptor, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, start, size):
        _raise_errno()


def inotify_init() -> int:
    """Return a new inotify descriptor, non-blocking and CLOEXEC."""
    descriptor: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        _raise_errno()
    return descriptor


def inotify_add_watch(inotify: int, path: str, mask: int) -> int:
    """Watch the file at `path` for the events of `mask` and return the watch's number."""
    watch: int = _libc.inotify_add_watch(inotify, path.encode(), mask)
    if watch < 0:
        _raise_errno()
    return watch


def _raise_errno() -> NoReturn:
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))
