"""The journal: the facts of this daemon in a file, so that its successor has the same books.

A header, and then a record for each step that changed the books, appended as it happens. A record is its length, its
checksum and its facts as compact JSON; a length of 0 is the end, since the file is allocated ahead of its records.
So when the disk is full there is still room for what is given back: only new debits must stop (`Journal.full`).

Nothing is synced. A killed daemon leaves what it wrote in the page cache, and what ends the page cache ends the
device's memory, too: the journal of another boot is void.

Owns the format. What this version does not know for certain is set aside, and never guessed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_type_hints

from .core import facts as ft
from .core.events import LOCATIONS, Location, ModelName

MIB = 1 << 20
RESERVE_BYTES = MIB
"""Room for records that the disk can't refuse, twice so much at most; with less, nothing more is to be debited."""
_MAGIC = "membroker journal"
_VERSION = 1
_FRAME = struct.Struct("<II")
"""Length and checksum of what follows."""
_KEPT = 4
"""Files that were set aside and stay, for whoever wants to know."""
_MAX_IDS = 1 << 22
"""Extents that one fact may name one by one: 8 TiB of the smallest."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What a journal is true for: one boot of the machine, and one device by its UUID."""

    boot: str
    device: str


def boot_id() -> str:
    """Return what the kernel calls this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Journal:
    """The journal at `path`. `compact_bytes` is the size below which it is never due to be written anew."""

    def __init__(self, path: Path, binding: Binding, compact_bytes: int = 4 * MIB) -> None:
        self._path = path
        self._binding = binding
        self._compact_bytes = compact_bytes
        self._descriptor = -1
        self._end = 0
        """Where the records end that are whole in the file."""
        self._room = 0
        """Up to where the file is allocated."""
        self._due_at = 0
        self._unwritten = bytearray()

    # --- the predecessor's ---

    def read(self) -> tuple[list[ft.Fact], list[str]]:
        """Return the predecessor's story, from nothing, and sentences for people.

        The story is empty without a predecessor, and when its journal can't be used and is set aside. A last record
        that was cut short is left out: the daemon ended as it wrote it. Raises `OSError`.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return [], []
        try:
            records, torn_bytes = _split(data)
            self._check_header(records[0])
            story = [fact for record in records[1:] for fact in _decode(record)]
        except _Unusable as unusable:
            aside = self.set_aside(unusable.reason)
            return [], [f"the journal {unusable}: the books begin empty, and it is kept as {aside}"]
        told = f"the journal's last record was cut short: its {torn_bytes} bytes are left out"
        return story, [told] if torn_bytes else []

    def _check_header(self, record: bytes) -> None:
        magic, version, boot, device, *_ = [*_parse(record), None, None, None, None]
        if magic != _MAGIC:
            raise _Unusable("broken", "is not one of membrokerd")
        if version != _VERSION:
            raise _Unusable("other-format", f"has the format {reprlib.repr(version)}, which this version does not know")
        if device != self._binding.device:
            raise _Unusable("other-device", f"is of another device, {reprlib.repr(device)}")
        if boot != self._binding.boot:
            raise _Unusable("other-boot", "is of another boot, whose memory is gone")

    def set_aside(self, reason: str) -> Path:
        """Rename the file to `journal.<reason>-<n>` and return its new path; the last few of these stay.

        Also for a story that the books refuse. Raises `OSError`.
        """
        name = re.compile(re.escape(self._path.name) + r"\.[a-z-]+-(\d{1,9})")
        found = [(name.fullmatch(path.name), path) for path in self._path.parent.iterdir()]
        others = sorted((int(match[1]), path) for match, path in found if match)
        number = others[-1][0] + 1 if others else 1
        aside = self._path.with_name(f"{self._path.name}.{reason}-{number}")
        self._path.rename(aside)
        for _, old in others[: 1 - _KEPT]:
            old.unlink()
        return aside

    # --- this daemon's ---

    def begin(self, story: Sequence[ft.Fact]) -> None:
        """Begin the file anew with a story of the books as they stand, which has all that was appended before.

        Raises `OSError`; then the file that was there is still the one, and is appended to as before.
        """
        header = [_MAGIC, _VERSION, self._binding.boot, self._binding.device]
        data = _frame(_to_json(header)) + _record(story)
        try:
            descriptor, room = self._write_fresh(data)
        except OSError:
            self._due_at = self._end + self._compact_bytes  # or it would be tried at every step
            raise
        self._let_go()
        self._descriptor, self._end, self._room = descriptor, len(data), room
        self._due_at = max(self._compact_bytes, 4 * len(data))

    def _write_fresh(self, data: bytes) -> tuple[int, int]:
        """Put a file of this content in place of the one that is there; return it open, and its room."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            written = os.pwrite(descriptor, data, 0)
            room = _allocate(descriptor, len(data))
            loses_reserve = self._descriptor >= 0 and room == len(data)  # the file that is there may have one
            if written < len(data) or loses_reserve:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(fresh))
            fresh.rename(self._path)
        except BaseException:
            os.close(descriptor)
            fresh.unlink(missing_ok=True)
            raise
        return descriptor, room

    def append(self, facts: Sequence[ft.Fact]) -> bool:
        """Write the facts of one step as one record, without those that no successor needs.

        False: the disk is full or broken, and they are not in the file. They are kept, in order with all that comes,
        and written as soon as there is room: each call tries, and a call without facts does nothing else.
        """
        self._unwritten += _record(facts)
        if self._unwritten:
            self._write()
        if self._room - self._end < RESERVE_BYTES:
            self._room = _allocate(self._descriptor, self._end)
        return not self._unwritten

    def _write(self) -> None:
        """Write what is unwritten: all of it, or none; a part that is there all the same will be written over.

        A limit of the file's size is a full disk as well: Python ignores SIGXFSZ.
        """
        size = len(self._unwritten)
        try:
            written = os.pwrite(self._descriptor, self._unwritten, self._end)
        except OSError:
            return
        if written == size:
            self._end += size
            self._unwritten.clear()

    @property
    def full(self) -> bool:
        """Say that nothing more is to be debited: there is no reserve for its credit, or something is unwritten."""
        return bool(self._unwritten) or self._room - self._end < RESERVE_BYTES

    @property
    def due(self) -> bool:
        """Say that the file has grown so much that it should begin anew with a story."""
        return self._end > self._due_at

    def close(self) -> None:
        """Close the file. It stays, for the successor."""
        if self._descriptor >= 0:
            self.append(())
        self._let_go()

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._unwritten.clear()


def _allocate(descriptor: int, end: int) -> int:
    """Have room for records behind `end`, and return up to where it goes: `end` when the disk is full."""
    try:
        os.posix_fallocate(descriptor, end, 2 * RESERVE_BYTES)
    except OSError:
        return end
    return end + 2 * RESERVE_BYTES


# --- Records ---


class _Unusable(Exception):
    """A journal that can't be used. Says why, behind "the journal"; `reason` is for the name of its file."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


