"""docs/golden-frames.json is the wire: each vector decodes, encodes to the same bytes, and is what a broker says.

The vectors are for clients in other languages, so they may not change while the protocol's version is 1, except by
additions. MEMBROKER_REWRITE=1 records them again from a real daemon: read the difference.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from tests.support import daemons
from tests.support.daemons import Daemon
from tests.support.raw import Session, admin_call, allocation, grpc_call, reason
from tests.system.test_reload import reload

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.v1.resources_pb2 import LOCATION_DEVICE
from membroker.wire import frames as handoff
from membroker.wire import names
from membroker.wire import sessions as limits
from membrokerd import __version__
from membrokerd.core import policy, sessions
from membrokerd.core.denied import Reason, deny
from membrokerd.daemon import DEFAULT_MAX_SESSIONS
from membrokerd.edge.errors import to_status
from membrokerd.edge.handoff import connection, listener
from membrokerd.edge.listings import MAX_PAGE_BYTES
from membrokerd.edge.messages import MAX_NAMES_SHOWN
from membrokerd.edge.rpc.http2 import MAX_BLOCK_BYTES
from membrokerd.edge.rpc.server import MAX_MESSAGE_BYTES, MAX_STREAMS

DOCS = Path(__file__).parents[3] / "docs"
GOLDEN = DOCS / "golden-frames.json"
DOCUMENT: dict[str, Any] = json.loads(GOLDEN.read_text())
VECTORS: list[dict[str, Any]] = DOCUMENT["frames"]
TOKEN = "A" * 43
VERSION = "0.1.0"
"""What stands for the daemon's version."""
REWRITE = bool(os.environ.get("MEMBROKER_REWRITE"))
CREATE_SECONDS = 1_767_225_600
"""What stands for the moment of a segment's creation, which no two daemons share."""
GUARANTEE = 250 << 20
"""What another tenant is guaranteed, in bytes: more than is free then."""
DEADLINE_SECONDS = 4_102_444_800
"""A drain's, in the year 2100."""
LEFT_AT_ZERO = {
    f"membroker.v1.{message}.{field}"
    for messages, fields in {
        "AllocateExtentsRequest ReleaseExtentsRequest DeclareMemoryRequest": "request_id",
        "CreateSegmentRequest SealSegmentRequest AttachSegmentRequest DetachSegmentRequest": "request_id",
        "DeleteSegmentRequest RegisterModelRequest UnregisterModelRequest": "request_id",
        "ModelBooks": "releasing_bytes guarantee_bytes waiting_bytes waiting_requests share_bytes recallable_bytes "
        "recalled_bytes late_bytes",
        # Of a broker that has what no daemon of a test needs, or is in trouble.
        "Device": "detached_sessions draining journal_full driver_fallback device_lost asleep_sessions reload_problems "
        "pending_keys guests asleep_guests",
        "LocationBooks": "releasing_bytes stock_bytes headroom_bytes gate_reserve_bytes reserved_bytes "
        "guarantee_shortfall_bytes waiting_bytes waiting_requests",
        "Session": "observer more_models more_segments pod_uid pod_name",
        "Decision": "returned_bytes after_ms guaranteed wanted_by",
        "Available": "guarantee_bytes tenant_limit_bytes",
        "ListSessionsResponse ListSegmentsResponse": "next_page_token",
        "Model": "idle_sleep_ms asleep_sessions asleep_since asleep_by_itself guests",  # only in listings
    }.items()
    for message in messages.split()
    for field in fields.split()
}


def encode(frame: pb.Frame) -> bytes:
    """Return the canonical bytes: fields by number, maps by key, inside the details of a Status too."""
    canonical = pb.Frame()
    canonical.CopyFrom(frame)
    for status in _statuses(canonical):
        for detail in status.details:
            content = GetMessageClass(Default().FindMessageTypeByName(detail.TypeName())).FromString(detail.value)
            detail.Pack(content, deterministic=True)
    return canonical.SerializeToString(deterministic=True)


def _statuses(frame: pb.Frame) -> Iterator[Status]:
    if frame.reply.HasField("error"):
        yield frame.reply.error
    if frame.notice.HasField("release_refused"):
        yield frame.notice.release_refused


