"""What the daemon says: one line for each event, its data in fields, as text for people or JSON for programs.

Owns the format of a line and the one table from the core's facts to lines. It must never print a token: no fact
has one, and a field that is named for one is a bug. Lines are written by `log_writer`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from membroker.wire.names import session_name

from ..config.config import LogConfig
from ..core import facts as ft
from ..core.denied import Denied
from .log_writer import Writer

_LOGGER = logging.getLogger("membrokerd")
_BARE = re.compile(r"[A-Za-z0-9._/:@+-]+")
_SECRET = re.compile(r"token|secret|password")

Fields = Mapping[str, Any]

BURST_LINES, LINES_A_SECOND = 5_000, 100
"""Lines about lifecycles at INFO: a thousand workers may come at once; nobody may fill the log by coming and going."""


class Allowance:
    """How many lines may be written now. `now` is in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()
        self._lines = float(BURST_LINES)
        self.unsaid = 0
        """How many were refused since the last that was not."""

    def take(self) -> bool:
        """Say whether one more may be written."""
        now = self._now()
        self._lines = min(BURST_LINES, self._lines + (now - self._at) * LINES_A_SECOND)
        self._at = now
        if self._lines < 1:
            self.unsaid += 1
            return False
        self._lines -= 1
        return True


_allowance = Allowance()
_writer: Writer | None = None
unsaid: set[type[ft.Fact]] = set()
"""The kinds of facts that get no line at the level that is set."""


def configure(config: LogConfig, descriptor: int = 2) -> None:
    """Send every log line of this process to `descriptor` (stderr), as configured.

    What other libraries log comes from WARNING on: their chatter has no fields.
    """
    global _writer
    if _writer is not None:
        _writer.flush()
        _writer.close()
    _writer = Writer(descriptor)
    _writer.setFormatter(_Formatter({"text": _text_line, "json": _json_line}[config.format]))
    _writer.addFilter(_is_worth_a_line)
    root = logging.getLogger()
    root.handlers = [_writer]
    root.setLevel(logging.WARNING)
    set_level(config.level)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Leave out what gRPC says of a call that was cancelled when the daemon stopped: an error with a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name.startswith("grpc") and isinstance(error, asyncio.CancelledError))


def set_level(level: str) -> None:
    """Say events from this level on: `debug`, `info`, `warning` or `error`."""
    _LOGGER.setLevel(level.upper())
    unsaid.clear()
    unsaid.update(kind for kind, (at, _, _) in _FACTS.items() if not _LOGGER.isEnabledFor(at))


def flush() -> None:
    """Wait until every line so far is written; FLUSH_SECONDS at most."""
    if _writer is not None:
        _writer.flush()


def dropped() -> int:
    """Return how many lines were dropped since the start."""
    return _writer.dropped if _writer is not None else 0


def log(event: str, /, **fields: Any) -> None:
    """Say that something happened."""
    _emit(logging.INFO, event, fields)


def debug(event: str, /, **fields: Any) -> None:
    """Say what only somebody who looks for a fault wants to know."""
    _emit(logging.DEBUG, event, fields)


def warn(event: str, /, **fields: Any) -> None:
    """Say what an operator should know and may have to act on."""
    _emit(logging.WARNING, event, fields)


def fault(error: BaseException, /, **fields: Any) -> None:
    """Say that the daemon itself is at fault, with where."""
    _emit(logging.ERROR, "a fault of the broker", {**fields, "error": repr(error), "traceback": _trace(error)})


def log_denied(session: int, method: str, denied: Denied) -> None:
    """Say that a session's request was refused, with the numbers. For a tenant it is an answer, not an event: DEBUG."""
    if _LOGGER.isEnabledFor(logging.DEBUG):
        numbers = {name: value for name, value in denied.numbers.items() if not _SECRET.search(name)}
        fields = {"session": session_name(session), "method": method, "reason": denied.reason.value}
        _emit(logging.DEBUG, "request refused", fields | numbers)


