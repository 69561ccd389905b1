"""The journal: the facts of this daemon in a file, so that its successor has the same books.

A header, and then a record for each step that changed the books, appended as it happens. A record is its length, its
checksum and its facts as compact JSON; a length of 0 is the end, since the file is allocated ahead of its records.
So when the disk is full there is still room for what is given back: only new debits must stop (`Journal.full`).

Nothing is synced. A killed daemon leaves what it wrote in the page cache, and what ends the page cache ends the
device's memory, too: the journal of another boot is void.

Owns the file, and what becomes of one that cannot be used: it is set aside. What a record may hold is `records`'
business.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import reprlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .. import files
from ..core import facts as ft
from ..home import MAX_EPOCH
from .records import Unusable, decode, frame, header_of, is_record_behind, parse, record_of, split, to_json

_Books = TypeVar("_Books")

MIB = 1 << 20
RESERVE_BYTES = MIB
"""Room for records that the disk can't refuse, twice so much at most; with less, nothing more is to be debited."""
MAX_FILE_BYTES = 512 * MIB
"""A longer file is not read. Records are ASCII text, and no four characters of it make a length this small: text that
a tenant chose is never taken for the head of a record."""
_MAGIC = "membroker journal"
_VERSION = 1
_PORTION = 64
"""How many facts of a story are written in one step: they take 0.6 ms."""
_KEPT = 4
"""How many files that were set aside are kept, for an operator to look at."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What a journal is true for: one boot of the machine, and one device by its UUID."""

    boot: str
    device: str