def to_json(frame: pb.Frame) -> Any:
    """Return the frame as proto3 JSON, with the names of the .proto."""
    return MessageToDict(frame, preserving_proto_field_name=True)


def from_json(document: Any) -> pb.Frame:
    """Return the frame that a vector's JSON describes."""
    return ParseDict(document, pb.Frame())


def test_each_vector_is_what_it_means() -> None:
    """A field that was renumbered, renamed, or given another type reads or is written differently, or not at all."""
    for vector in VECTORS:
        data = bytes.fromhex(vector["hex"])
        frame = handoff.decode(data)
        assert to_json(frame) == vector["frame"], vector["name"]
        assert encode(frame) == encode(from_json(vector["frame"])) == data, vector["name"]


def test_every_kind_and_every_field_has_a_vector() -> None:
    """A field or a kind that is added to the protocol comes with a vector."""
    seen = {name for vector in VECTORS for name in _set_in(handoff.decode(bytes.fromhex(vector["hex"])))}
    assert set(_fields_of(pb.Frame.DESCRIPTOR)) - LEFT_AT_ZERO == seen


def _fields_of(kind: Descriptor) -> Iterator[str]:
    for field in kind.fields:
        yield field.full_name
        if _is_ours(field):
            yield from _fields_of(field.message_type)


def _is_ours(field: Any) -> bool:
    """Say whether a field is a message of this protocol, and no map."""
    kind = field.message_type
    return kind is not None and kind.full_name.startswith("membroker.") and not kind.GetOptions().map_entry


def _set_in(message: Message) -> Iterator[str]:
    for field, value in message.ListFields():
        if not field.full_name.startswith("membroker."):
            continue
        yield field.full_name
        if _is_ours(field):
            for one in value if isinstance(value, list) or hasattr(value, "add") else [value]:
                yield from _set_in(one)


def test_a_real_broker_says_them(daemon: Daemon) -> None:
    """The client's vectors go to a new daemon byte for byte, and its answers are the broker's vectors.

    Ids are (epoch, counter), so a first daemon's first session has the same ones each time; the token has not.
    """
    channels: dict[tuple[int, str], socket.socket] = {}
    tokens: list[str] = []
    try:
        for vector in VECTORS:
            key = (vector["connection"], vector["socket"])
            if "stopping" in vector["frame"].get("notice", {}):
                _stop(daemon, channels, key)
            if vector["sender"] == "client":
                if key not in channels:
                    channels[key] = _connected(daemon)
                data = encode(from_json(vector["frame"])) if REWRITE else bytes.fromhex(vector["hex"])
                channels[key].send(data.replace(TOKEN.encode(), tokens[-1].encode()) if tokens else data)
                vector["hex"] = data.hex()
            else:
                _check_said(daemon, channels, tokens, vector)
    finally:
        for one in channels.values():
            one.close()
    if REWRITE:
        GOLDEN.write_text(_written(DOCUMENT))


def _written(document: dict[str, Any]) -> str:
    """Return the document with one line for each key of each vector."""
    dump = functools.partial(json.dumps, ensure_ascii=False)
    vectors = [",\n".join(f"      {dump(key)}: {dump(value)}" for key, value in one.items()) for one in VECTORS]
    frames = ",\n".join(f"    {{\n{vector}\n    }}" for vector in vectors)
    return f'{{\n  "about": {dump(document["about"])},\n  "frames": [\n{frames}\n  ]\n}}\n'


def _connected(daemon: Daemon) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(daemons.DEADLINE_SECONDS)
    sock.connect(os.fspath(daemon.endpoint() / "handoff.sock"))
    return sock


def _stop(daemon: Daemon, channels: dict[tuple[int, str], socket.socket], key: tuple[int, str]) -> None:
    session = Session(daemon.endpoint())
    channels[key], channels[key[0], "handoff"] = session.notices, session.sock
    assert daemon.stop() == 0


