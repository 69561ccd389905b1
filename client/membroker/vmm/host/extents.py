"""An extent of the host driver: a memfd of a fixed size. How one is made, sealed and recognised, here and in /proc.

It must never map an extent, nor know which driver made it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Container

from ..driver import Location
from ..errno import driver_call, invalid, translated

EXTENT_NAME = "membroker-extent"
"""Every extent's memfd of the device has this name: /proc/PID/maps shows `/memfd:membroker-extent`."""
_NAMES = {Location.DEVICE: EXTENT_NAME, Location.HOST: f"{EXTENT_NAME}-host"}

_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# F_SEAL_SEAL too: otherwise any process with the descriptor could seal the memory against its owner's writes. A
# sealable extent gets it with its last seal. The number of F_SEAL_FUTURE_WRITE is from uapi/linux/fcntl.h; Python 3.11
# lacks it.
_PRIVATE_SEALS = _FIXED_SIZE | fcntl.F_SEAL_SEAL
_FUTURE_WRITE = 0x0010
_LAST_SEALS = _FUTURE_WRITE | fcntl.F_SEAL_SEAL


def make(made: list[int], size: int, location: Location, *, sealable: bool) -> None:
    """Append the descriptor of a new extent to `made`. The caller closes what is in it, also after an error."""
    call = "memfd_create"
    try:
        # In one step of the interpreter, as in `wire.descriptors.receive`: an interrupt loses no descriptor.
        made.extend(map(os.memfd_create, (_NAMES[location],), (os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING,)))
        call = "ftruncate"
        os.ftruncate(made[-1], size)
        fcntl.fcntl(made[-1], fcntl.F_ADD_SEALS, _FIXED_SIZE if sealable else _PRIVATE_SEALS)
    except OSError as error:
        raise translated(call, error) from error


def seal(descriptor: int) -> None:
    """Refuse writable mappings of the extent from now on."""
    with driver_call("fcntl"):
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _LAST_SEALS != _LAST_SEALS:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _LAST_SEALS)


def duplicate(descriptor: int) -> int:
    """Return a new descriptor of the same extent."""
    with driver_call("dup"):
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)


def check(descriptor: int, size: int) -> None:
    """Raise unless `descriptor` is a memfd of `size` bytes that cannot shrink under a mapping (SIGBUS)."""
    call = "fstat"
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise invalid("fstat", f"the descriptor is not an extent of {size} bytes")
        call = "fcntl"
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise translated(call, error) from error
    if seals & _FIXED_SIZE != _FIXED_SIZE:
        raise invalid("fcntl", "the descriptor is not an extent: its size is not sealed")


def holders(uid: int | None, inodes: Container[int]) -> list[tuple[int, int]]:
    """Return the processes of user `uid`, or of all, that map device extents of these inodes, as (pid, bytes mapped).

    An extent mapped at several addresses counts once. Processes that cannot be read, that end in the meantime, or that
    hold only a descriptor are missing. The figures name suspects and are never booked.
    """
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            if uid in (None, os.stat(entry.path).st_uid) and (size := _mapped_bytes(entry.path, inodes)):
                found.append((int(entry.name), size))
        except OSError:
            continue
    return sorted(found)


def _mapped_bytes(process: str, inodes: Container[int]) -> int:
    marker, extents = f"/memfd:{EXTENT_NAME} ".encode(), {}
    with open(f"{process}/maps", "rb") as maps:
        for line in maps:
            if marker in line:
                addresses, _access, offset, _device, inode, _path = line.split(maxsplit=5)
                if int(inode) in inodes:
                    first, last = addresses.split(b"-")
                    extents[inode, offset] = int(last, 16) - int(first, 16)
    return sum(extents.values())
