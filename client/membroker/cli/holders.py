"""The sessions and segments that hold memory of a device or a tenant that is drained, and the wait for them.

Owns the lines that say which still hold some, and which have released it. Must never order anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..admin import Admin
from ..types import SegmentStatus, SessionStatus
from ..vmm.sizes import format_exact
from . import tables

LOOK_SECONDS = 0.5
"""How often a drain that is waited for is looked at."""


@dataclass(frozen=True, slots=True)
class Held:
    """What is charged, and the sessions and segments that have it; false if there is nothing to wait for.

    `ends`: nothing is charged, and what is drained is not gone yet.
    """

    charged: int = 0
    sessions: Sequence[SessionStatus] = ()
    segments: Sequence[SegmentStatus] = ()
    ends: bool = False

    def __bool__(self) -> bool:
        return bool(self.charged or self.ends)


def of_device(admin: Admin) -> Held:
    """Return what is held of the device now."""
    device, sessions, segments = admin.device(), admin.sessions(), admin.segments()
    charged = sum(books.lent_bytes + books.releasing_bytes for books in device.locations.values())
    return Held(charged, _holding(sessions), segments) if charged else Held()


def of_tenant(admin: Admin, name: str) -> Held:
    """Return what is held of a tenant that is being deleted, `tenants/…`; nothing once it is gone."""
    found = [tenant for tenant in admin.tenants() if tenant.name == name and tenant.deleting]
    if not found:
        return Held()
    sessions = [session for session in admin.sessions() if session.tenant == name]
    segments = [segment for segment in admin.segments() if segment.name.startswith(f"{name}/")]
    charged = sum(books.used_bytes for books in found[0].books.values())
    return Held(charged, _holding(sessions), segments, ends=True)


def _holding(sessions: Sequence[SessionStatus]) -> list[SessionStatus]:
    return [
        session for session in sessions if session.segments or any(books.used_bytes for books in session.books.values())
    ]


def still(held: Held) -> Iterator[str | tables.TextTable]:
    """Yield which sessions and segments still hold memory."""
    if held.charged:
        yield "still holding memory:"
        if held.sessions:
            yield tables.sessions_table(held.sessions)
        if held.segments:
            yield tables.segments_table(held.segments)


def sayer(json: bool) -> Callable[[str], None]:
    """Return what shows a line of a wait: nothing does if the answer is JSON."""
    return (lambda _: None) if json else (lambda line: print(line, flush=True))


def wait(look: Callable[[], Held], held: Held, seconds: float | None, say: Callable[[str], None]) -> Held:
    """Wait until nothing is held, or for so long; say which sessions have released all. Return what is still held."""
    until = None if seconds is None else time.monotonic() + seconds
    while held:
        time.sleep(LOOK_SECONDS if until is None else max(0.0, min(LOOK_SECONDS, until - time.monotonic())))
        before, held = held, look()
        if until is not None and time.monotonic() >= until:
            return held
        left = {session.name for session in held.sessions} | {segment.name for segment in held.segments}
        for session in before.sessions:
            if session.name not in left:
                size = format_exact(sum(books.used_bytes for books in session.books.values()))
                tenant = tables.short_name(session.tenant)
                say(f"{session.name} of {tenant}, {tables.process_of(session)}, has released {size}")
        for segment in before.segments:
            if segment.name not in left:
                say(f"{tables.short_name(segment.name)} is gone: {format_exact(segment.size_bytes)}")
    return held
