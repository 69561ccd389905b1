"""The format of the journal's file: frames with a length and a checksum, which contain facts as compact JSON.

Each number, size and name is checked before it is used. Anything that this version does not know makes the journal
`Unusable`; nothing is guessed. It must never open a file.
"""

from __future__ import annotations

import json
import re
import reprlib
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple, get_type_hints

from membroker.wire.names import MAX_BYTES

from ..core import effects as fx
from ..core import facts as ft
from ..core.names import LOCATIONS, Location, ModelName

_FRAME = struct.Struct("<II")
"""Length and checksum of the content that follows."""
_BEGINS = re.compile(rb"\[\[\d{1,3},")
"""The first bytes of every record's content, except the header's."""
MAX_IDS = 1 << 22
"""The most extents that one fact may list, and that may be lent at once: 8 TiB of the smallest."""


class Unusable(Exception):
    """A journal that cannot be used. The message continues "the journal …"; `reason` goes into the file's new name."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


to_json = json.JSONEncoder(separators=(",", ":")).encode
_quoted = json.encoder.encode_basestring_ascii
"""A string as JSON."""


def frame(content: str) -> bytes:
    """Return the record with this content."""
    data = content.encode()
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


class _Span(NamedTuple):
    """The offsets in the file between which the content of a record lies."""

    begin: int
    end: int


def header_of(data: bytes, records: Sequence[_Span]) -> bytes:
    """Return the content of the first record, the header; raises `Unusable` if even that is incomplete."""
    if not records:
        raise Unusable("broken", "does not start with a header of membrokerd")
    return data[records[0].begin : records[0].end]


def _span(data: bytes, at: int) -> _Span | None:
    """Return the record whose head is at `at`, or None if it is incomplete or its checksum is wrong."""
    begin = at + _FRAME.size
    if begin >= len(data):
        return None
    length, checksum = _FRAME.unpack_from(data, at)
    if not 0 < length <= len(data) - begin or zlib.crc32(memoryview(data)[begin : begin + length]) != checksum:
        return None
    return _Span(begin, begin + length)


def split(data: bytes) -> tuple[list[_Span], int]:
    """Return the complete records from the header on, and the offset at which they end."""
    records, at = [], 0
    while record := _span(data, at):
        records.append(record)
        at = record.end
    return records, at


def has_record_after(data: bytes, at: int) -> bool:
    """Return whether a complete record follows the broken one at `at`: then the file is damaged, not just cut short.

    The broken record's length cannot be trusted, so the search looks for the first bytes of a record. It reads the
    file once. Wrong lengths can make it compute checksums of four times as much; a file that needs more is damaged.
    """
    left = 4 * len(data)
    for found in _BEGINS.finditer(data, at + _FRAME.size + 1):
        head = found.start() - _FRAME.size
        length, _ = _FRAME.unpack_from(data, head)
        if length > len(data) - found.start():
            continue
        left -= length
        if left < 0 or _span(data, head):
            return True
    return False


def record_of(facts: Sequence[ft.Fact]) -> bytes:
    """Return the record of these facts. It is empty if no successor needs any of them."""
    encoded = ",".join([_FORMS[kind].encode(fact) for fact in facts if (kind := type(fact)) not in LEFT_OUT])
    return frame(f"[{encoded}]") if encoded else b""


def decode(record: bytes) -> Iterator[ft.Fact]:
    """Yield the facts in the content of a record; raises `Unusable`."""
    for item in parse(record):
        try:
            tag, *values = item
            yield _TAGGED[_int(tag)].decode(values)
        except (TypeError, ValueError, KeyError) as error:
            raise Unusable(
                "other-format", f"has a fact that this version does not know: {reprlib.repr(item)}"
            ) from error


def parse(record: bytes) -> list[Any]:
    """Return the list in the content of a record; raises `Unusable`."""
    try:
        content: list[Any] = _list(json.loads(record))
    except (TypeError, ValueError, RecursionError) as error:
        raise Unusable("other-format", "has a record that this version cannot read") from error
    return content


# --- Facts ---


@dataclass(frozen=True, slots=True)
class _Type:
    """How values of one type are written as JSON. `decode` raises `ValueError` or `TypeError` for any other value.

    `encode` returns the text itself, because json creates a new encoder for each value that is not a string, which
    takes as long as the rest of an append. Plain numbers need no `encode`.
    """

    decode: Callable[[Any], Any]
    encode: Callable[[Any], str] = to_json


def _plain(*kinds: type) -> _Type:
    def decode(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError
        return value

    return _Type(decode)


_int, _text, _list, _table = (_plain(kind).decode for kind in (int, str, list, dict))
_MAX_ID = (1 << 64) - 1
_BOUNDS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("session", "segment", "writer", "first", "call", "request_id", "recall"), (0, _MAX_ID)),
    **dict.fromkeys(
        ("at", "idle_since", "slice_until", "allocations", "releases", "declared_bytes", "wanted_bytes", "size"),
        (0, MAX_BYTES),
    ),
    **dict.fromkeys(("returned", "after_ns", "waited_ns", "within_ns"), (0, MAX_BYTES)),
    **dict.fromkeys(("extent_bytes", "last_bytes"), (1, MAX_BYTES)),
    "unaccounted": (-MAX_BYTES, MAX_BYTES),
    "count": (1, MAX_IDS),
    "times": (0, (1 << 32) - 1),
    "pid": (0, (1 << 31) - 1),
    "uid": (0, (1 << 32) - 1),
}
"""The smallest and largest value of each plain number in a fact, by the name of its field."""


def _within(least: int, most: int) -> Callable[[Any], int]:
    def decode(value: Any) -> int:
        if not least <= _int(value) <= most:
            raise ValueError
        return value  # type: ignore[no-any-return]

    return decode


_id, size = _within(0, _MAX_ID), _within(0, MAX_BYTES)
"""`size` reads a number of bytes, or any other number from 0 to MAX_BYTES."""


def size_or_none(value: Any) -> int | None:
    """Return a size, or None."""
    return None if value is None else size(value)


def location(value: Any) -> Location:
    """Return a location."""
    if value not in LOCATIONS:
        raise ValueError
    return value  # type: ignore[no-any-return]


def _model_name(value: Any) -> ModelName:
    tenant, model = _list(value)
    return ModelName(_text(tenant), _text(model))


def sizes(value: Any) -> dict[Location, int]:
    """Return a table of sizes by location."""
    return {location(where): size(number) for where, number in _table(value).items()}


def _run(value: Any) -> range:
    first, count = _list(value)
    if not 0 <= _int(count) <= MAX_IDS:
        raise ValueError
    return range(_id(first), first + count)


def _ids(value: Any) -> tuple[int, ...] | range:
    if value and type(_list(value)[0]) is int:
        return _run(value)
    runs = [_run(run) for run in _list(value)]
    if sum(map(len, runs)) > MAX_IDS:
        raise ValueError
    return tuple(extent for run in runs for extent in run)


@lru_cache(4096)
def _from_name(name: ModelName) -> str:
    return f"[{_quoted(name.tenant)},{_quoted(name.model)}]"


def _from_run(ids: range) -> str:
    assert ids.step == 1
    return f"[{ids.start},{len(ids)}]"


def _from_ids(ids: tuple[int, ...] | range) -> str:
    """Return a range as its first id and its length, and separate ids as a list of such runs."""
    if isinstance(ids, range):
        return _from_run(ids)
    if len(ids) == 1:  # as most releases are
        return f"[[{ids[0]},1]]"
    return str(runs_of(ids)).replace(" ", "")


def runs_of(ids: Iterable[int]) -> list[list[int]]:
    """Return the first id and the length of each run of ids that follow each other."""
    runs: list[list[int]] = []
    following = None
    for extent in ids:
        if extent == following:
            runs[-1][1] += 1
        else:
            runs.append([extent, 1])
        following = extent + 1
    return runs


_TYPES: Mapping[Any, _Type] = {
    int | None: _Type(size_or_none),
    str: _Type(_text, _quoted),
    str | None: _plain(str, NoneType),
    bool: _plain(bool),
    fx.RecallResult: _Type(_text, _quoted),
    bool | None: _plain(bool, NoneType),
    Location: _Type(location, _quoted),
    ModelName: _Type(_model_name, _from_name),
    ModelName | None: _Type(lambda value: None if value is None else _model_name(value)),
    Mapping[Location, int]: _Type(sizes),
    range: _Type(_run, _from_run),
    tuple[int, ...] | range: _Type(_ids, _from_ids),
}
"""By the annotation of a field. Plain numbers are checked by the name of the field instead."""


def _type_of(name: str, hint: Any) -> _Type:
    return _Type(_within(*_BOUNDS[name])) if hint is int else _TYPES[hint]


class Form:
    """How the values of one class are written as JSON: a list of the class's tag, which is JSON, and the fields."""

    def __init__(self, tag: int | str, kind: type[Any]) -> None:
        hints = get_type_hints(kind)
        self.tag, self.kind = tag, kind
        self._fields = [(field.name, _type_of(field.name, hints[field.name])) for field in fields(kind)]
        names = [name for name, _ in self._fields]
        self._values = attrgetter(*names, names[-1])  # of one name alone it would not return a tuple
        plain = [hints[name] is int for name in names]
        self._others = [(place, form.encode) for place, (_, form) in enumerate(self._fields) if not plain[place]]
        places = ("%d" if is_number else "%s" for is_number in plain)
        self._text = f"[{tag},{','.join(places)}]"

    def encode(self, fact: Any) -> str:
        """Return the value as JSON."""
        *values, _ = self._values(fact)
        for place, encode in self._others:
            values[place] = encode(values[place])
        return self._text % tuple(values)

    def decode(self, values: list[Any]) -> Any:
        """Return the value; raises `ValueError` or `TypeError` if these are not the values of this class."""
        return self.kind(*(form.decode(value) for (_, form), value in zip(self._fields, values, strict=True)))


