"""The work that a broker stands on, without a broker: echoes between two processes, each the equivalent of a real call.

Owns two servers and their clients. They know no frame, no book and no rule: what the broker takes more than they do is
its own share, the price of protobuf, of asyncio, of the driver thread and of the books.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc

from membroker.vmm.sizes import MIB
from membroker.wire.paths import grpc_target

from ..harness.crew import MakeJob, serving
from ..harness.jobs import Job
from ..harness.packets import MAX_BYTES, connected, serve_packets

EXTENT = 2 * MIB
METHOD = "/benchmarks.Bare/Echo"

Ready = Callable[[], None]


def cores() -> list[int]:
    """Return the processors that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def pin(core: int | None) -> None:
    """Let this thread run on one processor only; None leaves it to the kernel."""
    if core is not None:
        os.sched_setaffinity(0, {core})


class PacketEcho(Job):
    """The bare equivalent of the handoff: a packet and its answer, with a descriptor when the server lends."""

    warm_up = 200

    def __init__(self, path: Path, size: int, lends: bool, core: int | None) -> None:
        pin(core)
        self._payload = bytes(size)
        self._socket = connected(path)
        super().__init__(echo=self._borrow if lends else self._echo)

    def _echo(self) -> None:
        self._socket.send(self._payload)
        self._socket.recv(MAX_BYTES)

    def _borrow(self) -> None:
        self._socket.send(self._payload)
        _, (descriptor,), _, _ = socket.recv_fds(self._socket, MAX_BYTES, 1)
        os.close(descriptor)

    def close(self) -> None:
        self._socket.close()


class GrpcEcho(Job):
    """The bare equivalent of a gRPC call: a message of plain bytes there and back."""

    warm_up = 200

    def __init__(self, path: Path, size: int) -> None:
        self._payload = bytes(size)
        self._channel = grpc.insecure_channel(grpc_target(Path(path)))
        self._call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(METHOD)
        super().__init__(echo=partial(self._call, self._payload, wait_for_ready=True))

    def close(self) -> None:
        self._channel.close()


@contextmanager
def packet_server(size: int, *, lends: bool, core: int | None = None) -> Iterator[Callable[[int | None], MakeJob]]:
    """Run a bare server of packets, on a core; yields what makes the job of a client, on the core that it is told."""
    with tempfile.TemporaryDirectory(prefix="membroker-bench-") as directory:
        path = Path(directory, "bare.sock")
        with serving(_serve_packets, path, lends, core):
            yield lambda on: partial(PacketEcho, path, size, lends, on)


@contextmanager
def grpc_server(size: int) -> Iterator[MakeJob]:
    """Run a bare gRPC server; yields the job of its client."""
    with tempfile.TemporaryDirectory(prefix="membroker-bench-") as directory:
        path = Path(directory, "bare.sock")
        with serving(_serve_grpc, path):
            yield partial(GrpcEcho, path, size)


# --- in the other processes ---


def _serve_packets(path: Path, lends: bool, core: int | None, ready: Ready) -> None:
    """Echo packets to any number of clients, from one thread; with `lends`, a fresh memfd of 2 MiB goes with each."""
    pin(core)
    serve_packets(path, _lend if lends else socket.socket.send, ready)


def _lend(peer: socket.socket, data: bytes) -> None:
    descriptor = os.memfd_create("bare", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, EXTENT)
        socket.send_fds(peer, [data], [descriptor])
    finally:
        os.close(descriptor)


def _serve_grpc(path: Path, ready: Ready) -> None:
    """Echo gRPC messages of plain bytes, as the broker serves: grpc.aio, clear text, a Unix socket."""

    async def answer(request: bytes, _: object) -> bytes:
        return request

    async def serve() -> None:
        server = grpc.aio.server()
        service, _, method = METHOD[1:].partition("/")
        handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_insecure_port(grpc_target(Path(path)))
        await server.start()
        ready()
        await server.wait_for_termination()

    asyncio.run(serve())