_to_json = json.JSONEncoder(separators=(",", ":")).encode


def _frame(content: str) -> bytes:
    data = content.encode()
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def _split(data: bytes) -> tuple[list[bytes], int]:
    """Return the whole records, the header's first, and the bytes of a last one that was cut short.

    A record that is broken and has others behind it was not cut short: the file is damaged.
    """
    records, at, used = [], 0, len(data.rstrip(b"\0"))
    while at < used:
        begin = at + _FRAME.size
        length, checksum = _FRAME.unpack(data[at:begin].ljust(_FRAME.size, b"\0"))
        content = data[begin : begin + length]
        if not content or len(content) < length or zlib.crc32(content) != checksum:
            break
        records.append(content)
        at = begin + length
    if not records:
        raise _Unusable("broken", "does not begin as one of membrokerd")
    if at < used and begin + length < used:
        raise _Unusable("broken", f"is damaged at its byte {at}")
    return records, used - at


def _record(facts: Sequence[ft.Fact]) -> bytes:
    """Return the record of these facts: nothing, when no successor needs any of them."""
    told = [_FORMS[type(fact)].encode(fact) for fact in facts if type(fact) not in _LEFT_OUT]
    return _frame(f"[{','.join(told)}]") if told else b""


def _decode(record: bytes) -> Iterator[ft.Fact]:
    for told in _parse(record):
        try:
            tag, *values = told
            yield _TAGGED[_int(tag)].decode(values)
        except (TypeError, ValueError, KeyError) as error:
            raise _Unusable(
                "other-format", f"has a fact that this version does not know: {reprlib.repr(told)}"
            ) from error


def _parse(record: bytes) -> list[Any]:
    try:
        told = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise _Unusable("other-format", "has a record that this version can't read") from error
    if not isinstance(told, list):
        raise _Unusable("other-format", "has a record that this version can't read")
    return told


