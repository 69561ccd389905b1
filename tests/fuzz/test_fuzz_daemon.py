"""Bent conversations with a real daemon, over a real socket, and any request to it, by both transports.

A conversation is a true one, Hello to Goodbye, of which packets were bent, doubled, swapped or left out. Whatever is
said, the daemon lives, an honest worker of another tenant borrows and releases, and when the stranger is gone its
session is the only thing that it could leave: no descriptor of the daemon's stays open.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import (
    FROM_CLIENT,
    MODEL,
    PAGE,
    READS,
    REQUESTS,
    SEALED,
    UNSIGNED,
    WRITTEN,
    bent,
    budget,
    lasting,
)
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until

import membroker
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import broker_pb2_grpc
from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff

pytestmark = pytest.mark.deep

HELLO, *TALK = FROM_CLIENT
GOODBYE = pb.Frame(request_id=(1 << 64) - 1, goodbye=pb.Goodbye()).SerializeToString()


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Draw what a stranger says: mostly a true Hello first, then real packets, bent ones, and noise."""
    packet = st.one_of(st.sampled_from(TALK), bent(), bent(), st.binary(min_size=1, max_size=64))
    first = [HELLO] if draw(st.integers(0, 9)) else []
    return first + draw(st.lists(packet, max_size=8))


def talk(daemon: Daemon, packets: list[bytes]) -> None:
    """Say it all, and read until the broker hangs up or has answered the Goodbye that ends every conversation."""
    with raw.Connection(daemon.endpoint("red")) as stranger:
        with suppress(OSError):
            for data in packets:
                stranger.send_bytes(data)
            stranger.send_bytes(GOODBYE)
        with suppress(OSError, handoff.EndOfConnection):
            while True:
                stranger.receive()


STRANGER = """
import socket, sys
path, last = sys.argv[1], bytes.fromhex(sys.argv[2])
for line in sys.stdin:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(120)
        stranger.connect(path)
        try:
            for data in [*map(bytes.fromhex, line.split()), last]:
                stranger.send(data)
            while stranger.recv(65536):
                pass
        except TimeoutError:
            sys.exit("the broker neither answered nor hung up")
        except OSError:
            pass
"""
"""A process of its own, without the library: its sessions end with it, however it left them."""


def test_bent_conversations() -> None:
    """One daemon hears them all, from processes that come and go."""
    with running() as daemon, membroker.connect(str(daemon.endpoint("blue"))) as worker:
        model = worker.model("honest")
        before, greeted = daemon.descriptors(), daemon.device().revision
        socket = str(daemon.endpoint("red") / "handoff.sock")

        @budget(60)
        @given(st.lists(conversations(), min_size=1, max_size=5))
        def fuzz(said: list[list[bytes]]) -> None:
            lines = "".join(" ".join(data.hex() for data in packets) + "\n" for packets in said)
            command = [sys.executable, "-I", "-S", "-c", STRANGER, socket, GOODBYE.hex()]
            subprocess.run(command, input=lines, text=True, check=True, timeout=DEADLINE_SECONDS)
            with model.allocate(PAGE) as buffer:
                buffer.view()[:5] = b"hello"

        lasting(fuzz)
        assert daemon.device().revision > greeted + 100, "the strangers were not even greeted"
        until(lambda: len(daemon.sessions()) == 1 and daemon.books().releasing_bytes == 0)
        until(lambda: daemon.descriptors() <= before)


def test_refused_packets_leave_the_revision() -> None:
    """Noise and bent requests without a session: not one fact is written, and nothing stays open."""
    with running() as daemon, membroker.connect(str(daemon.endpoint("blue"))) as worker:
        model = worker.model("honest")
        before, revision = daemon.descriptors(), daemon.device().revision

        @budget(100)
        @given(st.one_of(st.sampled_from(TALK), st.binary(max_size=200), bent(TALK)))
        def fuzz(data: bytes) -> None:
            with suppress(handoff.BrokenPacket):
                if handoff.decode(data).HasField("hello"):
                    return
            talk(daemon, [data])

        lasting(fuzz)
        assert daemon.device().revision == revision
        until(lambda: daemon.descriptors() <= before)
        with model.allocate(PAGE):
            assert daemon.device().revision > revision


# --- any request, of a session that has a model and segments ---

KINDS = {
    "AllocateExtents": "allocate",
    "ReleaseExtents": "release",
    "DeclareMemory": "declare",
    "CreateSegment": "create_segment",
    "SealSegment": "seal_segment",
    "AttachSegment": "attach_segment",
    "DetachSegment": "detach_segment",
    "DeleteSegment": "delete_segment",
    "GetDevice": "get_device",
    "GetAvailable": "get_available",
    "GetModel": "get_model",
    "ListModels": "list_models",
    "ListSessions": "list_sessions",
    "ListSegments": "list_segments",
    "ListDecisions": "list_decisions",
}
"""By gRPC method: the field of a frame, where the handoff takes the request too."""


