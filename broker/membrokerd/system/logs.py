"""The log: one line for each event, its data in fields, as text for people or JSON for programs.

Owns the format of a line and the rule that turns the core's facts into lines. It must never print a token: no fact
has one, and a field that is named for one is a bug. `log_writer` writes the lines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, get_args

from membroker.wire.names import session_name

from ..core import effects as fx
from ..core import facts as ft
from ..core.denied import Denied
from ..core.names import ModelName
from .log_writer import LogWriter, is_journal
from .pods import NO_POD, Pod

_LOGGER = logging.getLogger("membrokerd")
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_BARE = re.compile(r"[A-Za-z0-9._/:@+-]+")
_SECRET = re.compile(r"token|secret|password")

Fields = Mapping[str, Any]

BURST_LINES, LINES_A_SECOND = 5_000, 100
"""Bounds of INFO lines about lifecycles: a thousand workers may connect at once, but no worker may fill the log by
connecting again and again."""
KEPT_LINES, LINES_OF_TENANT = 1_000, 100
"""Lines that a tenant leaves to the others, and how many it may have of those. They come again as fast as a tenth of
all: what one tenant does over and over does not hide what happens to another."""


class Allowance:
    """How many lines may be written now, of each tenant. `now` is in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()
        self._lines = float(BURST_LINES)
        self._tenants: dict[str, tuple[float, float]] = {}
        """By tenant: its lines of those that are kept, and when it was counted."""
        self.unsaid = 0
        """How many were refused since the last one that was allowed."""

    def take(self, tenant: str) -> bool:
        """Return whether one more line about a tenant may be written."""
        now = self._now()
        self._lines = min(BURST_LINES, self._lines + (now - self._at) * LINES_A_SECOND)
        self._at = now
        if self._lines < KEPT_LINES + 1:
            lines, at = self._tenants.get(tenant, (float(LINES_OF_TENANT), now))
            lines = min(LINES_OF_TENANT, lines + (now - at) * LINES_A_SECOND / 10)
            if self._lines < 1 or lines < 1:
                self.unsaid += 1
                return False
            if len(self._tenants) >= KEPT_LINES:
                self._tenants.clear()
            self._tenants[tenant] = lines - 1, now
        self._lines -= 1
        return True


@dataclass(slots=True)
class _Life:
    """What the line at a session's end says of it. `at` is in nanoseconds of CLOCK_MONOTONIC."""

    tenant: str
    pid: int
    client: str
    at: int
    cause: str = ""
    pod: Pod = NO_POD


_ENDINGS = {
    "goodbye": "closed in order",
    "process died": "its process died",
    "forgotten": "an operator forgot it",
}
"""Why a session ended, by the causes of its steps; the other steps do not end one."""
_lives: dict[int, _Life] = {}
"""The sessions that are there."""
_allowance = Allowance()
_writer: LogWriter | None = None
not_logged: set[type[ft.Fact]] = set()
"""The kinds of facts that have no line at the level that is set."""


