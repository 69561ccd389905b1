"""The journal: a file with the facts of this daemon, from which its successor rebuilds the books.

The file is a header and then one record for each step that changed the books, appended as it happens. A record is its
length, its checksum and its facts as compact JSON. The file is allocated ahead of its records, so a length of 0 is the
end, and a full disk still leaves room to record releases: only new debits must stop (`Journal.full`).

Nothing is synced. What a killed daemon wrote stays in the page cache, and a reboot that ends the page cache also ends
the device's memory: a journal of another boot is not used.

Owns the file, and sets it aside when it cannot be used. `records` defines what a record may contain.
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

from membroker.vmm.sizes import MIB
from membroker.wire.system_calls import describe

from ..core import facts as ft
from ..system import files
from ..system.device_directory import MAX_EPOCH
from .records import Unusable, decode, frame, has_record_after, header_of, parse, record_of, split, to_json

_Books = TypeVar("_Books")

RESERVE_BYTES = MIB
"""The least room to keep allocated for records, which a full disk cannot take away. With less, new debits must stop.
Twice as much is allocated at a time."""
MAX_FILE_BYTES = 512 * MIB
"""A longer file is not read. Records are ASCII text, and no four ASCII characters make a length this small: text that
a tenant chose cannot be mistaken for the head of a record."""
_MAGIC = "membroker journal"
_VERSION = 1
_PORTION = 64
"""How many facts a compaction writes in one step. That takes 0.6 ms."""
_KEPT = 4
"""How many files that were set aside are kept for an operator to look at."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The boot and the device (its UUID) for which a journal is valid."""

    boot: str
    device: str


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Journal:
    """The journal at `path`. A file below `compact_bytes` is never due for compaction."""

    def __init__(self, path: Path, binding: Binding, compact_bytes: int = 4 * MIB) -> None:
        self.path = path
        self._binding = binding
        self._compact_bytes = compact_bytes
        self.why = ""
        """Why the journal could not be written or given room the last time."""
        self.epoch = 0
        """The epoch in the header: the predecessor's after `read`, then the one that the daemon sets; 0 if unknown."""
        self._descriptor = -1
        self._predecessors_end = 0
        """Where the predecessor's records end, if its file is whole and was read."""
        self._end = 0
        """The offset at which the whole records end."""
        self._room = 0
        """The offset up to which the file is allocated."""
        self._due_at = 0
        self._unwritten = bytearray()
        self._appended: bytearray | None = None
        """During a compaction: the records that were appended since it began."""

    # --- the predecessor's file ---

    def read(self, take: Callable[[Iterable[ft.Fact]], _Books]) -> tuple[_Books, list[str]]:
        """Return what `take` makes of the predecessor's facts, in order, and sentences for the log.

        `take` gets no facts if there was no predecessor, or if its journal is unusable and is set aside. A journal is
        unusable if it is damaged, or if `take` raises `AssertionError` or `KeyError` because its facts contradict each
        other. An incomplete last record is ignored, and a copy of the file is kept. Raises `OSError`.
        """
        try:
            data = files.read_file(self.path, MAX_FILE_BYTES).rstrip(b"\0")
        except FileNotFoundError:
            return take(()), []
        try:
            records, end = split(data)
            self._check_header(header_of(data, records[:1]))
            if end < len(data) and has_record_after(data, end):
                raise Unusable("broken", f"is damaged at its byte {end}")
            books = take(fact for record in records[1:] for fact in decode(data[record.begin : record.end]))
        except Unusable as unusable:
            reason, why = unusable.reason, str(unusable)
        except (AssertionError, KeyError) as error:
            reason, why = "broken", f"contradicts itself ({error})"
        else:
            if end < len(data):
                return books, self._keep_torn(len(data) - end)
            self._predecessors_end = end
            return books, []
        aside = self.set_aside(reason)
        return take(()), [f"the journal {why}: the books start empty, and the file is kept as {aside}"]

    def _check_header(self, record: bytes) -> None:
        magic, version, boot, device, epoch, *_ = [*parse(record), None, None, None, None, None]
        if magic != _MAGIC:
            raise Unusable("broken", "was not written by membrokerd")
        if version != _VERSION:
            raise Unusable("other-format", f"has the format {reprlib.repr(version)}, which this version does not know")
        if device != self._binding.device:
            raise Unusable("other-device", f"belongs to another device, {reprlib.repr(device)}")
        if boot != self._binding.boot:
            raise Unusable("other-boot", "was written before the last reboot, which freed all memory")
        if epoch is not None:  # older journals have no epoch
            if type(epoch) is not int or not 0 <= epoch <= MAX_EPOCH:
                raise Unusable("other-format", f"has the invalid epoch {reprlib.repr(epoch)}")
            self.epoch = epoch

    def _keep_torn(self, torn_bytes: int) -> list[str]:
        """Keep the file under a second name before it is replaced. Return a sentence for the log."""
        torn = f"the journal's last record is incomplete: its {torn_bytes} bytes are ignored"
        try:
            if self.path.stat().st_nlink > 1:  # an earlier start linked it and then failed
                return [f"{torn}, and a copy of the file is kept already"]
            aside = self._name_aside("torn")
            os.link(self.path, aside)
        except OSError as error:
            return [f"{torn}, and no copy could be kept: {error.strerror}"]
        return [f"{torn}, and the file is kept as {aside}"]

    def set_aside(self, reason: str) -> Path:
        """Rename the file to `journal.<reason>-<n>` and return the new path. The last few such files are kept.

        Raises `OSError`.
        """
        aside = self._name_aside(reason)
        self.path.rename(aside)
        return aside

    def _name_aside(self, reason: str) -> Path:
        """Return the next free name for a file that is set aside, after removing the oldest ones."""
        name = re.compile(re.escape(self.path.name) + r"\.[a-z-]+-(\d{1,9})")
        found = [(name.fullmatch(path.name), path) for path in self.path.parent.iterdir()]
        others = sorted((int(match[1]), path) for match, path in found if match)
        for _, old in others[: 1 - _KEPT]:
            old.unlink()
        number = others[-1][0] + 1 if others else 1
        return self.path.with_name(f"{self.path.name}.{reason}-{number}")

    # --- this daemon's file ---

    def begin(self, facts: Iterable[ft.Fact]) -> None:
        """Start a new file with the facts of the books as they are now.

        If the disk has no room for it, go on with the predecessor's file, whose facts were read: it has its reserve.
        Raises `OSError`, as `compact` does.
        """
        try:
            for _ in self.compact(facts):
                pass
        except OSError as error:
            if error.errno not in files.NO_ROOM or not self._predecessors_end:
                raise
            self.why = describe("pwrite", error)
            self._descriptor = files.open_file(self.path, os.O_RDWR)
            self._end, self._room = self._predecessors_end, os.fstat(self._descriptor).st_size
            self._due_at = self._end + self._compact_bytes

    def compact(self, facts: Iterable[ft.Fact]) -> Generator[None, None, None]:
        """Replace the file, in steps, by a shorter one: the facts of the books as they are, and what is appended since.

        The old file stays the journal, and is appended to, until the last step. A crash, an `OSError` or closing the
        generator before that leaves the old file in place. Raises `OSError`.
        """
        fresh = self.path.with_name(f"{self.path.name}.new")
        self._appended = appended = bytearray()
        try:
            descriptor = files.make_fresh(fresh)
            try:
                header = [_MAGIC, _VERSION, self._binding.boot, self._binding.device, self.epoch]
                end = _write_all(descriptor, frame(to_json(header)), 0)
                facts = iter(facts)
                while portion := list(itertools.islice(facts, _PORTION)):
                    end = _write_all(descriptor, record_of(portion), end)
                    yield
                end = _write_all(descriptor, appended, end)
                room, why = _allocate(descriptor, end)
                self.why = why or self.why
                has_older = self._descriptor >= 0 or self._predecessors_end
                if has_older and room == end:  # no room for a reserve, which the old file may have
                    raise _disk_full()
                fresh.rename(self.path)
            except BaseException:
                os.close(descriptor)
                fresh.unlink(missing_ok=True)
                raise
        except OSError:
            self._due_at = self._end + self._compact_bytes  # else every step would try again
            raise
        finally:
            self._appended = None
        self._release()
        self._descriptor, self._end, self._room = descriptor, end, room
        self._due_at = max(self._compact_bytes, 4 * end)

    def append(self, facts: Sequence[ft.Fact]) -> bool:
        """Write the facts of one step as one record, without the facts that no successor needs.

        Returns False if the disk is full or broken and the record is not in the file. It is kept in memory, in order
        with later ones. Each call tries to write what is pending; a call without facts does only that.
        """
        record = record_of(facts)
        if self._appended is not None:
            self._appended += record
        if self._unwritten:
            self._unwritten += record
            if self._write(self._unwritten):
                self._unwritten.clear()
        elif record and not self._write(record):
            self._unwritten += record
        if self._room - self._end < RESERVE_BYTES:
            self._room, why = _allocate(self._descriptor, self._end)
            self.why = why or self.why
        return not self._unwritten

    def _write(self, records: bytes | bytearray) -> bool:
        """Write all of these records, or none: the next attempt overwrites a partial write.

        A limit on the file's size looks like a full disk, because Python ignores SIGXFSZ.
        """
        try:
            written = os.pwrite(self._descriptor, records, self._end)
        except OSError as error:
            self.why = describe("pwrite", error)
            return False
        if written < len(records):
            self.why = describe("pwrite", _disk_full())
            return False
        self._end += written
        return True

    @property
    def full(self) -> bool:
        """Whether new debits must stop: no room is reserved to record their release, or a record is pending."""
        return bool(self._unwritten) or self._room - self._end < RESERVE_BYTES

    @property
    def due(self) -> bool:
        """Whether the file has grown enough to be compacted, and is not being compacted now."""
        return self._end > self._due_at and self._appended is None

    def is_in_place(self) -> bool:
        """Return whether the open file is the one that a successor would find at the path."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        except OSError:
            return False

    def close(self) -> None:
        """Close the file. It stays on disk for the successor."""
        if self._descriptor >= 0:
            self.append(())
        self._release()

    def _release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._unwritten.clear()


def _write_all(descriptor: int, data: bytes | bytearray, at: int) -> int:
    """Write the data at an offset and return the offset of its end; raises `OSError` if it does not fit."""
    if os.pwrite(descriptor, data, at) < len(data):
        raise _disk_full()
    return at + len(data)


def _disk_full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _allocate(descriptor: int, end: int) -> tuple[int, str]:
    """Allocate room for records after `end`.

    Return the offset up to which it reaches, which is `end` without any, as on a full disk; and then why.
    """
    try:
        os.posix_fallocate(descriptor, end, 2 * RESERVE_BYTES)
    except OSError as error:
        return end, describe("fallocate", error)
    return end + 2 * RESERVE_BYTES, ""
