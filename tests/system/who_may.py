"""Who may do what: the table that docs/trust.md shows, and for each of its rows the deed itself.

S is a session of the tenant red that holds memory and segments; every deed is about it. Who does the deed is a
process of its own (`play`), with a user, a mount namespace and an endpoint of its own where that matters, so that what
refuses it is what would refuse a stranger: the kernel, or the broker's answer.
"""

from __future__ import annotations

import ctypes
import encodings.ascii
import encodings.idna
import errno
import fcntl
import functools
import http.client
import json
import mmap
import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support import raw

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff

PAGE = 2 << 20
MARK = b"S was here"
LATER = (encodings.ascii, encodings.idna, ctypes, signal)  # what another user may not be able to read any more
grpc.insecure_channel("unix:/nonexistent").close()  # the same: grpc 1.85 imports parts of itself on the first use

WHO: Mapping[str, str] = {
    "itself": "S itself",
    "same": "same tenant",
    "other": "another tenant",
    "admin": "admin",
    "user": "another user",
    "ro": "container, ro",
    "rw": "container, rw",
}
KINDS: Mapping[str, str] = {
    "RegisterModel": "register_model",
    "UnregisterModel": "unregister_model",
    "AllocateExtents": "allocate",
    "ReleaseExtents": "release",
    "DeclareMemory": "declare",
    "CreateSegment": "create_segment",
    "SealSegment": "seal_segment",
    "AttachSegment": "attach_segment",
    "DetachSegment": "detach_segment",
    "DeleteSegment": "delete_segment",
}
"""The frame of each call that both transports have."""
BOTH, GRPC, HANDOFF = ("grpc", "handoff"), ("grpc",), ("handoff",)


class Party:
    """Who does a deed. `door` is the endpoint that it enters by, `theirs` S's, both as it sees them."""

    def __init__(self, door: Path, theirs: Path) -> None:
        self.door, self.theirs = door, theirs
        self.is_admin = door.name == "admin"
        self.transport = "grpc"
        self.session: raw.Session | None = None

    def begin(self) -> str:
        """Open a session if the door lets one in, and return its token."""
        if not self.is_admin:
            with suppress(OSError):
                self.session = raw.Session(self.door)
        return self.session.token if self.session else ""

    def end(self) -> str:
        """Say Goodbye."""
        if self.session:
            self.session.close()
            self.session = None
        return ""

    def ask(self, target: Any, method: str, request: Any, token: str | None = None) -> Any:
        """Put a request. A caller without a session sends it from outside, with S's token, which it should not have."""
        if self.transport == "handoff":
            session = self.session or raw.Session(self.door)
            return session.call(**{KINDS[method]: request})
        if "request_id" in request.DESCRIPTOR.fields_by_name:
            request.request_id = next(raw._ids)
        if token is None and not self.is_admin:
            token = self.session.token if self.session else target.token
        return raw.grpc_call(self.door, token, method, request)


Deed = Callable[[Party, Any], Any]


@dataclass(frozen=True)
class Row:
    """One operation, its outcome for each of WHO, and what enforces it."""

    number: str
    what: str
    cells: Mapping[str, str]
    enforced: str
    deed: Deed
    transports: tuple[str, ...]
    kernel: bool
    before: Deed | None

    def transports_of(self, who: str) -> tuple[str, ...]:
        """The admin endpoint has no handoff socket."""
        return GRPC if who == "admin" and self.transports == BOTH else self.transports


ROWS: dict[str, Row] = {}
GROUPS: Mapping[str, str] = {
    "SM": "Sessions and models",
    "B": "Memory",
    "G": "Segments",
    "L": "Looking",
    "A": "The operator's",
    "TD": "Tokens and descriptors",
    "F": "Files and processes",
}
"""What each group of rows is about, by the letters that their numbers begin with."""


