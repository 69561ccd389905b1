"""Ports for programs that must be told one before they start."""

from __future__ import annotations

import socket

_reserved: list[socket.socket] = []


def reserved_port() -> int:
    """Return a port that only a program gets that is told it: it stays bound here, and nobody listens at it.

    The kernel gives it to no connection, and to no program that lets it choose. A server can bind it all the same,
    since servers set SO_REUSEADDR.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _reserved.append(held)
    return int(held.getsockname()[1])
