"""A bare client, without the library: what a stranger's program, or a broken one, can say to a broker.

`Session` speaks frames on the handoff socket, `Asker` puts the same requests over either transport and hands back
what was answered as it is, refusals as `google.rpc.Status`; `Steps` does one thing at a time. Every read has a
deadline, so a daemon that hangs fails the test.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from membroker.v1 import admin_pb2_grpc, broker_pb2_grpc
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.vmm import AccessFlags, open_driver
from membroker.vmm.host.driver import GRANULARITY
from membroker.wire import frames as handoff
from tests.support.daemons import DEADLINE_SECONDS

_ids = itertools.count(1)


def info(status: Status) -> ErrorInfo:
    """Return the ErrorInfo of a refusal, which must be there and be ours."""
    found = ErrorInfo()
    assert status.details, f"no details: {status}"
    assert status.details[0].Unpack(found), status
    assert found.domain == "membroker"
    assert status.message, status
    assert "<" not in status.message, status.message
    return found


def reason(answer: Any) -> str:
    assert isinstance(answer, Status), f"not refused: {answer}"
    return str(info(answer).reason)


class Connection:
    """A handoff connection on which nothing was said yet."""

    def __init__(self, endpoint: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(DEADLINE_SECONDS)
        self.sock.connect(os.fspath(endpoint / "handoff.sock"))

    def send(self, frame: pb.Frame) -> None:
        self.sock.send(frame.SerializeToString())

    def send_bytes(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        handoff.send(self.sock, data, descriptors)

    def receive(self) -> handoff.Packet:
        packet = handoff.receive(self.sock)
        handoff.close_all(packet.descriptors)
        return packet

    def last_words(self) -> Status | None:
        """Read until the broker ends the connection, and return the refusal that it said last, if any."""
        last = None
        with suppress(handoff.EndOfConnection, ConnectionResetError):
            while True:
                frame = self.receive().frame
                if frame.reply.HasField("error"):
                    last = frame.reply.error
        return last

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reply_in(frame: pb.Frame) -> pb.Reply | None:
    """Return the Reply that a frame is, or that the last Delivery of a call has with it."""
    if frame.HasField("reply"):
        return frame.reply
    return frame.delivery.reply if frame.delivery.HasField("reply") else None


class Session(Connection):
    """A connection whose Hello was answered. Ends with Goodbye, as long as the broker listens."""

    def __init__(self, endpoint: Path, *, observer: bool = False, client: str = "raw") -> None:
        super().__init__(endpoint)
        self.endpoint = endpoint
        try:
            self.send(hello(observer=observer, client=client))
            packet = handoff.receive(self.sock)
            assert packet.frame.HasField("welcome"), packet.frame
        except BaseException:
            self.sock.close()
            raise
        self.welcome = packet.frame.welcome
        self.token = self.welcome.token
        self.notices = socket.socket(fileno=packet.descriptors[0])
        self.notices.settimeout(DEADLINE_SECONDS)

    def answer(self, request_id: int, *, acknowledge: bool = True) -> tuple[Any, list[int]]:
        """Return the Reply to a request, as its response or its Status, and the ids that were delivered before."""
        ids: list[int] = []
        while True:
            frame = self.receive().frame
            if frame.request_id != request_id:
                continue
            reply = reply_in(frame)
            ids += frame.delivery.extent_ids
            if acknowledge and frame.HasField("delivery"):
                self.send(pb.Frame(request_id=request_id, ack=pb.Ack(part=frame.delivery.part)))
            if reply is not None:
                return getattr(reply, reply.WhichOneof("result")), ids

    def call(self, **kind: Any) -> Any:
        """Send a request and return its response, or the Status that refuses it."""
        request_id = next(_ids)
        self.send(pb.Frame(request_id=request_id, **kind))
        return self.answer(request_id)[0]

    def take(self, **kind: Any) -> tuple[Any, list[int], list[int]]:
        """Send a request; return its response, the ids that came before it, and their descriptors, open."""
        request_id = next(_ids)
        self.send(pb.Frame(request_id=request_id, **kind))
        ids: list[int] = []
        descriptors: list[int] = []
        while True:
            packet = handoff.receive(self.sock)
            assert packet.frame.request_id == request_id, packet.frame
            reply = reply_in(packet.frame)
            ids += packet.frame.delivery.extent_ids
            descriptors += packet.descriptors
            if packet.frame.HasField("delivery"):
                self.send(pb.Frame(request_id=request_id, ack=pb.Ack(part=packet.frame.delivery.part)))
            if reply is not None:
                return getattr(reply, reply.WhichOneof("result")), ids, descriptors

    def borrow(self, model: str, size: int, count: int = 1) -> list[int]:
        request_id = next(_ids)
        self.send(pb.Frame(request_id=request_id, allocate=allocation(model, size, count)))
        answer, ids = self.answer(request_id)
        assert answer.count == count == len(ids), answer
        return ids

    def register(self, model: str, **numbers: Any) -> str:
        answer = self.call(register_model=bpb.RegisterModelRequest(model_id=model, **numbers))
        assert not isinstance(answer, Status), answer
        return str(answer.name)

    def release(self, ids: Sequence[int]) -> None:
        answer = self.call(release=bpb.ReleaseExtentsRequest(extent_ids=ids))
        assert not isinstance(answer, Status), answer

    def recall(self) -> pb.Recall:
        """Return the next Recall; other notices before it are skipped."""
        while True:
            notice = handoff.receive(self.notices).frame.notice
            if notice.HasField("recall"):
                return notice.recall

    def answer_recall(self, number: int, size: int = 0) -> None:
        """Say that no more is released for this recall, as far as it was of `size` bytes. 0: the first notice's."""
        self.send(pb.Frame(request_id=next(_ids), recall_answer=pb.RecallAnswer(recall_id=number, bytes=size)))

    def resume(self, ids: Sequence[int] = (), answering: Sequence[str] = ()) -> Any:
        """Connect again, state these extents and models, and return the answer."""
        self.notices.close()
        self.sock.close()
        Connection.__init__(self, self.endpoint)
        self.send(pb.Frame(request_id=next(_ids), hello=pb.Hello(protocol_version=1, resume_token=self.token)))
        packet = handoff.receive(self.sock)
        assert packet.frame.welcome.resumed, packet.frame
        self.notices = socket.socket(fileno=packet.descriptors[0])
        self.notices.settimeout(DEADLINE_SECONDS)
        return self.call(holds=pb.Holds(extent_ids=ids, answering_models=answering, last=True))

    def close(self) -> None:
        with suppress(OSError, handoff.EndOfConnection):
            self.send(pb.Frame(request_id=next(_ids), goodbye=pb.Goodbye()))
            while True:
                self.receive()
        self.notices.close()
        super().close()