def log_fact(fact: ft.Fact) -> None:
    """Say what changed in the books: lifecycles at INFO, as far as the allowance goes, the rest at DEBUG.

    Whoever wants to have it all looks for a fault, by DEBUG.
    """
    level, event, fields = _FACTS[type(fact)]
    if not _LOGGER.isEnabledFor(level):
        return
    if not _LOGGER.isEnabledFor(logging.DEBUG):
        if not _allowance.take():
            return
        if _allowance.unsaid:
            unsaid, _allowance.unsaid = _allowance.unsaid, 0
            warn("more came and went than is told: sessions, models and segments", lines=unsaid)
    _emit(level, event, fields(fact))


def _emit(level: int, event: str, fields: Fields) -> None:
    assert not any(_SECRET.search(name) for name in fields), f"a secret in a log line: {event} {list(fields)}"
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, "%s", event, extra={"fields": fields})


# --- Facts ---


def _session_began(fact: ft.SessionBegan) -> Fields:
    who = {"session": session_name(fact.session), "tenant": fact.tenant, "pid": fact.pid, "uid": fact.uid}
    return {**who, "observer": fact.observer, "client": fact.client}


def _session_moved(fact: ft.SessionMoved) -> Fields:
    return {"session": session_name(fact.session), "cause": fact.cause}


def _session_ended(fact: ft.SessionEnded) -> Fields:
    return {"session": session_name(fact.session)}


def _model_began(fact: ft.ModelBegan) -> Fields:
    limits = {f"{location}_limit_bytes": limit for location, limit in fact.limits.items()}
    return {"model": str(fact.name), "virtual_capacity_bytes": fact.virtual_capacity, **limits}


def _model_asked(fact: ft.ModelAsked) -> Fields:
    limits = {f"{location}_limit_bytes": limit for location, limit in fact.limits.items()}
    return {"model": str(fact.name), "virtual_capacity_bytes": fact.virtual_capacity, **limits}


def _model_and_session(fact: ft.ModelJoined | ft.ModelLeft) -> Fields:
    return {"model": str(fact.name), "session": session_name(fact.session)}


def _model_ended(fact: ft.ModelEnded) -> Fields:
    return {"model": str(fact.name)}


def _model_carried(fact: ft.ModelCarried) -> Fields:
    peaks = {f"{location}_peak_bytes": peak for location, peak in fact.peaks.items()}
    return {"model": str(fact.name), **peaks, "allocations": fact.allocations, "releases": fact.releases}


def _debited(fact: ft.Debited) -> Fields:
    return {
        "session": session_name(fact.session),
        "model": str(fact.name),
        "location": fact.location,
        "extent_bytes": fact.extent_bytes,
        "count": fact.count,
        "first": fact.first,
    }


def _credited(fact: ft.Credited) -> Fields:
    return {"session": session_name(fact.session), "count": len(fact.ids), "cause": fact.cause}


def _declared(fact: ft.DeclarationSet) -> Fields:
    where = {"session": session_name(fact.session), "model": str(fact.name), "location": fact.location}
    return {**where, "declared_bytes": fact.declared_bytes}


def _settled(fact: ft.LocationSettled) -> Fields:
    return {"session": session_name(fact.session), "location": fact.location, "proven": fact.proven}


def _segment_began(fact: ft.SegmentBegan) -> Fields:
    return {
        "segment": f"{fact.name}/segments/{fact.label}",
        "generation": fact.segment,
        "location": fact.location,
        "size_bytes": fact.extent_bytes * (fact.count - 1) + fact.last_bytes,
        "writer": session_name(fact.writer),
    }


def _segment_and_cause(fact: ft.SegmentMoved) -> Fields:
    return {"generation": fact.segment, "cause": fact.cause}


def _segment_held(fact: ft.SegmentHeld) -> Fields:
    return {"generation": fact.segment, "session": session_name(fact.session)}


def _segment_held_again(fact: ft.SegmentHeldAgain) -> Fields:
    return {"generation": fact.segment, "session": session_name(fact.session), "times": fact.times}


def _segment_left(fact: ft.SegmentLeft) -> Fields:
    return {"generation": fact.segment, "session": session_name(fact.session), "cause": fact.cause}


def _segment_doubted(fact: ft.SegmentDoubted) -> Fields:
    return {"generation": fact.segment}