def row(
    number: str,
    what: str,
    outcomes: str,
    enforced: str,
    *,
    transports: tuple[str, ...] = GRPC,
    kernel: bool = False,
    before: Deed | None = None,
) -> Callable[[Deed], Deed]:
    """Put a deed into the table.

    `outcomes` are in the order of WHO: "yes", a refusal, or "-" where there is nothing to ask. `kernel` says that the
    kernel is asked, about a process: then tenants' processes have users of their own. `before` is done first, and may
    change the books.
    """
    cells = dict(zip(WHO, outcomes.split(), strict=True))

    def put(deed: Deed) -> Deed:
        assert number not in ROWS
        ROWS[number] = Row(number, what, cells, enforced, deed, transports, kernel, before)
        return deed

    return put


_OWN = "broker: ids are looked up among what the session itself holds"
_JOINED = "broker: models are looked up among those that the session itself registered or joined"
_TENANT = "broker: names begin with the tenant, and the endpoint is the tenant"
_DOOR = "kernel: the sockets' owner and mode"
_SERVED = "broker: AdminService is served at `admin/` alone"
_DIRECTORY = "kernel: the directories are the daemon's user's, 0755; a read-only mount"


# --- Deeds: sessions and models ---


def greet(endpoint: Path) -> Any:
    """Open a session and leave it; return the refusal, if it is one."""
    with raw.Connection(endpoint) as connection:
        with suppress(BrokenPipeError):
            connection.send(raw.hello())
        frame = connection.receive().frame
        if frame.HasField("welcome"):
            connection.send(pb.Frame(request_id=2, goodbye=pb.Goodbye()))
            connection.last_words()
        return frame.reply.error if frame.HasField("reply") else frame


@row(
    "M1",
    "register a model of its own",
    "yes yes yes UNIMPLEMENTED EACCES yes yes",
    _DOOR,
    transports=BOTH,
)
def register_own(me: Party, target: Any) -> Any:
    return me.ask(target, "RegisterModel", bpb.RegisterModelRequest(model_id=f"{target.model_id}-own"))


@row(
    "M2",
    "join S's model",
    "yes yes its-own UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
)
def join(me: Party, target: Any) -> Any:
    """Another tenant cannot even say whose model it means: names are its own."""
    answer = me.ask(target, "RegisterModel", bpb.RegisterModelRequest(model_id=target.model_id))
    return answer if isinstance(answer, Status) or answer.name == target.model else "its-own"


@row(
    "M3",
    "leave S's model without having joined it",
    "yes MODEL_NOT_FOUND MODEL_NOT_FOUND UNIMPLEMENTED EACCES MODEL_NOT_FOUND MODEL_NOT_FOUND",
    _JOINED,
    transports=BOTH,
)
def leave(me: Party, target: Any) -> Any:
    return me.ask(target, "UnregisterModel", bpb.UnregisterModelRequest(name=target.idle))


# --- Deeds: memory and segments ---


@row(
    "B2",
    "join S's model, then allocate under it",
    "yes yes MODEL_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
    before=join,
)
@row(
    "B1",
    "allocate under S's model without having joined it",
    "yes MODEL_NOT_FOUND MODEL_NOT_FOUND UNIMPLEMENTED EACCES MODEL_NOT_FOUND MODEL_NOT_FOUND",
    _JOINED,
    transports=BOTH,
)
def allocate(me: Party, target: Any) -> Any:
    return me.ask(target, "AllocateExtents", raw.allocation(target.model, PAGE))


@row(
    "B3",
    "release S's extent",
    "yes EXTENT_NOT_FOUND EXTENT_NOT_FOUND UNIMPLEMENTED EACCES EXTENT_NOT_FOUND EXTENT_NOT_FOUND",
    _OWN,
    transports=BOTH,
)
def release(me: Party, target: Any) -> Any:
    return me.ask(target, "ReleaseExtents", bpb.ReleaseExtentsRequest(extent_ids=[target.extent]))