class Asker:
    """A stranger's session that reads whatever comes, acknowledges it, and keeps the replies."""

    def __init__(self, daemon: Daemon) -> None:
        self.session = raw.Session(daemon.endpoint("red"))
        self.numbers = itertools.count(1 << 40)
        self.replies: dict[int, pb.Reply] = {}
        self.arrived = threading.Condition()
        self.generations: dict[int, int] = {}
        """By what the corpus calls them: the segments that it made."""
        self.reader = threading.Thread(target=self._read)
        self.channel = grpc.insecure_channel(f"unix:{daemon.endpoint('red')}/grpc.sock")
        self.stub = broker_pb2_grpc.BrokerServiceStub(self.channel)
        self.session.sock.settimeout(None)
        self.reader.start()

    def _read(self) -> None:
        with suppress(OSError, handoff.EndOfConnection):
            while True:
                frame = self.session.receive().frame
                if frame.HasField("delivery"):
                    with suppress(OSError):  # it hung up after our Goodbye; what it said before is to be read
                        self.session.send(pb.Frame(request_id=frame.request_id, ack=pb.Ack(part=frame.delivery.part)))
                answer = frame.delivery if frame.HasField("delivery") else frame
                if answer.HasField("reply"):
                    with self.arrived:
                        self.replies[frame.request_id] = answer.reply
                        self.arrived.notify_all()

    def by_handoff(self, kind: str, request_id: int, request: Any) -> pb.Reply | None:
        """Send a frame, and wait for its reply, if one must come soon."""
        self.replies.pop(request_id, None)
        self.session.send(pb.Frame(request_id=request_id, **{kind: request}))
        if getattr(request, "no_reply", False) or _waits(request):
            return None
        with self.arrived:
            assert self.arrived.wait_for(lambda: request_id in self.replies, DEADLINE_SECONDS), f"no reply to {request}"
            return self.replies[request_id]

    def by_grpc(self, method: str, request: Any) -> Any:
        """Make a call; one that waits is given up."""
        metadata = (("membroker-token", self.session.token),)
        seconds = 0.02 if _waits(request) else DEADLINE_SECONDS
        done = getattr(self.stub, method).future(request, metadata=metadata, timeout=seconds)
        error = done.exception()
        gave_up = _waits(request) and done.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error is None or gave_up or raw.status_of(error) is not None, error
        return None if error else done.result()

    def begin(self) -> None:
        """Register a model, and make two segments of it, one of which is sealed."""
        self.by_grpc("RegisterModel", bpb.RegisterModelRequest(model_id="mine"))
        for number, label in ((SEALED, "sealed"), (WRITTEN, "written")):
            create = raw.segment_of(MODEL, label, 2 * PAGE)
            reply = self.by_handoff("create_segment", next(self.numbers), create)
            self.generations[number] = reply.segment.generation
        self.by_handoff("seal_segment", next(self.numbers), self.aim(bpb.SealSegmentRequest(generation=SEALED)))

    def aim(self, request: Any) -> Any:
        """Put its own segments where the corpus means one."""
        generation = getattr(request, "generation", 0)
        if generation in self.generations:
            aimed = type(request)()
            aimed.CopyFrom(request)
            aimed.generation = self.generations[generation]
            return aimed
        return request

    def close(self) -> None:
        """Say Goodbye, which the broker always answers, and hang up."""
        try:
            self.by_handoff("goodbye", next(self.numbers), pb.Goodbye())
            self.reader.join(DEADLINE_SECONDS)
            assert not self.reader.is_alive(), "the broker did not hang up"
        finally:
            self.channel.close()
            self.session.notices.close()
            self.session.sock.close()


def _waits(request: Any) -> bool:
    return isinstance(request, bpb.AttachSegmentRequest) and request.HasField("wait")


def delete_all(daemon: Daemon, tenant: str) -> None:
    """An operator ends what a tenant's sessions have left behind."""
    with daemon.admin_stub() as stub:
        for segment in stub.ListSegments(bpb.ListSegmentsRequest(page_size=1_000)).segments:
            if segment.name.startswith(f"tenants/{tenant}/"):
                with suppress(grpc.RpcError):  # it ends already
                    stub.DeleteSegment(bpb.DeleteSegmentRequest(name=segment.name))


def test_any_request_by_either_transport() -> None:
    """Each is answered, whatever it asks; an honest tenant's segment keeps what is in it, and nothing is left open."""
    config = {"model_grace_seconds": 0.01, "audit_seconds": 0.05}
    with running(config) as daemon, membroker.connect(str(daemon.endpoint("blue"))) as worker:
        segment = worker.model("honest").create_segment("weights", PAGE)
        segment.view()[:5] = b"hello"
        segment.seal()
        before, used = daemon.descriptors(), daemon.books().lent_bytes

        @budget(150)
        @given(st.lists(st.tuples(st.booleans(), UNSIGNED, REQUESTS | READS), min_size=1, max_size=8))
        def fuzz(asked: list[tuple[bool, int, Any]]) -> None:
            asker = Asker(daemon)
            try:
                asker.begin()
                for by_grpc, request_id, drawn in asked:
                    request = asker.aim(drawn)
                    method = type(request).__name__.removesuffix("Request")
                    if by_grpc or method not in KINDS:
                        asker.by_grpc(method, request)
                    else:
                        asker.by_handoff(KINDS[method], request_id, request)
            finally:
                asker.close()
            delete_all(daemon, "red")
            until(lambda: not [one for one in daemon.models() if one.name == MODEL])

        lasting(fuzz)
        until(lambda: len(daemon.sessions()) == 1 and daemon.books().lent_bytes == used)
        until(lambda: daemon.descriptors() <= before)
        assert bytes(segment.view()[:5]) == b"hello"
        assert [one.sessions for one in worker.segments()] == [1]