class Steps(Connection):
    """A session made of single steps, for a process that stops, lies or dies between any two of them.

    `transport` says where the requests go; descriptors come here in any case. `hello` registers the model `m`.
    """

    def __init__(self, endpoint: str, transport: str) -> None:
        super().__init__(Path(endpoint))
        self.socket = self.sock
        self.endpoint, self.transport = Path(endpoint), transport
        self.extent_ids: list[int] = []
        self.descriptors: list[int] = []
        self.handles: list[Any] = []
        self.parts: list[int] = []
        self.addresses: list[int] = []
        self.answered = False

    def hello(self) -> None:
        """Say Hello, keep what came with the Welcome, and register the model."""
        self.send(hello())
        packet = handoff.receive(self.sock)
        self.welcome = packet.frame.welcome
        self.notices = socket.socket(fileno=packet.descriptors[0])
        self.driver: Any = open_driver("host", "host")
        # Not by gRPC, which closes descriptors of its own at some moment after its last channel.
        self.send(pb.Frame(request_id=2, register_model=bpb.RegisterModelRequest(model_id="m")))
        assert self.receive().frame.reply.HasField("model")

    def send_allocate(self, count: int) -> None:
        """Ask for `count` extents of one granule, and wait for nothing."""
        self._ask("allocate", "AllocateExtents", allocation(f"{self.welcome.tenant}/models/m", GRANULARITY, count), 3)

    def read_delivery(self) -> None:
        """Read one packet of descriptors and keep them open."""
        packet = handoff.receive(self.sock)
        assert packet.frame.HasField("delivery"), packet.frame
        self.parts.append(packet.frame.delivery.part)
        self.extent_ids += packet.frame.delivery.extent_ids
        self.descriptors += packet.descriptors
        self.answered = packet.frame.delivery.reply.WhichOneof("result") == "allocate"

    def import_all(self) -> None:
        """Take handles of what was delivered; the descriptors are closed."""
        while self.descriptors:
            self.handles.append(self.driver.import_extent(self.descriptors[0], GRANULARITY))
            os.close(self.descriptors.pop(0))

    def acknowledge(self) -> None:
        for part in self.parts:
            self.send(pb.Frame(request_id=3, ack=pb.Ack(part=part)))

    def read_reply(self) -> None:
        """Take the answer to the Allocate: by gRPC, or what came with the last delivery."""
        if self.transport == "grpc":
            self.future.result()
        assert self.answered == (self.transport == "handoff"), "the answer came the other way, or twice"

    def map_all(self) -> None:
        """Map what was imported, write to it, and let the handles go: the mappings keep the memory."""
        for handle in self.handles:
            address = self.driver.reserve(GRANULARITY)
            self.driver.map(address, handle)
            self.driver.set_access(address, GRANULARITY, AccessFlags.READ_WRITE)
            self.driver.release(handle)
            self.driver.write(address, b"mine")
            self.addresses.append(address)
        self.handles.clear()

    def unmap_all(self) -> None:
        while self.addresses:
            self.driver.unmap(self.addresses.pop(), GRANULARITY)

    def send_release(self) -> None:
        """Say that everything is released, true or not, and wait for nothing."""
        self._ask("release", "ReleaseExtents", bpb.ReleaseExtentsRequest(extent_ids=self.extent_ids), 4)

    def read_release(self) -> None:
        if self.transport == "grpc":
            self.future.result()
        else:
            assert handoff.receive(self.sock).frame.reply.HasField("release")

    def say_goodbye(self) -> None:
        """End the session, and wait for nothing."""
        self.send(pb.Frame(request_id=9, goodbye=pb.Goodbye()))

    def _ask(self, kind: str, method: str, request: Any, request_id: int) -> None:
        if self.transport == "handoff":
            self.send(pb.Frame(request_id=request_id, **{kind: request}))
            return
        request.request_id = request_id
        self.channel = grpc.insecure_channel(f"unix:{self.endpoint}/grpc.sock")
        stub = broker_pb2_grpc.BrokerServiceStub(self.channel)
        self.future = getattr(stub, method).future(request, metadata=(("membroker-token", self.welcome.token),))