# --- Facts ---


@dataclass(frozen=True, slots=True)
class _Type:
    """How values of a type stand in JSON. `decode` raises `ValueError` or `TypeError` for what is none.

    `encode` returns the text: json makes an encoder anew for each value that is no string, which takes as long as the
    rest of an append. Plain numbers need none.
    """

    decode: Callable[[Any], Any]
    encode: Callable[[Any], str] = _to_json


def _plain(*kinds: type) -> _Type:
    def decode(told: Any) -> Any:
        if type(told) not in kinds:
            raise TypeError
        return told

    return _Type(decode)


_int, _text, _list, _table = (_plain(kind).decode for kind in (int, str, list, dict))


def _location(told: Any) -> Location:
    if told not in LOCATIONS:
        raise ValueError
    return told  # type: ignore[no-any-return]


def _model_name(told: Any) -> ModelName:
    tenant, model = _list(told)
    return ModelName(_text(tenant), _text(model))


def _sizes(told: Any) -> dict[Location, int]:
    return {_location(location): _int(size) for location, size in _table(told).items()}


def _run(told: Any) -> range:
    first, count = _list(told)
    if not 0 <= _int(count) <= _MAX_IDS:
        raise ValueError
    return range(_int(first), first + count)


def _ids(told: Any) -> tuple[int, ...] | range:
    if told and type(_list(told)[0]) is int:
        return _run(told)
    runs = [_run(run) for run in _list(told)]
    if sum(map(len, runs)) > _MAX_IDS:
        raise ValueError
    return tuple(extent for run in runs for extent in run)


def _from_name(name: ModelName) -> str:
    return f"[{_to_json(name.tenant)},{_to_json(name.model)}]"


def _from_run(ids: range) -> str:
    assert ids.step == 1
    return f"[{ids.start},{len(ids)}]"


def _from_ids(ids: tuple[int, ...] | range) -> str:
    """Return a range as its first and how many, and single ids as a list of such runs."""
    if isinstance(ids, range):
        return _from_run(ids)
    runs: list[list[int]] = []
    following = None
    for extent in ids:
        if extent == following:
            runs[-1][1] += 1
        else:
            runs.append([extent, 1])
        following = extent + 1
    return f"[{','.join(f'[{first},{count}]' for first, count in runs)}]"


_INT = _plain(int)
_TYPES: Mapping[Any, _Type] = {
    int: _INT,
    int | None: _plain(int, NoneType),
    str: _plain(str),
    bool: _plain(bool),
    bool | None: _plain(bool, NoneType),
    Location: _Type(_location),
    ModelName: _Type(_model_name, _from_name),
    Mapping[Location, int]: _Type(_sizes),
    range: _Type(_run, _from_run),
    tuple[int, ...] | range: _Type(_ids, _from_ids),
}
"""By the annotations of the facts."""


class _Form:
    """How the facts of a class stand in JSON: as a list of the class's tag and their fields."""

    def __init__(self, tag: int, kind: type[ft.Fact]) -> None:
        hints = get_type_hints(kind)
        self.kind = kind
        self._fields = [(field.name, _TYPES[hints[field.name]]) for field in fields(kind)]
        self._names = [name for name, _ in self._fields]
        self._others = [(place, form.encode) for place, (_, form) in enumerate(self._fields) if form is not _INT]
        places = ("%d" if form is _INT else "%s" for _, form in self._fields)
        self._text = f"[{tag},{','.join(places)}]"

    def encode(self, fact: ft.Fact) -> str:
        told = [getattr(fact, name) for name in self._names]
        for place, encode in self._others:
            told[place] = encode(told[place])
        return self._text % tuple(told)

    def decode(self, values: list[Any]) -> ft.Fact:
        """Return the fact; raises `ValueError` or `TypeError` for the values of no fact of this class."""
        return self.kind(*(form.decode(value) for (_, form), value in zip(self._fields, values, strict=True)))


_LEFT_OUT = (ft.StockChanged, ft.QuotaSet)
"""The stock dies with who made it; quotas are kept in a file of their own."""
_TAGGED: Mapping[int, _Form] = {
    tag: _Form(tag, kind)
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
    }.items()
}
"""A tag never gets another meaning: a fact that is told otherwise, once there are journals of it, gets a new one."""
_FORMS: Mapping[type, _Form] = {form.kind: form for form in _TAGGED.values()}
