"""A broker that a test plays frame by frame: what a real one does only on bad days.

`PlayedEnd` is the other end of one connection. `PlayedBroker` listens at an endpoint of its own, can die, and be there
again; `PlayedService` is its gRPC. Sockets, descriptors, memory and the kernel between them are real, so a client
that connects is a whole one; every answer is said by the test.
"""

from __future__ import annotations

import itertools
import os
import select
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from membroker.client import Client
from membroker.memory.buffer import Buffer
from membroker.model import Model
from membroker.session.reconnecting import ReconnectingConnection
from membroker.v1 import broker_pb2, resources_pb2
from membroker.v1 import handoff_pb2 as pb
from membroker.vmm.driver import Location
from membroker.vmm.host.driver import HostDriver
from membroker.wire import frames as handoff
from membroker.wire import names
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.sizes import PAGE

TOKEN = "token-of-the-session"
MODEL = "tenants/red/models/m"


def refusal(reason: str) -> status_pb2.Status:
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="membroker"))
    return status_pb2.Status(code=8, message=f"refused: {reason}", details=[info])


class Caller(threading.Thread):
    """A thread that makes one call and keeps what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - a thread hands on what it raised
            self.error = error

    def end(self) -> Caller:
        self.join(DEADLINE_SECONDS)
        assert not self.is_alive()
        return self

    def value(self) -> Any:
        """Return what the call returned; it must not have raised."""
        self.end()
        if self.error is not None:
            raise self.error
        return self.result


class PlayedEnd:
    """The other end of one connection: each frame and each answer is said by the test."""

    def __init__(self, end: socket.socket | None = None) -> None:
        self._end = end
        if end is not None:
            end.settimeout(DEADLINE_SECONDS)
        self._buffer = bytearray(names.MAX_FRAME_BYTES)

    @property
    def end(self) -> socket.socket:
        assert self._end is not None
        return self._end

    def hear_any(self) -> pb.Frame:
        return handoff.receive_without_descriptors(self.end, self._buffer)[0]

    def hear(self, kind: str) -> pb.Frame:
        """Return the next frame, which must be of this kind."""
        frame = self.hear_any()
        assert frame.WhichOneof("kind") == kind, frame
        return frame

    def hears_nothing(self) -> bool:
        return not select.select([self.end], [], [], 0)[0]

    def reply(self, request_id: int, **result: Any) -> None:
        self.end.send(handoff.encode(pb.Frame(request_id=request_id, reply=pb.Reply(**result))))

    def refuse(self, request_id: int, reason: str) -> None:
        self.reply(request_id, error=refusal(reason))

    def deliver(self, request_id: int, *extent_ids: int, descriptors: Sequence[int] | None = None, **more: Any) -> None:
        """Send a packet of extents, with `reply` in it if there is one; the descriptors are closed."""
        if descriptors is None:
            descriptors = [os.memfd_create("extent", os.MFD_CLOEXEC) for _ in extent_ids]
        delivery = pb.Delivery(extent_ids=extent_ids, **more)
        handoff.send(self.end, handoff.encode(pb.Frame(request_id=request_id, delivery=delivery)), descriptors)
        handoff.close_all(descriptors)


class PlayedBroker(PlayedEnd):
    """One endpoint, and at most one connection that is spoken to."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.device = HostDriver()
        self.ids = itertools.count(1)
        self.revision = 0
        self._listener: socket.socket | None = None
        self._notices: socket.socket | None = None

    def endpoint(self) -> Path:
        """Return the directory, as a daemon's."""
        return self.directory

    # Its lives

    def listen(self) -> None:
        """Be there, over whatever a dead one left."""
        path = self.directory / "handoff.sock"
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(DEADLINE_SECONDS)
        self._listener.bind(str(path))
        self._listener.listen()

    def hang_up(self) -> None:
        """End the connection, and be there for another."""
        for end in (self._end, self._notices):
            if end is not None:
                end.close()
        self._end = self._notices = None

    def die(self) -> None:
        """As after a kill: the sockets are closed, and the file of one is left."""
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        self.hang_up()

    def is_knocked_at(self) -> bool:
        """Say whether somebody has connected who was not let in yet."""
        assert self._listener is not None
        return bool(select.select([self._listener], [], [], 0)[0])

    # The beginning of a connection

    def accept(self) -> pb.Hello:
        """Take the next connection and return its Hello."""
        self._end, _ = self._listener.accept()
        self._end.settimeout(DEADLINE_SECONDS)
        return self.hear("hello").hello

    def welcome(self, *, resumed: bool = False) -> None:
        welcome = pb.Welcome(
            session="sessions/1",
            token=TOKEN,
            tenant="tenants/red",
            device_uuid="host",
            driver="host",
            granularity_bytes=PAGE,
            protocol_version=1,
            protocol_revision=self.revision,
            resumed=resumed,
        )
        theirs, self._notices = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            frame = pb.Frame(request_id=1, welcome=welcome)
            handoff.send(self.end, handoff.encode(frame), [theirs.fileno()])

    def connect(self, **options: Any) -> Client:
        """Return a client that has just begun its session."""
        import membroker

        caller = Caller(lambda: membroker.connect(self.directory, **options))
        hello = self.accept()
        assert not hello.resume_token
        self.welcome()
        client: Client = caller.value()
        return client

    def greet_again(self) -> None:
        """Recognize the session on a new connection."""
        hello = self.accept()
        assert (hello.resume_token, hello.protocol_version) == (TOKEN, 1)
        self.welcome(resumed=True)

    def hear_holds(self) -> tuple[int, list[pb.Holds]]:
        """Return the Holds up to the last one, and their request id."""
        frames = [self.hear("holds")]
        while not frames[-1].holds.last:
            frames.append(self.hear("holds"))
        assert len({frame.request_id for frame in frames}) == 1
        return frames[0].request_id, [frame.holds for frame in frames]

    def agree(self, request_id: int, **answer: Any) -> None:
        self.reply(request_id, resume=pb.ResumeResponse(**answer))

    def resume(self, **answer: Any) -> pb.Holds:
        """Take the session up again; return what it holds, as if it were one frame."""
        self.greet_again()
        request_id, frames = self.hear_holds()
        self.agree(request_id, **answer)
        held = pb.Holds()
        for frame in frames:
            held.MergeFrom(frame)
        return held

    # Frames

    def notice(self, **kind: Any) -> None:
        self._notices.send(handoff.encode(pb.Frame(notice=pb.Notice(**kind))))

    def deliver_pages(self, request_id: int, count: int, **more: Any) -> list[int]:
        """Deliver real extents of one page each, and return their ids."""
        ids = [next(self.ids) for _ in range(count)]
        descriptors = self.device.lend(PAGE, count, Location.DEVICE)
        self.deliver(request_id, *ids, descriptors=descriptors, extent_bytes=PAGE, **more)
        return ids

    def lend(self, count: int = 1, *, calls: int = 1) -> list[int]:
        """Serve the next allocations, each in one packet; return the ids."""
        frames = [self.hear("allocate") for _ in range(calls)]
        ids: list[int] = []
        for frame in frames:
            assert frame.allocate.count == count
            reply = pb.Reply(allocate=broker_pb2.AllocateExtentsResponse(count=count, extent_bytes=PAGE))
            ids += self.deliver_pages(frame.request_id, count, parts=1, reply=reply)
            if not self.revision:  # else the next frame acknowledges it
                assert self.hear("ack").request_id == frame.request_id
        return ids

    def hand_over_segment(self, request_id: int, generation: int) -> None:
        """Answer a create or an attach with a segment of one page."""
        segment = resources_pb2.Segment(
            name=f"{MODEL}/segments/weights",
            generation=generation,
            size_bytes=PAGE,
            extents=1,
            location=resources_pb2.LOCATION_DEVICE,
        )
        self.deliver_pages(request_id, 1, parts=1, segment=generation, reply=pb.Reply(segment=segment))
        self.hear("ack")