def boot_id() -> str:
    """Return what the kernel calls this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Journal:
    """The journal at `path`. Below `compact_bytes` bytes it is never due for compaction."""

    def __init__(self, path: Path, binding: Binding, compact_bytes: int = 4 * MIB) -> None:
        self._path = path
        self._binding = binding
        self._compact_bytes = compact_bytes
        self.epoch = 0
        """In the header: the predecessor's, once that was read, until the daemon sets its own; 0: not known."""
        self._descriptor = -1
        self._end = 0
        """Where the records end that are whole in the file."""
        self._room = 0
        """Up to where the file is allocated."""
        self._due_at = 0
        self._unwritten = bytearray()
        self._appended: bytearray | None = None
        """While the file is compacted: the records that were appended since that began."""

    # --- the predecessor's ---

    def read(self, take: Callable[[Iterable[ft.Fact]], _Books]) -> tuple[_Books, list[str]]:
        """Return what `take` makes of the predecessor's facts, in their order, and sentences for people.

        There are no facts without a predecessor, nor when its journal can't be used and is set aside: because it is
        damaged, or because `take` raises `AssertionError` or `KeyError`, since the facts contradict each other. A last
        record that is not whole is left out, and a copy of the file is kept. Raises `OSError`.
        """
        try:
            data = files.read_file(self._path, MAX_FILE_BYTES).rstrip(b"\0")
        except FileNotFoundError:
            return take(()), []
        try:
            records, end = split(data)
            self._check_header(header_of(data, records[:1]))
            if end < len(data) and is_record_behind(data, end):
                raise Unusable("broken", f"is damaged at its byte {end}")
            books = take(fact for record in records[1:] for fact in decode(data[record.begin : record.end]))
        except Unusable as unusable:
            reason, why = unusable.reason, str(unusable)
        except (AssertionError, KeyError) as error:
            reason, why = "broken", f"contradicts itself ({error})"
        else:
            return books, self._keep_torn(len(data) - end) if end < len(data) else []
        aside = self.set_aside(reason)
        return take(()), [f"the journal {why}: the books begin empty, and it is kept as {aside}"]

    def _check_header(self, record: bytes) -> None:
        magic, version, boot, device, epoch, *_ = [*parse(record), None, None, None, None, None]
        if magic != _MAGIC:
            raise Unusable("broken", "is not one of membrokerd")
        if version != _VERSION:
            raise Unusable("other-format", f"has the format {reprlib.repr(version)}, which this version does not know")
        if device != self._binding.device:
            raise Unusable("other-device", f"is of another device, {reprlib.repr(device)}")
        if boot != self._binding.boot:
            raise Unusable("other-boot", "is of another boot, whose memory is gone")
        if epoch is not None:  # older journals have none
            if type(epoch) is not int or not 0 <= epoch <= MAX_EPOCH:
                raise Unusable("other-format", f"has the epoch {reprlib.repr(epoch)}, which cannot be")
            self.epoch = epoch

    def _keep_torn(self, torn_bytes: int) -> list[str]:
        """Keep the file under a second name before it is replaced; return what to say of it."""
        told = f"the journal's last record is not whole: its {torn_bytes} bytes are left out"
        try:
            if self._path.stat().st_nlink > 1:  # a start before this one kept it, and got no further
                return [f"{told}, and a copy of the file is kept already"]
            aside = self._name_aside("torn")
            os.link(self._path, aside)
        except OSError as error:
            return [f"{told}, and no copy could be kept: {error.strerror}"]
        return [f"{told}, and the file is kept as {aside}"]

    def set_aside(self, reason: str) -> Path:
        """Rename the file to `journal.<reason>-<n>` and return its new path; the last few of these stay.

        Raises `OSError`.
        """
        aside = self._name_aside(reason)
        self._path.rename(aside)
        return aside

    def _name_aside(self, reason: str) -> Path:
        """Return the next free name for what is set aside, once there is room for it among the last few."""
        name = re.compile(re.escape(self._path.name) + r"\.[a-z-]+-(\d{1,9})")
        found = [(name.fullmatch(path.name), path) for path in self._path.parent.iterdir()]
        others = sorted((int(match[1]), path) for match, path in found if match)
        for _, old in others[: 1 - _KEPT]:
            old.unlink()
        number = others[-1][0] + 1 if others else 1
        return self._path.with_name(f"{self._path.name}.{reason}-{number}")

    # --- this daemon's ---

    def begin(self, story: Iterable[ft.Fact]) -> None:
        """Start a new file with the story of the books as they are. Raises `OSError`, as `compact` does."""
        for _ in self.compact(story):
            pass

    def compact(self, story: Iterable[ft.Fact]) -> Generator[None, None, None]:
        """Replace the file by a short one, in steps: the story of the books as they are now, and what comes meanwhile.

        Until the last step the old file is the journal, and is appended to as before. So a crash, an `OSError` or the
        end of the generator before its last step leaves the old file in place. Raises `OSError`.
        """
        fresh = self._path.with_name(f"{self._path.name}.new")
        self._appended = appended = bytearray()
        try:
            descriptor = files.make_fresh(fresh)
            try:
                header = [_MAGIC, _VERSION, self._binding.boot, self._binding.device, self.epoch]
                end = _write_all(descriptor, frame(to_json(header)), 0)
                facts = iter(story)
                while portion := list(itertools.islice(facts, _PORTION)):
                    end = _write_all(descriptor, record_of(portion), end)
                    yield
                end = _write_all(descriptor, appended, end)
                room = _allocate(descriptor, end)
                if self._descriptor >= 0 and room == end:  # the old file may have a reserve
                    raise _disk_full()
                fresh.rename(self._path)
            except BaseException:
                os.close(descriptor)
                fresh.unlink(missing_ok=True)
                raise
        except OSError:
            self._due_at = self._end + self._compact_bytes  # or it would be tried at every step
            raise
        finally:
            self._appended = None
        self._let_go()
        self._descriptor, self._end, self._room = descriptor, end, room
        self._due_at = max(self._compact_bytes, 4 * end)

    def append(self, facts: Sequence[ft.Fact]) -> bool:
        """Write the facts of one step as one record, without those that no successor needs.

        False: the disk is full or broken, and they are not in the file. They are kept, in order with all that comes,
        and written as soon as there is room: each call tries, and a call without facts does nothing else.
        """
        record = record_of(facts)
        self._unwritten += record
        if self._appended is not None:
            self._appended += record
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
        """Say that the file has grown so much that it should be compacted, unless it is being compacted."""
        return self._end > self._due_at and self._appended is None

    def is_in_place(self) -> bool:
        """Say whether the file that is written is the one that a successor would find."""
        try:
            found, own = os.lstat(self._path), os.fstat(self._descriptor)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

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


def _write_all(descriptor: int, data: bytes | bytearray, at: int) -> int:
    """Write the data at an offset, and return where it ends; raises `OSError` when it does not fit."""
    if os.pwrite(descriptor, data, at) < len(data):
        raise _disk_full()
    return at + len(data)


def _disk_full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _allocate(descriptor: int, end: int) -> int:
    """Have room for records behind `end`, and return up to where it goes: `end` when the disk is full."""
    try:
        os.posix_fallocate(descriptor, end, 2 * RESERVE_BYTES)
    except OSError:
        return end
    return end + 2 * RESERVE_BYTES