@row(
    "B4",
    "declare under S's model without having joined it",
    "yes MODEL_NOT_FOUND MODEL_NOT_FOUND UNIMPLEMENTED EACCES MODEL_NOT_FOUND MODEL_NOT_FOUND",
    _JOINED,
    transports=BOTH,
)
def declare(me: Party, target: Any) -> Any:
    return me.ask(target, "DeclareMemory", bpb.DeclareMemoryRequest(model=target.model, declared_bytes=PAGE))


@row(
    "G2",
    "join S's model, then create a segment under it",
    "yes yes MODEL_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
    before=join,
)
@row(
    "G1",
    "create a segment under S's model without having joined it",
    "yes MODEL_NOT_FOUND MODEL_NOT_FOUND UNIMPLEMENTED EACCES MODEL_NOT_FOUND MODEL_NOT_FOUND",
    _JOINED,
    transports=BOTH,
)
def create(me: Party, target: Any) -> Any:
    return me.ask(target, "CreateSegment", raw.segment_of(target.model, "new", PAGE))


@row(
    "G3",
    "seal the segment that S writes",
    "yes SEGMENT_NOT_FOUND SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES SEGMENT_NOT_FOUND SEGMENT_NOT_FOUND",
    _OWN,
    transports=BOTH,
)
def seal(me: Party, target: Any) -> Any:
    return me.ask(target, "SealSegment", bpb.SealSegmentRequest(generation=target.draft_generation))


@row(
    "G4",
    "attach S's sealed segment",
    "yes yes SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
)
def attach(me: Party, target: Any) -> Any:
    return me.ask(target, "AttachSegment", bpb.AttachSegmentRequest(name=target.sealed))


@row(
    "G5",
    "attach it by its own name alone (`-` for the model)",
    "yes yes SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
)
def attach_by_label(me: Party, target: Any) -> Any:
    name = f"{target.tenant}/models/-/segments/{target.label}"
    return me.ask(target, "AttachSegment", bpb.AttachSegmentRequest(name=name))


@row(
    "G6",
    "detach S from a segment",
    "yes SEGMENT_NOT_FOUND SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES SEGMENT_NOT_FOUND SEGMENT_NOT_FOUND",
    _OWN,
    transports=BOTH,
)
def detach(me: Party, target: Any) -> Any:
    return me.ask(target, "DetachSegment", bpb.DetachSegmentRequest(generation=target.sealed_generation))


@row(
    "G7",
    "delete S's sealed segment",
    "yes yes SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
)
def delete(me: Party, target: Any) -> Any:
    return me.ask(target, "DeleteSegment", bpb.DeleteSegmentRequest(name=target.sealed))


@row(
    "G8",
    "delete the segment that S is writing",
    "yes yes SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
)
def delete_draft(me: Party, target: Any) -> Any:
    return me.ask(target, "DeleteSegment", bpb.DeleteSegmentRequest(name=target.draft))


# --- Deeds: looking ---


@row(
    "L1",
    "see the device and its sums (GetDevice)",
    "yes yes yes UNIMPLEMENTED EACCES yes yes",
    _DOOR,
)
def look(me: Party, target: Any) -> Any:
    return me.ask(target, "GetDevice", bpb.GetDeviceRequest())


@row(
    "L2",
    "see S's model in ListModels",
    "yes yes not-shown UNIMPLEMENTED EACCES yes yes",
    _TENANT,
)
def find_model(me: Party, target: Any) -> Any:
    answer = me.ask(target, "ListModels", bpb.ListModelsRequest(page_size=1000))
    return answer if isinstance(answer, Status) else _shown(answer.models, target.model)


@row(
    "L3",
    "see S in ListSessions",
    "yes yes not-shown UNIMPLEMENTED EACCES yes yes",
    _TENANT,
)
def find_session(me: Party, target: Any) -> Any:
    answer = me.ask(target, "ListSessions", bpb.ListSessionsRequest(page_size=1000))
    return answer if isinstance(answer, Status) else _shown(answer.sessions, target.session)