def configure(level: str, line_format: str, descriptor: int = 2, gpu: str = "") -> None:
    """Send every log line of this process from `level` on to `descriptor` (stderr), as `text` or `json`.

    `gpu` is named in each, if given.

    Other libraries' lines are logged from WARNING on. In the systemd journal each line has its priority.
    """
    global _writer
    if _writer is not None:
        _writer.flush()
        _writer.close()
    _writer = LogWriter(descriptor)
    _writer.setFormatter(
        _Formatter(
            {"text": _text_line, "json": _json_line}[line_format],
            {"gpu": gpu} if gpu else {},
            has_priority=is_journal(descriptor),
        )
    )
    _writer.addFilter(_is_worth_a_line)
    root = logging.getLogger()
    root.handlers = [_writer]
    root.setLevel(logging.WARNING)
    set_level(level)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Leave out gRPC's errors, with a traceback, about calls whose answers found nobody.

    Such a call was cancelled because the daemon stopped, or its peer was gone: a peer could fill the log.
    """
    error = record.exc_info[1] if record.exc_info else None
    found_nobody = isinstance(error, asyncio.CancelledError) or type(error).__name__ == "ExecuteBatchError"
    return not (record.name.startswith("grpc") and found_nobody)


def set_level(level: str) -> None:
    """Log events from this level on: `debug`, `info`, `warning` or `error`."""
    _LOGGER.setLevel(level.upper())
    not_logged.clear()
    not_logged.update(kind for kind in get_args(ft.Fact) if not _LOGGER.isEnabledFor(_level_of(kind)))


def flush() -> None:
    """Wait until every line so far is written; FLUSH_SECONDS at most."""
    if _writer is not None:
        _writer.flush()


def dropped() -> int:
    """Return how many lines were dropped since the start."""
    return _writer.dropped if _writer is not None else 0


def log(event: str, /, **fields: Any) -> None:
    """Log an event."""
    _emit(logging.INFO, event, fields)


def debug(event: str, /, **fields: Any) -> None:
    """Log a detail that helps to find a fault."""
    _emit(logging.DEBUG, event, fields)


def warn(event: str, /, **fields: Any) -> None:
    """Log what an operator should know and may have to act on."""
    _emit(logging.WARNING, event, fields)


def fault(error: BaseException, /, **fields: Any) -> None:
    """Log a bug of the daemon itself, with its traceback."""
    _emit(logging.ERROR, "a fault of the broker", {**fields, "error": repr(error), "traceback": _trace(error)})


def log_denied(session: int, method: str, denied: Denied) -> None:
    """Log a refused request with its numbers, at DEBUG: to a tenant a refusal is an ordinary answer."""
    if _LOGGER.isEnabledFor(logging.DEBUG):
        numbers = {name: value for name, value in denied.numbers.items() if not _SECRET.search(name)}
        fields = {"session": session_name(session), "method": method, "reason": denied.reason.value}
        _emit(logging.DEBUG, "request refused", fields | numbers)


def log_wait(waited: fx.Waited) -> None:
    """Log a request that waited for memory and was refused, at DEBUG like other refusals."""
    if waited.result == "refused":
        fields = {"model": str(waited.name), "location": waited.location, "size_bytes": waited.size}
        _emit(logging.DEBUG, "wait refused", fields | {"waited_ms": waited.waited_ns // 1_000_000})


def log_recall(recalled: fx.Recalled) -> None:
    """Log the end of a recall: at WARNING if it is late or brought nothing, as far as the allowance goes."""
    is_late = recalled.result == "late"
    is_trouble = is_late or not recalled.returned
    if is_trouble and not _allowance.take(recalled.name.tenant):
        return
    fields: dict[str, Any] = {
        "session": session_name(recalled.session),
        "model": str(recalled.name),
        "location": recalled.location,
    }
    if (life := _lives.get(recalled.session)) is not None:
        fields |= {"pid": life.pid, **life.pod.fields()}
    numbers = {"asked_bytes": recalled.size, "returned_bytes": recalled.returned}
    event = "a recall of memory has ended"
    if is_trouble:
        event = "a worker is late for a recall of memory" if is_late else "a worker keeps all that was recalled"
    after = {"result": recalled.result, "after_ms": recalled.after_ns // 1_000_000}
    _emit(logging.WARNING if is_trouble else logging.DEBUG, event, fields | numbers | after)


def know_session(session: int, tenant: str, pid: int, client: str, began_at: int, pod: Pod = NO_POD) -> None:
    """Remember for the line at its end what a session is: one that an earlier daemon began."""
    _lives[session] = _Life(tenant, pid, client, began_at, pod=pod)


def know_pod(session: int, pod: Pod) -> None:
    """Keep the pod of a session for the line at its end."""
    if (life := _lives.get(session)) is not None:
        life.pod = pod


def log_pod(session: int) -> None:
    """Log the pod of a session, as far as the allowance goes."""
    life = _lives.get(session)
    if life is not None and _allowance.take(life.tenant):
        fields = {"session": session_name(session), "tenant": life.tenant, "pid": life.pid}
        log("a session is of a pod", **fields, **life.pod.fields())


def log_fact(fact: ft.Fact) -> None:
    """Log a change in the books: lifecycles at INFO, as far as the allowance goes, the rest at DEBUG.

    At DEBUG every fact is logged: somebody is looking for a fault.
    """
    level, life = _level_of(type(fact)), None
    if isinstance(fact, ft.SessionBegan):
        know_session(fact.session, fact.tenant, fact.pid, fact.client, fact.at)
    elif isinstance(fact, ft.SessionMoved):
        if (known := _lives.get(fact.session)) is not None:
            known.cause = _ENDINGS.get(fact.cause, known.cause)
        level = logging.DEBUG if fact.cause in _PLAIN else level
    elif isinstance(fact, ft.SessionEnded):
        life = _lives.pop(fact.session, None)
    if not _LOGGER.isEnabledFor(level):
        return
    if not _LOGGER.isEnabledFor(logging.DEBUG):
        if not _allowance.take(_tenant_of(fact, life)):
            return
        if _allowance.unsaid:
            unsaid, _allowance.unsaid = _allowance.unsaid, 0
            warn("lines about sessions, models and segments were left out: there were too many", lines=unsaid)
    fields = dict(_fields_of(fact))
    if isinstance(fact, ft.SessionEnded) and life is not None:
        fields |= {"tenant": life.tenant, "pid": life.pid, "client": life.client, "why": life.cause}
        fields |= {"seconds": round((fact.at - life.at) / 1e9, 1)}
        fields |= life.pod.fields()
    _emit(level, _event_of(type(fact)), fields)


def _tenant_of(fact: ft.Fact, life: _Life | None) -> str:
    """Return the tenant that a fact is about; "" if it is about none."""
    life = life or _lives.get(getattr(fact, "session", 0))
    name = getattr(fact, "name", None)
    if isinstance(name, ModelName):
        return name.tenant
    return life.tenant if life is not None else ""


def _emit(level: int, event: str, fields: Fields) -> None:
    assert not any(_SECRET.search(name) for name in fields), f"a secret in a log line: {event} {list(fields)}"
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, "%s", event, extra={"fields": fields})


# --- Facts ---

_LIFECYCLES = frozenset(
    (
        *(ft.SessionBegan, ft.SessionMoved, ft.SessionEnded, ft.LocationSettled, ft.QuotaSet),
        *(ft.ModelBegan, ft.ModelAsked, ft.ModelJoined, ft.ModelLeft, ft.ModelEnded),
        *(ft.SegmentBegan, ft.SegmentMoved, ft.SegmentEnded),
    )
)
"""The facts that are logged at INFO; all others at DEBUG."""
_PLAIN = frozenset(("goodbye", "last packet", "settled", "forgotten"))
"""Steps of a session of which the line at its end tells enough."""
_NOT_SHOWN = frozenset(("at", "process", "endpoint", "token_hash", "idle_since"))
_BYTES = frozenset(("virtual_capacity", "limit", "guarantee", "unaccounted"))
_RENAMED = {"name": "model", "segment": "generation", "label": "segment"}


def _level_of(kind: type[ft.Fact]) -> int:
    return logging.INFO if kind in _LIFECYCLES else logging.DEBUG


def _event_of(kind: type[ft.Fact]) -> str:
    """Return `session began` for `SessionBegan`."""
    return re.sub(r"\B([A-Z])", r" \1", kind.__name__).lower()


def _fields_of(fact: ft.Fact) -> Iterator[tuple[str, Any]]:
    """Yield a fact's fields as a line shows them: resource names, sizes as `…_bytes`, and a count instead of ids."""
    for name in (each.name for each in fields(fact)):
        value = getattr(fact, name)
        if name in _NOT_SHOWN:
            continue
        if name == "ids":
            yield "count", len(value)
        elif isinstance(value, Mapping):  # `limits`, by location
            yield from ((f"{location}_{name[:-1]}_bytes", size) for location, size in value.items())
        elif name in ("session", "writer"):
            yield name, session_name(value)
        elif name in _BYTES:
            yield f"{name}_bytes", value
        else:
            yield _RENAMED.get(name, name), str(value) if isinstance(value, ModelName) else value