class Asker:
    """Puts a session's requests by one transport. A delivery is acknowledged, whichever way it was asked for."""

    def __init__(self, session: Session, transport: str) -> None:
        self.session, self.transport = session, transport

    def allocate(self, model: str, size: int, count: int, location: Any = 0) -> Any:
        return self._ask("allocate", "AllocateExtents", allocation(model, size, count, location))

    def release(self, *ids: int) -> Any:
        return self._ask("release", "ReleaseExtents", bpb.ReleaseExtentsRequest(extent_ids=ids))

    def declare(self, model: str, size: int, location: Any = 0) -> Any:
        request = bpb.DeclareMemoryRequest(model=model, declared_bytes=size, location=location)
        return self._ask("declare", "DeclareMemory", request)

    def wait(self, request: bpb.AllocateExtentsRequest | bpb.CreateSegmentRequest, wait: Duration) -> Any:
        """AllocateExtents or CreateSegment, which may take that long."""
        request.wait.CopyFrom(wait)
        if isinstance(request, bpb.CreateSegmentRequest):
            return self._ask("create_segment", "CreateSegment", request)
        return self._ask("allocate", "AllocateExtents", request)

    def _ask(self, kind: str, method: str, request: Any) -> Any:
        if self.transport == "handoff":
            return self.session.call(**{kind: request})
        request.request_id = next(_ids)
        return grpc_call(self.session.endpoint, self.session.token, method, request)


def hello(version: int = 1, *, observer: bool = False, client: str = "raw") -> pb.Frame:
    return pb.Frame(request_id=next(_ids), hello=pb.Hello(protocol_version=version, observer=observer, client=client))


def allocation(model: str, size: int, count: int = 1, location: Any = 0) -> bpb.AllocateExtentsRequest:
    return bpb.AllocateExtentsRequest(model=model, extent_bytes=size, count=count, location=location)


def segment_of(model: str, segment_id: str, size: int, location: Any = 0) -> bpb.CreateSegmentRequest:
    return bpb.CreateSegmentRequest(model=model, segment_id=segment_id, size_bytes=size, location=location)


def status_of(error: grpc.RpcError) -> Status | None:
    """Return the rich status of a failed call; None when gRPC itself refused it."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return Status.FromString(value)
    return None


def grpc_call(endpoint: Path, token: str | None, method: str, request: Any) -> Any:
    """Return the response of one gRPC call at a tenant's endpoint, or the Status that refuses it."""
    metadata = () if token is None else (("membroker-token", token),)
    return _call(endpoint, broker_pb2_grpc.BrokerServiceStub, method, request, metadata)


def admin_call(directory: Path, method: str, request: Any) -> Any:
    """Return the response of one call of AdminService, at whatever endpoint, or the Status that refuses it."""
    return _call(directory, admin_pb2_grpc.AdminServiceStub, method, request)


def _call(directory: Path, stub_class: Any, method: str, request: Any, metadata: Any = ()) -> Any:
    with grpc.insecure_channel(f"unix:{directory}/grpc.sock") as channel:
        stub = stub_class(channel)
        try:
            return getattr(stub, method)(request, metadata=metadata, timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            status = status_of(error)
            if status is None:
                raise
            return status


def is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])