@row(
    "L4",
    "see S's segment in ListSegments",
    "yes yes not-shown UNIMPLEMENTED EACCES yes yes",
    _TENANT,
)
def find_segment(me: Party, target: Any) -> Any:
    answer = me.ask(target, "ListSegments", bpb.ListSegmentsRequest(page_size=1000))
    return answer if isinstance(answer, Status) else _shown(answer.segments, target.sealed)


def _shown(rows: Any, name: str) -> str:
    return "yes" if any(row.name == name for row in rows) else "not-shown"


@row(
    "L6",
    "read `/metrics`, which shows every tenant's models",
    "yes yes yes yes yes ENETUNREACH ENETUNREACH",
    "kernel: 127.0.0.1 of the daemon's network namespace",
)
def scrape(me: Party, target: Any) -> Any:
    """Who can, sees everybody: S's model is there by name."""
    url = urlsplit(target.metrics_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=raw.SECONDS)
    try:
        connection.request("GET", url.path)
        body = connection.getresponse().read().decode()
    finally:
        connection.close()
    assert f'model="{target.model_id}"' in body
    return "yes"


@row(
    "L5",
    "ask for the health, without a token",
    "yes yes yes yes EACCES yes yes",
    _DOOR,
)
def health(me: Party, target: Any) -> Any:
    with grpc.insecure_channel(f"unix:{me.door}/grpc.sock") as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=raw.SECONDS)


@row(
    "L7",
    "see how much could be borrowed for S's model (GetAvailable)",
    "yes yes MODEL_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
)
def see_available(me: Party, target: Any) -> Any:
    return me.ask(target, "GetAvailable", bpb.GetAvailableRequest(model=target.model))


@row(
    "L8",
    "see S's model by its name (GetModel)",
    "yes yes MODEL_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
)
def get_model(me: Party, target: Any) -> Any:
    return me.ask(target, "GetModel", bpb.GetModelRequest(name=target.model))


# --- Deeds: the operator's ---


