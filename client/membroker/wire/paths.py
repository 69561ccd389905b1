"""Paths: which cannot have a socket that everybody can reach or cannot be written, and how gRPC is told of a socket.

The kernel takes any bytes but NUL, up to a length. gRPC takes a URI, in which other bytes must be quoted.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from .names import MAX_SOCKET_PATH_BYTES


def socket_fault(path: Path) -> str:
    """Return why there cannot be a socket of a broker at this path, or ""."""
    encoded = os.fsencode(path)
    if len(encoded) > MAX_SOCKET_PATH_BYTES:
        return (
            f"the path of a socket has at most {MAX_SOCKET_PATH_BYTES} bytes and {printable(path)} has {len(encoded)}"
        )
    if b"," in encoded:
        return f"{printable(path)} has a comma, which gRPC takes for the end of a path"
    return ""


def unwritable(directory: Path) -> str:
    """Return why nothing can be made in a directory, which exists, or ""."""
    if os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        return ""
    return (
        "its file system is read-only"
        if os.statvfs(directory).f_flag & os.ST_RDONLY
        else "this user cannot write there"
    )


def grpc_target(path: Path) -> str:
    """Return gRPC's name of the socket at this path."""
    return f"unix:{quote(os.fsencode(path), safe='/')}"


def printable(path: Path | str) -> str:
    """Return a path as text that can be written anywhere: bytes that are not UTF-8 are shown as `\\xff`."""
    return os.fsencode(path).decode(errors="backslashreplace")
