"""The work that a broker stands on, without a broker: echoes between two processes, each the equivalent of a real call.

Owns two servers. They know no frame, no book and no rule: what the broker takes more than they do is its own share,
the price of protobuf, of asyncio, of the driver thread and of the books.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc

from membroker.vmm.sizes import MIB

EXTENT = 2 * MIB
METHOD = "/benchmarks.Bare/Echo"
BACKLOG = 128

Ready = Callable[[], None]


def cores() -> list[int]:
    """Return the processors that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def pin(core: int | None) -> None:
    """Let this thread run on one processor only; None leaves it to the kernel."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def serve_packets(path: Path, lends: bool, core: int | None, ready: Ready) -> None:
    """Echo packets to any number of clients, from one thread; with `lends`, a fresh memfd of 2 MiB goes with each."""
    pin(core)
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
                elif not _echo(peers[number], lends):
                    poll.unregister(number)
                    peers.pop(number).close()


def _echo(peer: socket.socket, lends: bool) -> bool:
    """Answer one packet; say whether the peer is still there."""
    with suppress(ConnectionError):
        data = peer.recv(65_536)
        if data:
            if lends:
                _lend(peer, data)
            else:
                peer.send(data)
            return True
    return False


def _lend(peer: socket.socket, data: bytes) -> None:
    descriptor = os.memfd_create("bare", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, EXTENT)
        socket.send_fds(peer, [data], [descriptor])
    finally:
        os.close(descriptor)


def serve_grpc(path: Path, ready: Ready) -> None:
    """Echo gRPC messages of plain bytes, as the broker serves: grpc.aio, clear text, a Unix socket."""
    asyncio.run(_serve_grpc(path, ready))


async def _serve_grpc(path: Path, ready: Ready) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Echo(),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    ready()
    await server.wait_for_termination()


class _Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_unary_rpc_method_handler(_answer)


async def _answer(request: bytes, context: object) -> bytes:
    return request