@row(
    "A1",
    "AdminService, each call that reads",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED yes EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def read_all(me: Party, target: Any) -> Any:
    """Each call of AdminService that reads: all are answered alike."""
    calls = {
        "GetDevice": bpb.GetDeviceRequest(),
        "ListModels": bpb.ListModelsRequest(page_size=1000),
        "ListSessions": bpb.ListSessionsRequest(page_size=1000),
        "ListSegments": bpb.ListSegmentsRequest(page_size=1000),
        "ListTenants": apb.ListTenantsRequest(),
        "ListQuotas": apb.ListQuotasRequest(),
        "ListProcesses": apb.ListProcessesRequest(),
    }
    (one,) = {outcome(functools.partial(raw.admin_call, me.door, *call))[0] for call in calls.items()}
    return one


@row(
    "A2",
    "AdminService, SetQuota",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED yes EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def set_quota(me: Party, target: Any) -> Any:
    return raw.admin_call(me.door, "SetQuota", apb.SetQuotaRequest(name=target.model, limit_bytes=64 * PAGE))


@row(
    "A3",
    "AdminService, DeleteSegment",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED yes EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def delete_any(me: Party, target: Any) -> Any:
    return raw.admin_call(me.door, "DeleteSegment", bpb.DeleteSegmentRequest(name=target.sealed))


@row(
    "A5",
    "AdminService, ForgetSession of an open session",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED SESSION_NOT_DETACHED EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def forget_open(me: Party, target: Any) -> Any:
    return raw.admin_call(me.door, "ForgetSession", apb.ForgetSessionRequest(name=target.session))


@row(
    "A6",
    "AdminService, Drain and Undrain",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED yes EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def drain_and_undrain(me: Party, target: Any) -> Any:
    drained = raw.admin_call(me.door, "Drain", apb.DrainRequest())
    undrained = raw.admin_call(me.door, "Undrain", apb.UndrainRequest())
    assert type(drained) is type(undrained)
    return undrained


@row(
    "A7",
    "AdminService, EvictSession of a session that has ended",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED SESSION_NOT_EVICTABLE EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def evict_ended(me: Party, target: Any) -> Any:
    """S itself is a session of the process that runs the tests."""
    return raw.admin_call(me.door, "EvictSession", apb.EvictSessionRequest(name="sessions/1"))


@row(
    "A4",
    "open `admin/grpc.sock`",
    "- EACCES EACCES yes EACCES ENOENT ENOENT",
    "kernel: `admin/` is the daemon's user's, 0700; a mount",
    kernel=True,
)
def open_admin(me: Party, target: Any) -> Any:
    return raw.admin_call(Path(target.admin), "GetDevice", bpb.GetDeviceRequest())


# --- Deeds: secrets ---


@row(
    "T1",
    "call without a token",
    "TOKEN_REQUIRED TOKEN_REQUIRED TOKEN_REQUIRED UNIMPLEMENTED EACCES TOKEN_REQUIRED TOKEN_REQUIRED",
    "broker: the register of tokens",
)
def ask_without(me: Party, target: Any) -> Any:
    return me.ask(target, "ListModels", bpb.ListModelsRequest(), token="")


@row(
    "T2",
    "list with S's token",
    "yes yes TOKEN_REJECTED UNIMPLEMENTED EACCES yes yes",
    "broker: a token is good at its own endpoint alone",
)
def ask_as_s(me: Party, target: Any) -> Any:
    return me.ask(target, "ListModels", bpb.ListModelsRequest(), token=target.token)


@row(
    "T3",
    "release S's extent with S's token",
    "yes yes TOKEN_REJECTED UNIMPLEMENTED EACCES yes yes",
    "broker: a token is good at its own endpoint alone",
)
def release_as_s(me: Party, target: Any) -> Any:
    return me.ask(target, "ReleaseExtents", bpb.ReleaseExtentsRequest(extent_ids=[target.extent]), token=target.token)


@row(
    "T4",
    "get memory with S's token",
    "yes S-gets-it TOKEN_REJECTED UNIMPLEMENTED EACCES S-gets-it S-gets-it",
    "broker: descriptors leave on the connection of the session that is charged",
)
def borrow_as_s(me: Party, target: Any) -> Any:
    """S is charged, and nobody but S gets the memory."""
    answer = me.ask(target, "AllocateExtents", raw.allocation(target.model, PAGE), token=target.token)
    if isinstance(answer, Status):
        return answer
    at_me = me.session is not None and raw.is_readable(me.session.sock)
    return "yes" if at_me else "S-gets-it"


@row(
    "T5",
    "take S's session up with S's token",
    "- TOKEN_REJECTED TOKEN_REJECTED ENOENT EACCES TOKEN_REJECTED TOKEN_REJECTED",
    "broker: a session is resumed by its own process, at its own endpoint",
)
def resume_s(me: Party, target: Any) -> Any:
    with raw.Connection(me.door) as line:
        line.send(pb.Frame(request_id=1, hello=pb.Hello(protocol_version=1, resume_token=target.token)))
        frame = line.receive().frame
        return frame.reply.error if frame.HasField("reply") else frame


@row(
    "D1",
    "map, read and write an extent, by a descriptor that one was handed",
    "yes yes yes yes yes yes yes",
    "nothing: a descriptor is a bearer capability",
)
def map_extent(me: Party, target: Any) -> Any:
    with mmap.mmap(target.extent_descriptor, PAGE) as memory:
        assert memory[: len(MARK)] == MARK
        memory[100:104] = b"mine"
    return "yes"


@row(
    "D2",
    "map and read a sealed segment, by a descriptor that one was handed",
    "yes yes yes yes yes yes yes",
    "nothing: a descriptor is a bearer capability",
)
def map_sealed(me: Party, target: Any) -> Any:
    with mmap.mmap(target.sealed_descriptor, PAGE, prot=mmap.PROT_READ) as memory:
        assert memory[: len(MARK)] == MARK
    return "yes"


@row(
    "D3",
    "write to a sealed segment, by its descriptor, with the host driver",
    "EPERM EPERM EPERM EPERM EPERM EPERM EPERM",
    "kernel: the memfd's seals; on a GPU nothing",
)
def write_sealed(me: Party, target: Any) -> Any:
    """By a mapping, by a write, by a hole, by a descriptor opened again: all are refused alike."""
    descriptor, libc = target.sealed_descriptor, ctypes.CDLL(None, use_errno=True)

    def punch() -> None:
        if libc.fallocate(descriptor, 3, ctypes.c_long(0), ctypes.c_long(PAGE)):
            raise OSError(ctypes.get_errno(), "fallocate")

    def anew() -> None:
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            os.pwrite(again, b"mine", 0)
        finally:
            os.close(again)

    tries: list[Callable[[], Any]] = [lambda: mmap.mmap(descriptor, PAGE), lambda: os.pwrite(descriptor, b"mine", 0)]
    (one,) = {outcome(each)[0] for each in [*tries, punch, anew]}
    return one


# --- Deeds: files and processes ---


@row(
    "S1",
    "open a session at S's endpoint",
    "- yes EACCES yes EACCES yes yes",
    _DOOR,
    transports=HANDOFF,
    kernel=True,
)
def enter(me: Party, target: Any) -> Any:
    return greet(me.theirs)


@row(
    "S2",
    "open one where the mode admits all and `uids` names the tenant's user alone",
    "- yes ENDPOINT_FORBIDDEN ENDPOINT_FORBIDDEN ENDPOINT_FORBIDDEN ENOENT ENOENT",
    "broker: `uids` against SO_PEERCRED; a mount",
    transports=HANDOFF,
    kernel=True,
)
def enter_listed(me: Party, target: Any) -> Any:
    return greet(Path(target.listed))


@row(
    "F1",
    "replace the endpoint's sockets",
    "- EACCES EACCES yes EACCES EROFS yes",
    _DIRECTORY,
    kernel=True,
)
def replace_sockets(me: Party, target: Any) -> Any:
    """Put something else where the broker's sockets are: who can could pose as the broker. Then put them back."""
    tries = [functools.partial(_move_away, me.theirs / name) for name in ("handoff.sock", "grpc.sock")]
    (one,) = {outcome(each)[0] for each in tries}
    return one


def _move_away(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.with_suffix(".away").rename(path)


@row(
    "F2",
    "replace the endpoint's directory, or those above it",
    "- EACCES EACCES yes EACCES ENOENT ENOENT",
    "kernel: as F1; only the endpoint is mounted",
    kernel=True,
)
def replace_directory(me: Party, target: Any) -> Any:
    """The same one floor higher: the endpoint, the tenants, the device."""
    endpoint = Path(target.endpoint)
    paths = (endpoint, endpoint.parent, endpoint.parent.parent)
    (one,) = {outcome(functools.partial(_move_away, path))[0] for path in paths}
    return one


@row(
    "F3",
    "change the sockets' mode, to let others in",
    "- yes EPERM yes EPERM EROFS yes",
    "kernel: the sockets' owner; a read-only mount",
    kernel=True,
)
def change_mode(me: Party, target: Any) -> Any:
    for name in ("handoff.sock", "grpc.sock"):
        path = me.theirs / name
        path.chmod(path.stat().st_mode & 0o777)
    return "yes"


@row(
    "F4",
    "make the mount of the endpoint writable",
    "- - - - - EPERM -",
    "kernel: a container has no CAP_SYS_ADMIN, unless it is privileged",
    kernel=True,
)
def remount(me: Party, target: Any) -> Any:
    """MS_REMOUNT | MS_BIND, without MS_RDONLY."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(None, bytes(me.theirs), None, 32 | 4096, None):
        raise OSError(ctypes.get_errno(), "mount")
    return "yes"


@row(
    "F5",
    "read `state/`, or take its lock",
    "- EACCES EACCES yes EACCES ENOENT ENOENT",
    "kernel: `state/` is the daemon's user's, 0700; a mount",
    kernel=True,
)
def read_state(me: Party, target: Any) -> Any:
    state = Path(target.state)
    tries: list[Callable[[], Any]] = [
        lambda: os.listdir(state),
        (state / "epoch").read_bytes,
        lambda: _lock(state / "lock"),
    ]
    (one,) = {outcome(each)[0] for each in tries}
    return one


def _lock(path: Path) -> None:
    """Open the daemon's lock, which the daemon has: who could take it could keep the next daemon out."""
    with path.open("r+") as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@row(
    "F6",
    "signal the daemon",
    "- EPERM EPERM yes EPERM ESRCH ESRCH",
    "kernel: the user; the PID namespace",
    kernel=True,
)
def signal_daemon(me: Party, target: Any) -> Any:
    os.kill(target.pid, 0)
    return "yes"


@row(
    "F7",
    "read the daemon's descriptors, its environment, or its log by its stderr",
    "- EACCES EACCES yes EACCES ENOENT ENOENT",
    "kernel: the user; the PID namespace",
    kernel=True,
)
def reach_into_daemon(me: Party, target: Any) -> Any:
    """Among its descriptors are those of every segment; its stderr is its log."""
    process = Path("/proc", str(target.pid))
    tries: list[Callable[[], Any]] = [
        lambda: os.listdir(process / "fd"),
        (process / "environ").read_bytes,
        lambda: (process / "fd" / "2").open("rb").close(),
    ]
    (one,) = {outcome(each)[0] for each in tries}
    return one


def needs_root(row: Row, who: str) -> bool:
    """Other users and other namespaces are root's to make."""
    return who in ("user", "ro", "rw") or (row.kernel and who in ("same", "other"))


# --- What came of it ---


def outcome(deed: Callable[[], Any]) -> tuple[str, str]:
    """Do it; return what came of it in one word, and all that was said, where a secret may not be."""
    try:
        answer = deed()
    except OSError as error:
        return errno.errorcode[error.errno or 0], str(error)
    except grpc.RpcError as error:
        return _of_transport(error), str(error)
    if isinstance(answer, Status):
        return raw.reason(answer), str(answer)
    return (answer, "") if isinstance(answer, str) else ("yes", str(answer))


def _of_transport(error: Any) -> str:
    """Return which error the kernel gave gRPC, if it did."""
    match = re.search(r"error: ([A-Z][a-z ]+)$", error.details() or "")
    numbers = [number for number in errno.errorcode if match and os.strerror(number) == match[1]]
    return errno.errorcode[numbers[0]] if numbers else str(error.code().name)


# --- A process that does as it is told ---


def play(channel: int, uid: int, door: str, theirs: str) -> None:
    """Become a user, then do what comes on the channel, packet by packet, until it ends."""
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    party = Party(Path(door), Path(theirs))
    with socket.socket(fileno=channel) as control:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 65_536, 2)
            if not data:
                return
            try:
                answer = {"answer": _do(party, json.loads(data), descriptors)}
            except Exception:  # noqa: BLE001 - the test that asked shall see it
                answer = {"failed": traceback.format_exc()}
            handoff.close_all(descriptors)
            control.send(json.dumps(answer).encode()[:65_536])


def _do(party: Party, order: dict[str, Any], descriptors: list[int]) -> Any:
    party.transport = order.get("transport", "grpc")
    if order["do"] in ("begin", "end"):
        return getattr(party, order["do"])()
    target = SimpleNamespace(**order["target"])
    if descriptors:
        target.extent_descriptor, target.sealed_descriptor = descriptors
    return perform(party, order["do"], order["row"], target)


def perform(party: Party, which: str, number: str, target: Any) -> tuple[str, str]:
    """Do a row's deed, or what comes before it (by gRPC: registering has no frame)."""
    deed = getattr(ROWS[number], which)
    if which == "before":
        party.transport = "grpc"
    return outcome(lambda: deed(party, target))


if __name__ == "__main__":
    play(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
