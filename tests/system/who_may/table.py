"""What a row of the permission table is, and the party that does its deed.

S is a session of the tenant red that holds memory and segments. Every deed is about S. A party is a process of its own,
with a user, a mount namespace and an endpoint of its own where that matters. So the same refuses it that would refuse a
stranger: the kernel, or the broker.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from google.rpc.status_pb2 import Status
from tests.support import raw

from membroker.v1 import handoff_pb2 as pb

PAGE = 2 << 20
MARK = b"S was here"

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
    kind.message_type.name.removesuffix("Request"): kind.name
    for kind in pb.Frame.DESCRIPTOR.oneofs_by_name["kind"].fields
    if kind.message_type.name.endswith("Request")
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
    calls: tuple[str, ...] = ()
    """The calls of either service that the row is about, if it is about what they do."""

    def transports_of(self, who: str) -> tuple[str, ...]:
        """The admin endpoint has no handoff socket."""
        return GRPC if who == "admin" and self.transports == BOTH else self.transports


ROWS: dict[str, Row] = {}
GROUPS: Mapping[str, str] = {
    "SM": "Sessions and models",
    "B": "Memory",
    "G": "Segments",
    "L": "Reading the books",
    "A": "What only the operator may do",
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
    calls: tuple[str, ...] = (),
) -> Callable[[Deed], Deed]:
    """Put a deed into the table.

    `outcomes` are in the order of WHO: "yes", a refusal, or "-" where there is nothing to ask. `kernel` says that the
    kernel is asked, about a process: then tenants' processes have users of their own. `before` is done first, and may
    change the books.
    """
    cells = dict(zip(WHO, outcomes.split(), strict=True))

    def put(deed: Deed) -> Deed:
        assert number not in ROWS
        ROWS[number] = Row(number, what, cells, enforced, deed, transports, kernel, before, calls)
        return deed

    return put


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


def needs_root(row: Row, who: str) -> bool:
    """Other users and other namespaces are root's to make."""
    return who in ("user", "ro", "rw") or (row.kernel and who in ("same", "other"))


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


def alike(*deeds: Callable[[], Any]) -> str:
    """Do them all; return what came of each, which is the same."""
    (one,) = {outcome(deed)[0] for deed in deeds}
    return one


def _of_transport(error: Any) -> str:
    """Return which error the kernel gave gRPC, if it did."""
    match = re.search(r"error: ([A-Z][a-z ]+)$", error.details() or "")
    numbers = [number for number in errno.errorcode if match and os.strerror(number) == match[1]]
    return errno.errorcode[numbers[0]] if numbers else str(error.code().name)


def obey(party: Party, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
    """Do a row's deed, or what comes before it (by gRPC), or begin or end; return what came of it."""
    if order["do"] in ("begin", "end"):
        return getattr(party, order["do"])()
    target = SimpleNamespace(**order["target"])
    if descriptors:
        target.extent_descriptor, target.sealed_descriptor = descriptors
    party.transport = "grpc" if order["do"] == "before" else order["transport"]
    deed = getattr(ROWS[order["row"]], order["do"])
    return outcome(lambda: deed(party, target))
