"""The format of a trace: what the core was asked, what changed in the books and what was decided, in lines of JSON.

A trace has parts. The first line of a part says when it begins and which rules the core had; then come the facts that
make the books of that moment, and what happened since. A line is a time, in microseconds since the part began, and a
row. Rows have names of tenants and models, sizes and ids: never a token, a process's name or what is in the memory.

Like a journal, a trace that does not say what this version knows is `Unusable`, and nothing is guessed. It must never
open a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from ..ext import Location, ModelName, QuotaKey, policy, records
from ..ext import effects as fx
from ..ext import events as ev
from ..ext import facts as ft

VERSION = 2
MAX_LINE_BYTES = 4 << 20
"""The longest line: a session with 65,536 separate extents ended."""
_MAGIC = "membroker trace"
_HEAD = f'{{"{_MAGIC}"'


@dataclass(frozen=True, slots=True)
class Begin:
    """A part begins: at `at` (Unix seconds), at `now` (nanoseconds of CLOCK_MONOTONIC), with these rules.

    `why`: the daemon started, its rules changed, the file was full or removed, or rows before it could not be written.
    """

    why: str
    at: int
    now: int
    rules: policy.Rules


@dataclass(frozen=True, slots=True)
class BooksComplete:
    """All books of the moment at which the part begins were written; what follows has happened since."""

    complete: bool = True


@dataclass(frozen=True, slots=True)
class Create:
    """A session asked for a segment of `size` bytes."""

    call: int
    session: int
    request_id: int
    name: ModelName
    location: Location
    size: int
    wait_ns: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to a call: `reason` is that of a refusal, or empty.

    `waited` says how its wait ended, and is empty if it did not wait.
    """

    call: int
    reason: str
    waited: str
    waited_ns: int


@dataclass(frozen=True, slots=True)
class AnswersRecalls:
    """Whether a session answers recalls of a model from now on."""

    session: int
    name: ModelName
    answers: bool


@dataclass(frozen=True, slots=True)
class DaemonStops:
    """The daemon stops: requests that wait are refused."""

    stopping: bool = True


Row = (
    ev.Allocate
    | ev.Declare
    | ev.InputsDrained
    | ev.CancelWait
    | ev.AnswerRecall
    | ev.SetDraining
    | fx.SendRecall
    | fx.Recalled
    | ft.Fact
    | BooksComplete
    | Create
    | Outcome
    | AnswersRecalls
    | DaemonStops
)
FORMS: Mapping[type, records.Form] = {
    kind: records.Form(records.to_json(tag), kind)
    for tag, kind in {
        "books told": BooksComplete,
        "asked": ev.Allocate,
        "asked for a segment": Create,
        "asked to declare": ev.Declare,
        "inputs read": ev.InputsDrained,
        "answered": Outcome,
        "cancelled": ev.CancelWait,
        "recall": fx.SendRecall,
        "recall answered": ev.AnswerRecall,
        "recall ended": fx.Recalled,
        "answers recalls": AnswersRecalls,
        "lent": ft.Debited,
        "credited": ft.Credited,
        "declared": ft.DeclarationSet,
        "session": ft.SessionBegan,
        "session moved": ft.SessionMoved,
        "session ended": ft.SessionEnded,
        "settled": ft.LocationSettled,
        "model": ft.ModelBegan,
        "model asked": ft.ModelAsked,
        "model joined": ft.ModelJoined,
        "model left": ft.ModelLeft,
        "model ended": ft.ModelEnded,
        "segment": ft.SegmentBegan,
        "segment ended": ft.SegmentEnded,
        "segment credited": ft.SegmentCredited,
        "quota": ft.QuotaSet,
        "guest": ft.GuestSet,
        "turn": ft.TurnBegan,
        "draining": ev.SetDraining,
        "stopping": DaemonStops,
    }.items()
}
"""How each kind of row is written. A tag never changes its meaning."""
OF_BOOKS = (ft.GuestSet, ft.TurnBegan)
"""Facts that a part has at its beginning only: later, the core of a replay decides them by itself."""
_TAGGED = {tag: form for form in FORMS.values() for tag in [form.tag]}


def line(microseconds: int, row: Row) -> str:
    """Return a row as a line."""
    return f"[{microseconds},{FORMS[type(row)].encode(row)}]\n"


def is_sound(row: Row) -> bool:
    """Say whether a row can be read again. A request with other numbers is refused whatever the rules are."""
    match row:
        case ev.Allocate():
            numbers = 0 < row.extent_bytes <= policy.MAX_BYTES and 0 < row.count <= policy.MAX_COUNT
            numbers = numbers and 0 <= row.wanted_bytes <= policy.MAX_BYTES
        case Create():
            numbers = 0 < row.size <= policy.MAX_BYTES
        case ev.Declare():
            numbers = 0 <= row.declared_bytes <= policy.MAX_BYTES
        case _:
            return True
    return numbers and (row.wait_ns is None or 0 <= row.wait_ns <= policy.MAX_WAIT_NS)


def head(begin: Begin) -> str:
    """Return the first line of a part."""
    rules = {field.name: _PLAIN[field.name][0](getattr(begin.rules, field.name)) for field in fields(policy.Rules)}
    return records.to_json({_MAGIC: VERSION, "why": begin.why, "at": begin.at, "now": begin.now, "rules": rules}) + "\n"


def read_line(text: str) -> Begin | tuple[int, Row]:
    """Return what a line says: the beginning of a part, or a time and a row. Raises `Unusable`."""
    if text.startswith(_HEAD):
        return _read_head(text)
    try:
        microseconds, (tag, *values) = records.parse(text.encode())
        if type(microseconds) is not int or not 0 <= microseconds < policy.MAX_BYTES // 1_000:
            raise ValueError
        return microseconds, _TAGGED[records.to_json(tag)].decode(values)
    except (TypeError, ValueError, KeyError) as error:
        raise records.Unusable("broken", "has a row that this version does not know") from error


def _read_head(text: str) -> Begin:
    try:
        found = json.loads(text)
        version, given = found[_MAGIC], found["rules"]
        if version != VERSION:
            raise records.Unusable("other-version", f"has the format {version!r:.20}, and this version reads {VERSION}")
        rules = policy.Rules(**{field.name: _PLAIN[field.name][1](given[field.name]) for field in fields(policy.Rules)})
        if not 0 < rules.granularity <= rules.segment_extent_bytes:
            raise ValueError
        return Begin(str(found["why"]), records.size(found["at"]), records.size(found["now"]), rules)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise records.Unusable("broken", "has a damaged first line") from error


# --- rules ---


def _quotas(given: Any) -> dict[QuotaKey, int]:
    return {
        (str(tenant), None if model is None else str(model), records.location(where)): records.size(number)
        for tenant, model, where, number in given
    }


def _as_is(given: Any) -> Any:
    return given


_KINDS: Mapping[Any, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: (_as_is, records.size),
    int | None: (_as_is, records.size_or_none),
    Mapping[Location, int]: (dict, records.sizes),
    Mapping[QuotaKey, int]: (
        lambda all_: [[*key, size] for key, size in all_.items()],
        _quotas,
    ),
    frozenset[str]: (sorted, lambda given: frozenset(map(str, given))),
}
_PLAIN = {name: _KINDS[hint] for name, hint in get_type_hints(policy.Rules).items()}
"""By field of the rules: how it is written, and read."""