def _check_said(
    daemon: Daemon, channels: dict[tuple[int, str], socket.socket], tokens: list[str], vector: dict[str, Any]
) -> None:
    if "draining" in vector["frame"].get("notice", {}):
        deadline = Timestamp(seconds=DEADLINE_SECONDS)
        admin_call(daemon.admin, "Drain", apb.DrainRequest(deadline=deadline))
    if "undrained" in vector["frame"].get("notice", {}):
        admin_call(daemon.admin, "Undrain", apb.UndrainRequest())
    recall = vector["frame"].get("notice", {}).get("recall")
    if recall and "guaranteed" in recall:
        _want_what_is_guaranteed(daemon)
    elif recall:
        request = apb.SetQuotaRequest(name="tenants/red/models/pages", location=LOCATION_DEVICE, limit_bytes=6 << 20)
        admin_call(daemon.admin, "SetQuota", request)
    question = vector["frame"].get("notice", {}).get("sleep", {})
    if "idle" in question:
        idle = {"models": {"pages": {"idle_sleep_seconds": 600.0}}}
        reload(daemon, idle_sleep="always", tenants={**daemon.config["tenants"], "red": idle})
    elif question:
        sleep = apb.SleepModelRequest(name="tenants/red/models/pages", wake=True, keep_weights=True)
        admin_call(daemon.admin, "SleepModel", sleep)
    packet = handoff.receive(channels[vector["connection"], vector["socket"]])
    assert len(packet.descriptors) == vector["descriptors"], vector["name"]
    frame = packet.frame
    if "idle" in question:
        reload(daemon)
    if frame.HasField("welcome"):
        channels[vector["connection"], "notices"] = socket.socket(fileno=packet.descriptors.pop())
        channels[vector["connection"], "notices"].settimeout(daemons.DEADLINE_SECONDS)
        assert len(frame.welcome.token) == len(TOKEN)
        if frame.welcome.resumed:
            assert frame.welcome.token == tokens[-1]
        else:
            request = bpb.RegisterModelRequest(request_id=2, model_id="golden")
            assert grpc_call(daemon.endpoint(), frame.welcome.token, "RegisterModel", request).name
            tokens.append(frame.welcome.token)
        frame.welcome.token = TOKEN
        assert frame.welcome.version == __version__
        frame.welcome.version = VERSION
    reply = frame.delivery.reply if frame.HasField("delivery") else frame.reply
    _hide_what_differs(reply)
    if reply.HasField("segment"):
        created = reply.segment.create_time
        assert abs(created.seconds - time.time()) < 600
        created.seconds, created.nanos = CREATE_SECONDS, 0
    handoff.close_all(packet.descriptors)
    if REWRITE:
        vector["hex"], vector["frame"] = encode(frame).hex(), to_json(frame)
    # By meaning: the order of a map inside a packed detail is its sender's.
    assert to_json(frame) == vector["frame"]


def _want_what_is_guaranteed(daemon: Daemon) -> None:
    """Another tenant asks for all that it is guaranteed, and does not wait: the recall stays open."""
    quota = apb.SetQuotaRequest(
        name="tenants/blue",
        location=LOCATION_DEVICE,
        guarantee_bytes=GUARANTEE,
        update_mask=FieldMask(paths=["guarantee_bytes"]),
    )
    assert not isinstance(admin_call(daemon.admin, "SetQuota", quota), Status)
    with Session(daemon.endpoint("blue")) as session:
        session.call(register_model=bpb.RegisterModelRequest(model_id="m"))
        wanted = allocation("tenants/blue/models/m", GUARANTEE)
        wanted.wait.SetInParent()
        assert reason(session.call(allocate=wanted)) == "CAPACITY"


def _hide_what_differs(reply: pb.Reply) -> None:
    """Put what no two daemons, machines or moments share in an answer to a read."""
    if reply.HasField("device"):
        device = reply.device
        assert device.pid
        assert device.revision
        assert device.version == __version__
        device.pid, device.revision, device.version = 4711, 1_000, VERSION
        device.start_time.FromSeconds(CREATE_SECONDS)
        device.metrics_url = "http://127.0.0.1:9710/metrics"
        (books,) = device.locations
        books.device_used_bytes, books.unaccounted_bytes = books.device_total_bytes, 0  # at the last audit
        books.free_bytes, books.releasing_bytes = books.free_bytes + books.releasing_bytes, 0  # of a segment that ended
        device.sessions, device.detached_sessions = 3, 0
    for session in reply.sessions.sessions:
        assert session.pid == os.getpid()
        session.pid, session.uid = 4712, 1_000
        session.create_time.FromSeconds(CREATE_SECONDS)
    for segment in reply.segments.segments:
        segment.create_time.FromSeconds(CREATE_SECONDS)
    for decision in reply.decisions.decisions:
        decision.time.FromSeconds(CREATE_SECONDS)