def _segment_credited(fact: ft.SegmentCredited) -> Fields:
    return {"generation": fact.segment, "count": len(fact.ids)}


def _segment_ended(fact: ft.SegmentEnded) -> Fields:
    return {"generation": fact.segment, "proven": fact.proven}


def _unaccounted_seen(fact: ft.UnaccountedSeen) -> Fields:
    return {"location": fact.location, "unaccounted_bytes": fact.unaccounted}


def _stock_changed(fact: ft.StockChanged) -> Fields:
    return {"location": fact.location, "extent_bytes": fact.extent_bytes, "change": fact.change, "cause": fact.cause}


def _quota_set(fact: ft.QuotaSet) -> Fields:
    name = f"tenants/{fact.tenant}" + (f"/models/{fact.model}" if fact.model else "")
    return {"name": name, "location": fact.location, "limit_bytes": fact.limit}


_FACTS: dict[type, tuple[int, str, Callable[[Any], Fields]]] = {
    ft.SessionBegan: (logging.INFO, "session began", _session_began),
    ft.SessionMoved: (logging.INFO, "session moved", _session_moved),
    ft.SessionEnded: (logging.INFO, "session ended", _session_ended),
    ft.ModelBegan: (logging.INFO, "model began", _model_began),
    ft.ModelAsked: (logging.INFO, "model asked for more numbers", _model_asked),
    ft.ModelJoined: (logging.INFO, "model joined", _model_and_session),
    ft.ModelLeft: (logging.INFO, "model left", _model_and_session),
    ft.ModelEnded: (logging.INFO, "model ended", _model_ended),
    ft.LocationSettled: (logging.INFO, "session settled", _settled),
    ft.SegmentBegan: (logging.INFO, "segment began", _segment_began),
    ft.SegmentMoved: (logging.INFO, "segment moved", _segment_and_cause),
    ft.SegmentEnded: (logging.INFO, "segment ended", _segment_ended),
    ft.SegmentHeld: (logging.DEBUG, "segment held", _segment_held),
    ft.SegmentHeldAgain: (logging.DEBUG, "segment held again", _segment_held_again),
    ft.SegmentLeft: (logging.DEBUG, "segment left", _segment_left),
    ft.SegmentDoubted: (logging.DEBUG, "segment doubted", _segment_doubted),
    ft.SegmentCredited: (logging.DEBUG, "segment credited", _segment_credited),
    ft.ModelCarried: (logging.DEBUG, "model carried", _model_carried),
    ft.StockChanged: (logging.DEBUG, "stock changed", _stock_changed),
    ft.UnaccountedSeen: (logging.DEBUG, "unaccounted seen", _unaccounted_seen),
    ft.QuotaSet: (logging.INFO, "quota set", _quota_set),
    ft.Debited: (logging.DEBUG, "debited", _debited),
    ft.Credited: (logging.DEBUG, "credited", _credited),
    ft.DeclarationSet: (logging.DEBUG, "declared", _declared),
}


# --- Lines ---


class _Formatter(logging.Formatter):
    """One line a record, whoever made it: other libraries' records have a message and no fields."""

    def __init__(self, line: Callable[[str, str, str, Fields], str]) -> None:
        super().__init__()
        self._line = line

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = dict(getattr(record, "fields", {}))
        if record.name != _LOGGER.name:
            fields["logger"] = record.name
        if record.exc_info and record.exc_info[1]:
            fields["traceback"] = _trace(record.exc_info[1])
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return self._line(at.replace("+00:00", "Z"), record.levelname.lower(), record.getMessage(), fields)


def _json_line(time: str, level: str, event: str, fields: Fields) -> str:
    return json.dumps({"time": time, "level": level, "event": event, **fields}, default=str)


def _text_line(time: str, level: str, event: str, fields: Fields) -> str:
    """Return the line for people. An event of several lines becomes one: no peer's text can forge a line."""
    shown = event if event.isprintable() else json.dumps(event)
    return " ".join([time, level.upper(), shown, *(f"{name}={_shown(value)}" for name, value in fields.items())])


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
