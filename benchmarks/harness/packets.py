"""A server of packets without a broker: a socket, one thread that polls, and whatever answers a packet."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from pathlib import Path

BACKLOG = 128
MAX_BYTES = 65_536


def serve_packets(path: Path, answer: Callable[[socket.socket, bytes], object], ready: Callable[[], None]) -> None:
    """Let `answer` see each packet of any number of clients, until the process is killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, select.epoll() as poll:
        listener.bind(os.fspath(path))
        listener.listen(BACKLOG)
        poll.register(listener, select.EPOLLIN)
        ready()
        peers: dict[int, socket.socket] = {}
        while True:
            for number, _ in poll.poll():
                if number == listener.fileno():
                    peer, _ = listener.accept()
                    peers[peer.fileno()] = peer
                    poll.register(peer, select.EPOLLIN)
                elif not _answered(peers[number], answer):
                    poll.unregister(number)
                    peers.pop(number).close()


def _answered(peer: socket.socket, answer: Callable[[socket.socket, bytes], object]) -> bool:
    """Have one packet answered; say whether the peer is still there."""
    try:
        data = peer.recv(MAX_BYTES)
        if data:
            answer(peer, data)
        return bool(data)
    except ConnectionError:
        return False


def connected(path: Path) -> socket.socket:
    """Return a client of such a server."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(os.fspath(path))
    return client