# --- Lines ---


class _Formatter(logging.Formatter):
    """One line for each record; other libraries' records have a message and no fields.

    `has_priority`: each line begins with its priority, which systemd's journal strips (sd-daemon(3)).
    """

    def __init__(
        self, line: Callable[[str, str, str, Fields], str], common: Fields, *, has_priority: bool = False
    ) -> None:
        super().__init__()
        self._line, self._common, self._has_priority = line, common, has_priority

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {**self._common, **getattr(record, "fields", {})}
        if record.name != _LOGGER.name:
            fields["logger"] = record.name
        if record.exc_info and record.exc_info[1]:
            fields["traceback"] = _trace(record.exc_info[1])
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = self._line(at.replace("+00:00", "Z"), record.levelname.lower(), record.getMessage(), fields)
        return f"<{_PRIORITIES[record.levelno]}>{line}" if self._has_priority else line


def _json_line(time: str, level: str, event: str, fields: Fields) -> str:
    return json.dumps({"time": time, "level": level, "event": event, **fields}, default=str)


def _text_line(time: str, level: str, event: str, fields: Fields) -> str:
    """Return the line for people. It is always one line: a peer's text cannot forge another."""
    shown = event if event.isprintable() else json.dumps(event)
    return " ".join([time, level.upper(), shown, *(f"{name}={_shown(value)}" for name, value in fields.items())])


def _shown(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else json.dumps(value, default=str)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