LEFT_OUT = frozenset((ft.StockChanged, ft.QuotaSet))
"""The warm pool ends with the daemon that made it, and quotas have their own file."""
_TAGGED: Mapping[int, Form] = {
    tag: Form(tag, kind)
    for tag, kind in {
        1: ft.SessionBegan,
        2: ft.SessionMoved,
        3: ft.SessionEnded,
        4: ft.ModelBegan,
        5: ft.ModelAsked,
        6: ft.ModelJoined,
        7: ft.ModelLeft,
        8: ft.ModelEnded,
        9: ft.ModelCarried,
        10: ft.Debited,
        11: ft.Credited,
        12: ft.DeclarationSet,
        13: ft.LocationSettled,
        14: ft.SegmentBegan,
        15: ft.SegmentMoved,
        16: ft.SegmentHeld,
        17: ft.SegmentLeft,
        18: ft.SegmentDoubted,
        19: ft.SegmentCredited,
        20: ft.SegmentEnded,
        21: ft.UnaccountedSeen,
        22: ft.SegmentHeldAgain,
        23: ft.SegmentBound,
        24: ft.GuestSet,
        25: ft.TurnBegan,
    }.items()
}
"""A tag never changes its meaning. If the fields of a fact change after a release, it gets a new tag."""
_FORMS: Mapping[type, Form] = {form.kind: form for form in _TAGGED.values()}
