"""A raw session: frames of its own over the library's greeting, which maps nothing and keeps no descriptor.

For figures of the broker alone, and for holding more extents than a process could map. On the host driver an extent
with all its descriptors closed has no memory any more, and is still a row of the books.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import MSG_DONTWAIT

from membroker.errors import BrokerUnavailable
from membroker.session.handshake import open_session
from membroker.session.rpc import CONTROL_SECONDS, GrpcCalls
from membroker.v1 import broker_pb2 as pb
from membroker.v1.handoff_pb2 import Ack, Frame, Goodbye, Hello, Reply
from membroker.wire import frames as handoff
from membroker.wire import names

from .bare import EXTENT

CONNECT_SECONDS = 30.0


def allocate_frame(model: str, count: int = 1, request_id: int = 1) -> Frame:
    """Return an Allocate of extents of 2 MiB."""
    return Frame(
        request_id=request_id, allocate=pb.AllocateExtentsRequest(model=model, extent_bytes=EXTENT, count=count)
    )


class Refused(Exception):
    """The broker refused a request that should have been granted."""


class RawSession:
    """One session, from Hello to Goodbye. Raises `TooMany` when the broker has no room for it."""

    def __init__(self, endpoint: Path) -> None:
        hello = Hello(protocol_version=names.PROTOCOL_VERSION, client="benchmarks")
        self._socket, self._notices, self._welcome = open_session(endpoint / "handoff.sock", hello, CONNECT_SECONDS)
        self._calls = GrpcCalls(endpoint / "grpc.sock", self._welcome.token)
        self._request_ids = itertools.count(2)

    def register(self, model: str) -> str:
        """Register a model and return its resource name."""
        request = pb.RegisterModelRequest(request_id=next(self._request_ids), model_id=model)
        name: str = self._calls.call("RegisterModel", request, CONTROL_SECONDS).name
        return name

    def allocate(self, model: str, count: int = 1) -> list[int]:
        """Borrow extents; every descriptor is closed unused as it comes. Returns their ids."""
        frame = allocate_frame(model, count, next(self._request_ids))
        self._send(frame)
        ids: list[int] = []
        while True:
            packet = handoff.receive(self._socket)
            handoff.close_all(packet.descriptors)
            delivery = packet.frame.delivery
            if packet.frame.HasField("reply"):  # a refusal: other replies come with the last delivery
                _granted(packet.frame.reply)
            ids += delivery.extent_ids
            self._send(Frame(request_id=frame.request_id, ack=Ack(part=delivery.part)))
            if delivery.HasField("reply"):
                return ids

    def release(self, ids: Sequence[int]) -> None:
        """Give extents back, and wait for the broker's word."""
        for some in _batches(ids, names.MAX_IDS_PER_FRAME):
            request = pb.ReleaseExtentsRequest(extent_ids=some)
            self._send(Frame(request_id=next(self._request_ids), release=request))
            _granted(handoff.receive(self._socket).frame.reply)

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._socket.fileno()

    def flood(self, frame: bytes) -> None:
        """Send a frame if the socket has room for it, and drop an answer if there is one."""
        for call in (lambda: self._socket.send(frame, MSG_DONTWAIT), lambda: self._socket.recv(65_536, MSG_DONTWAIT)):
            with suppress(BlockingIOError):
                call()

    def close(self) -> None:
        """Say Goodbye and close."""
        with suppress(OSError, handoff.EndOfConnection, BrokerUnavailable):
            self._send(Frame(request_id=next(self._request_ids), goodbye=Goodbye()))
            handoff.receive(self._socket)
        self._calls.close()
        self._notices.close()
        self._socket.close()

    def _send(self, frame: Frame) -> None:
        handoff.send(self._socket, handoff.encode(frame))


def _granted(reply: Reply) -> None:
    if reply.HasField("error"):
        raise Refused(reply.error.message)


def _batches(ids: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (ids[first : first + size] for first in range(0, len(ids), size))