@contextmanager
def playing() -> Iterator[PlayedBroker]:
    """A broker that listens. At the end neither a descriptor nor a thread of a client's may be left."""
    directory = Path(tempfile.mkdtemp(prefix="mb-"))
    broker = PlayedBroker(directory)
    try:
        broker.listen()
        yield broker
    finally:
        broker.die()
        broker.device.close()
        shutil.rmtree(directory)


def model(client: Client) -> Model:
    return Model(client._session, resources_pb2.Model(name=MODEL, virtual_capacity_bytes=1 << 30))


def line(client: Client) -> ReconnectingConnection:
    return client._session.reconnecting


def is_away(client: Client) -> bool:
    """Whether the client has noticed that its broker is gone."""
    return client._session.connection.calls.is_lost


def buffer(broker: PlayedBroker, client: Client) -> tuple[Buffer, int]:
    """Return a buffer that the broker has lent, and the id of its extent."""
    caller = Caller(lambda: model(client).allocate(PAGE))
    (extent_id,) = broker.lend()
    return caller.value(), extent_id


def drop_all(broker: PlayedBroker, client: Client) -> None:
    """Hang up, and wait until the client knows."""
    broker.hang_up()
    until(lambda: is_away(client))


class PlayedService:
    """The broker's gRPC: `answers` has a function for each method that is asked for; `asked` what came."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "grpc.sock"
        self._server: Any = None
        self.answers: dict[str, Callable[[Any, Any], Any]] = {}
        self.asked: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Be there."""
        from membroker.v1 import broker_pb2_grpc

        self._path.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(4))
        broker_pb2_grpc.add_BrokerServiceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(f"unix:{self._path}")
        self._server.start()

    def stop(self) -> None:
        """Die: what is being answered is not."""
        self._server.stop(0).wait()

    def __getattr__(self, method: str) -> Any:
        if not method[:1].isupper():
            raise AttributeError(method)

        def serve(request: Any, context: Any) -> Any:
            self.asked.append((method, request))
            return self.answers[method](request, context)

        return serve


def abort(context: Any, reason: str) -> None:
    status = refusal(reason)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(grpc.StatusCode.ABORTED, status.message)


def open_sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found
