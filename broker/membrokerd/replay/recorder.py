"""The recorder: what the core is asked and what it decides goes to a trace, for `membroker replay`.

Runs beside the event loop: it makes lines there, and a thread of its own writes them, so a slow or full disk delays no
request. It writes requests, the facts that follow, answers, waits and recalls; what follows from these by itself is
left out. After a gap a new part begins with the books of that moment, so nothing is replayed across one. Owns two
files, the one that grows and the one before it, and their bound. It must never decide anything.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..ext import Broker, Denied, ModelName, Step, checkpoint_facts, files, logs
from ..ext import effects as fx
from ..ext import events as ev
from ..ext import facts as ft
from . import trace

MAX_FILE_BYTES = 32 << 20
"""A file that has grown by this much beyond the books at its beginning is full: the next one begins, and the one before
it is removed."""
QUEUE_BYTES = 4 << 20
"""How much may wait to be written. Beyond that rows are left out until all is written, and then a new part begins."""
QUEUE_PARTS = 4
"""How many beginnings of parts may wait to be written: each has a copy of the books."""
FLUSH_SECONDS, FLUSH_BYTES = 0.2, 256 << 10
"""Rows are written after so many seconds, or when there are so many bytes of them: to wake the thread for each would
double the time of a borrow. A daemon that is killed loses the rows that are not written yet."""
CLOSE_SECONDS = 1.0
_HIDDEN: dict[str, Any] = {"process": "", "client": "", "endpoint": "", "token_hash": "", "pid": 0, "uid": 0}
"""The fields of a session that a trace must not have, and what stands in their place."""


class Recorder:
    """The trace of one broker, in `directory`. If that cannot be written, the log says so and nothing is recorded."""

    def __init__(
        self, broker: Broker, directory: Path, now: Callable[[], int], max_bytes: int = MAX_FILE_BYTES
    ) -> None:
        self._broker = broker
        self._now = now
        self._began = 0
        self._calls: set[int] = set()
        """Requests for memory without an answer."""
        self._stop_is_recorded = False
        self._incomplete = False
        """Whether rows were left out, so that a new part must begin."""
        self._file = _RecordFile(directory, max_bytes)
        logs.log("requests and decisions are recorded", path=str(self._file.path))
        self.begin("the daemon started")
        threading.Thread(target=self._file.write_all, name="recorder", daemon=True).start()

    def begin(self, why: str) -> None:
        """Begin a part, with the books as they are now."""
        if self._file.failed:
            return
        if not self._file.takes_part:
            self._incomplete = True
            return
        self._began = now = self._now()
        broker = self._broker
        head = trace.head(trace.Begin(why, int(time.time()), now, broker.books.rules))
        more: list[trace.Row] = [
            ft.QuotaSet(tenant, model, location, quota.limit, quota.guarantee, quota.weight)
            for (tenant, model, location), quota in broker.ledger.quotas.items()
        ]
        if broker.books.draining:
            more.append(ev.SetDraining(0, draining=True))
        waits = [
            (waiter.event, max(0, (waiter.deadline or 0) - now))
            for waiter in broker.waiting.waiters()
            if not isinstance(waiter.event, ev.Declare)
        ]
        self._calls = {event.call for event, _ in waits}
        answering = broker.books.recallable.answering()
        self._file.put_part(_lines_of(head, checkpoint_facts(broker.ledger), answering, more, waits))

    # --- on the event loop ---

    def take(self, event: ev.Event, step: Step, now: int) -> None:
        """Record one step of the core. Never raises: lending must go on."""
        if self._file.failed:
            return
        try:
            self._take(event, step, now)
        except Exception as error:  # noqa: BLE001 - a fault of the recorder must not stop the daemon
            self._file.failed = True
            logs.fault(error, doing="record: it has stopped")

    def _take(self, event: ev.Event, step: Step, now: int) -> None:
        if self._incomplete or self._file.ended:
            if self._incomplete and not self._file.is_idle:
                return
            self._incomplete = False
            self.begin(self._file.ended or "rows were lost")
            return  # the books at the beginning of the part have this step
        microseconds = max(0, now - self._began) // 1_000
        lines = [trace.line(microseconds, row) for row in self._rows(event, step)]
        if lines and not self._file.put("".join(lines).encode()):
            self._incomplete = True

    def _rows(self, event: ev.Event, step: Step) -> Iterator[trace.Row]:
        for row in _rows_of([event]):
            if isinstance(row, ev.Allocate | ev.Declare | trace.Create):
                if trace.is_sound(row):
                    self._calls.add(row.call)
                    yield row
            elif not isinstance(row, ev.CancelWait) or row.call in self._calls:
                yield row
        if self._broker.books.stopping and not self._stop_is_recorded:
            self._stop_is_recorded = True
            yield trace.DaemonStops()
        yield from _rows_of(fact for fact in step.facts if not isinstance(fact, trace.OF_BOOKS))
        answering: list[tuple[int, ModelName]] = []
        for fact in step.facts:
            if isinstance(fact, ft.SessionMoved) and fact.cause == "resumed":
                models = self._broker.ledger.sessions[fact.session].models
                answering += [(fact.session, name) for name in sorted(models)]
        if isinstance(event, ev.RegisterModel) and event.answers is not None:
            answering.append((event.session, event.name))
        for session, name in answering:
            yield trace.AnswersRecalls(session, name, self._broker.books.recallable.answers(session, name))
        if step.effects:
            yield from self._decisions(step.effects)

    def _decisions(self, effects: list[fx.Effect]) -> Iterator[trace.Row]:
        waits = {waited.call: waited for waited in effects if isinstance(waited, fx.Waited)}
        for effect in effects:
            if isinstance(effect, fx.Answer) and effect.call in self._calls:
                self._calls.discard(effect.call)
                reason = effect.result.reason.value if isinstance(effect.result, Denied) else ""
                wait = waits.get(effect.call)
                yield trace.Outcome(effect.call, reason, wait.result if wait else "", wait.waited_ns if wait else 0)
            elif isinstance(effect, fx.SendRecall | fx.Recalled):
                yield effect

    def close(self) -> None:
        """Write what waits, for at most a second, and end the thread."""
        self._file.close()


def _lines_of(
    head: str,
    books: Iterator[ft.Fact],
    answering: Mapping[ModelName, Iterable[int]],
    more: list[trace.Row],
    waits: list[tuple[ev.Allocate | ev.CreateSegment, int]],
) -> Iterator[str]:
    """Yield the lines of the books. The thread runs this, so everything that they are made of was copied.

    To make the rows of 16,384 requests that wait would take 100 ms of a turn of the event loop.
    """
    answers = (
        trace.AnswersRecalls(session, name, answers=True)
        for name, all_ in answering.items()
        for session in sorted(all_)
    )
    waiting = _rows_of(replace(event, wait_ns=wait) for event, wait in waits)
    rows: tuple[Iterable[trace.Row], ...] = _rows_of(books), [trace.BooksComplete()], answers, more, waiting
    yield head
    yield from (trace.line(0, row) for row in chain.from_iterable(rows))


def _rows_of(said: Iterable[ev.Event | ft.Fact]) -> Iterator[trace.Row]:
    """Yield what a trace has of events and facts, without what identifies a program or a segment."""
    row: Any
    for row in said:
        match row:
            case ev.CreateSegment():
                name = ModelName(row.name.tenant, row.name.model)
                yield trace.Create(
                    call=row.call,
                    session=row.session,
                    request_id=row.request_id,
                    name=name,
                    location=row.location,
                    size=row.size,
                    wait_ns=row.wait_ns,
                )
            case ft.SessionBegan():
                yield replace(row, **_HIDDEN)
            case ft.SegmentBegan():
                yield replace(row, label="")
            case _ if type(row) in trace.FORMS:
                yield row


class _RecordFile:
    """The two files, and the thread that writes them."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.path, self._old = directory / "trace.jsonl", directory / "trace-old.jsonl"
        self._max_bytes = max_bytes
        self._descriptor = -1
        self._size = self._books_bytes = 0
        self.failed = False
        self.ended = ""
        """Why nothing more belongs in the file: it is full, or it is not at its path any more."""
        self._parts: list[bytearray | Iterator[str] | None] = []
        """What is queued: rows, or the lines of the books at the beginning of a part. None: the end."""
        self._queued = self._queued_parts = 0
        """Bytes of rows that are not written, and beginnings of parts."""
        self._changed = threading.Condition()
        self._ended = threading.Event()

    # --- on the event loop ---

    @property
    def is_idle(self) -> bool:
        """Whether all is written."""
        return not self._queued and not self._queued_parts

    @property
    def takes_part(self) -> bool:
        """Whether few enough beginnings of parts wait to be written."""
        return self._queued_parts < QUEUE_PARTS

    def put(self, data: bytes) -> bool:
        """Queue rows; return False if too much waits already."""
        with self._changed:
            if self._queued + len(data) > QUEUE_BYTES:
                return False
            self._queued += len(data)
            if self._parts and isinstance(last := self._parts[-1], bytearray):
                last += data
            else:
                self._parts.append(bytearray(data))
            if self._queued >= FLUSH_BYTES:
                self._changed.notify_all()
        return True

    def put_part(self, lines: Iterator[str]) -> None:
        """Queue the beginning of a part. It begins a new file if this one has ended."""
        with self._changed:
            self._parts.append(lines)
            self._queued_parts += 1
            self._changed.notify_all()
            self.ended = ""

    def close(self) -> None:
        """Let the thread end once it has written what is queued."""
        with self._changed:
            self._parts.append(None)
            self._changed.notify_all()
        self._ended.wait(CLOSE_SECONDS)

    # --- on the thread ---

    def write_all(self) -> None:
        """Write what is queued until `close`, or until it cannot be written."""
        try:
            self._open()
            while True:
                for part in self._take():
                    if part is None:
                        return
                    if isinstance(part, bytearray):
                        self._write(part)
                    else:
                        self._write_part(part)
                    ended = self._why_ended()  # without the lock: it may wait for the disk
                    with self._changed:
                        if isinstance(part, bytearray):
                            self._queued -= len(part)
                        else:
                            self._queued_parts -= 1
                        self.ended = "" if self._queued_parts else ended
        except OSError as error:
            logs.warn(
                "the trace cannot be written: recording has stopped until the next start, and lending goes on",
                path=str(error.filename2 or error.filename or self.path),
                error=error.strerror,
            )
        finally:
            self.failed = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._ended.set()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = files.open_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._size = os.fstat(self._descriptor).st_size
        self._books_bytes = 0

    def _why_ended(self) -> str:
        """Return why a new file must begin, or an empty text. An operator may have moved or removed this one."""
        try:
            in_place = os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            in_place = False
        if not in_place:
            return "the file was removed"
        return "the file was full" if self._size - self._books_bytes >= self._max_bytes else ""

    def _take(self) -> list[bytearray | Iterator[str] | None]:
        """Return what is queued, once it is FLUSH_BYTES, or after FLUSH_SECONDS."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued >= FLUSH_BYTES or None in self._parts, FLUSH_SECONDS)
            taken, self._parts = self._parts, []
        return taken

    def _write_part(self, lines: Iterator[str]) -> None:
        if why := self._why_ended():
            if why == "the file was full":
                self.path.rename(self._old)
            os.close(self._descriptor)
            self._descriptor = -1
            self._open()
        began = self._size
        if began:
            self._write(b"\n")  # the last daemon may have ended in the middle of a line
        for text in lines:
            self._write(text.encode())
        if not began:
            self._books_bytes = self._size

    def _write(self, data: bytes | bytearray) -> None:
        while data:
            written = os.write(self._descriptor, data)
            self._size += written
            data = data[written:]