def test_the_page_has_every_reason_as_it_is() -> None:
    """docs/protocol.md lists each reason with the code and the advice to retry that the broker really sends."""
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| (yes|no) \|", (DOCS / "protocol.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(_row(reason) for reason in Reason)


def _row(reason: Reason) -> tuple[str, str, str]:
    status = to_status(deny(reason))
    retry = any(detail.Is(RetryInfo.DESCRIPTOR) for detail in status.details)
    return reason.value, Code.Name(status.code), "yes" if retry else "no"


def test_the_page_has_the_limits_as_they_are() -> None:
    """The numbers that a client builds its buffers by."""
    page, rules = (DOCS / "protocol.md").read_text(), policy.Rules(granularity=1, capacities={})
    numbers = {
        "bytes of a frame": names.MAX_FRAME_BYTES,
        "bytes of a gRPC request": MAX_MESSAGE_BYTES,
        "descriptors of a packet": names.MAX_DESCRIPTORS,
        "ids of a release": names.MAX_IDS_PER_FRAME,
        "extents of an allocate": names.MAX_EXTENTS_PER_CALL,
        "unacknowledged descriptors of a session": names.DESCRIPTORS_IN_FLIGHT,
        "bytes of each extent of a segment, except the last": rules.segment_extent_bytes,
        "segments of a tenant": rules.max_segments_per_tenant,
        "requests that wait for memory": rules.max_waiting_per_tenant,
        "seconds that a call may wait": names.MAX_WAIT_SECONDS,
        "protocol version": names.PROTOCOL_VERSION,
        "protocol revision": names.PROTOCOL_REVISION,
        "ids of a Holds": names.MAX_IDS_PER_FRAME,
        "unknown ids of a ResumeResponse": sessions.MAX_TOLD,
        "models of a ResumeResponse": sessions.MAX_MODELS_TOLD,
        "connections that have not said Hello": listener.MAX_SILENT,
        "seconds until a Hello must have come": int(listener.HELLO_SECONDS),
        "seconds that the last answer waits for room": int(connection.LINGER_SECONDS),
        "bytes of a gRPC header block, with the heads of its frames": MAX_BLOCK_BYTES,
        "gRPC calls at once": MAX_STREAMS,
        "rows of a page of a listing": names.MAX_PAGE_ROWS,
        "bytes of a page of a listing": MAX_PAGE_BYTES,
        "models, and segments, of a session in a listing": MAX_NAMES_SHOWN,
        "bytes of the path of a socket": names.MAX_SOCKET_PATH_BYTES,
        "characters of the name of a model or a segment": names.MAX_NAME_CHARACTERS,
        "characters of the name of a tenant": names.MAX_TENANT_CHARACTERS,
    }
    texts = {
        "unanswered calls that bring descriptors (by frame or gRPC, including calls that wait)": (
            f"{rules.max_calls_per_session}"
        ),
        "extents of all segments": f"{limits.MAX_SEGMENT_EXTENTS:,}, or what the broker's descriptors allow",
        "sessions of a process": f"{rules.max_sessions_per_process}, including detached sessions",
        "sessions in all": f"`max_sessions`: {DEFAULT_MAX_SESSIONS:,}, or what the broker's descriptors allow",
        "models of a tenant": f"`max_models_per_tenant`: {rules.max_models_per_tenant}",
        "characters of a client's name": f"{names.MAX_CLIENT_CHARACTERS}",
    }
    for what, text in texts.items():
        assert f"| {what} | {text} |" in page, what
    for what, number in numbers.items():
        assert f"| {what} | {number:,} |" in page, what
