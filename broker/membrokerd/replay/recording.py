"""What programs did in the recorded time, so that they can do it again: what they asked for, how long they kept each
loan, and how they answered recalls. Counts what became of it, too.

A trace says which extents were released and when. A loan's releases are kept as times since its grant: in a replay a
program keeps it as long, from the moment at which it is granted there.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..ext import Location, ModelName, Reason, policy
from ..ext import effects as fx
from ..ext import events as ev
from ..ext import facts as ft
from . import trace
from .figures import GIVEN_UP, Tally
from .reading import CreditedRuns, TracePart

_BY_PROGRAM = ("released", "not held")
"""The causes of a credit by which a program has released extents; the others follow from the end of its session."""
_BY_NUMBERS = frozenset(
    (
        *policy.WANTS_OF_ROOM,
        *(Reason.TOO_MANY_SEGMENTS, Reason.DRAINING, Reason.STOPPING, Reason.MODEL_NOT_FOUND),
    )
)
"""Refusals that the core decides by its books. A request that was refused for another reason is so in a replay too."""


class RecordedRelease(NamedTuple):
    """Part of a loan was released, `after` nanoseconds: by the row `row`, its extents at `positions`."""

    after: int
    row: int
    positions: tuple[range, ...]


@dataclass(slots=True, eq=False)
class RecordedLoan:
    """A request for memory. `call` 0: it was lent already when the part began."""

    call: int
    session: int
    name: ModelName
    location: Location
    extent_bytes: int
    count: int
    wait_ns: int | None = None
    ahead: bool = False
    wanted_bytes: int = 0
    is_segment: bool = False
    first: int = 0
    granted_at: int | None = None
    life: list[RecordedRelease] = field(default_factory=list)
    failures: list[tuple[int, int, str]] = field(default_factory=list)
    """Packets that could not be made: when, the position of the first extent, and why."""
    outcome: trace.Outcome | None = None

    @property
    def size(self) -> int:
        """Its bytes. A segment is one piece."""
        return self.extent_bytes * self.count

    @property
    def is_decided(self) -> bool:
        """Whether it was refused for a reason that no other number changes."""
        outcome = self.outcome
        if outcome is None or not outcome.reason or self.failures or outcome.waited == "cancelled":
            return False
        return outcome.reason not in _BY_NUMBERS


@dataclass(slots=True)
class RecordedDeclaration:
    """A declaration that was asked for; one that asks for no more than before is not counted."""

    name: ModelName
    location: Location
    asks_for_more: bool
    outcome: trace.Outcome | None = None


@dataclass(slots=True)
class RecordedAnswer:
    """How a session answered a recall of `size` bytes: what it released, and `after` which time that was all.

    Beside each release is how much was asked for by then. A guest declares less instead: `declared` has after which
    time, in which row, and how many bytes it declared before and then. `has_heard`: it knew of all raises when it
    answered.
    """

    size: int
    at: int
    released: list[tuple[RecordedRelease, RecordedLoan, int]] = field(default_factory=list)
    declared: list[tuple[int, int, int, int]] = field(default_factory=list)
    after: int | None = None
    has_heard: bool = False


BorrowerKey = tuple[int, ModelName, Location]
"""A session's part of a model at a location."""


class Recording:
    """A part of a trace, read once. `happened` counts what became of the requests."""

    def __init__(self, part: TracePart, happened: Tally) -> None:
        self.loans: defaultdict[int, list[RecordedLoan]] = defaultdict(list)
        """By the index of the row at which they are asked for."""
        self.declared: dict[int, RecordedDeclaration] = {}
        """By the index of the row; not those that answer a recall."""
        self.unasked_declarations: set[int] = set()
        """The rows of declarations that nobody asked for: they were in force when the part began."""
        self.drained: dict[int, tuple[int, int]] = {}
        """By call: when all inputs before its refusal were read, and in which row."""
        self.answers: defaultdict[BorrowerKey, list[RecordedAnswer]] = defaultdict(list)
        self._happened = happened
        self._is_journal = part.is_journal
        self._calls: dict[int, RecordedLoan | RecordedDeclaration] = {}
        self._pending: defaultdict[Any, deque[RecordedLoan]] = defaultdict(deque)
        self._firsts: list[int] = []
        self._by_first: dict[int, RecordedLoan] = {}
        self._segments: dict[int, RecordedLoan] = {}
        self._sums: dict[BorrowerKey, int] = {}
        self._asked_sums: dict[BorrowerKey, int] = {}
        self._open: dict[BorrowerKey, RecordedAnswer] = {}
        self._numbers: dict[tuple[int, int], tuple[BorrowerKey, RecordedAnswer]] = {}
        read_by: dict[type, Callable[[Any, int, int], None]] = {
            ev.Allocate: self._ask,
            trace.Create: self._ask,
            ev.Declare: self._declare,
            ft.DeclarationSet: self._declaration_set,
            ev.InputsDrained: self._drained,
            trace.Outcome: self._outcome,
            ft.Debited: self._debited,
            ft.SegmentBegan: self._segment_began,
            CreditedRuns: self._credited,
            ft.SegmentCredited: self._segment_credited,
            ft.SegmentEnded: self._segment_ended,
            fx.SendRecall: self._recall,
            ev.AnswerRecall: self._recall_answered,
            fx.Recalled: self._recalled,
            ft.SessionMoved: self._moved,
        }
        for index, (at, row) in enumerate(part.rows):
            read = read_by.get(type(row))
            if read is not None:
                read(row, index, at)
        self._typical = self._typical_lives()

    def all_loans(self) -> Iterable[RecordedLoan]:
        """Yield all loans."""
        return (loan for loans in self.loans.values() for loan in loans)

    # --- requests ---

    def _ask(self, row: ev.Allocate | trace.Create, index: int, _: int) -> None:
        size, count = (row.size, 1) if isinstance(row, trace.Create) else (row.extent_bytes, row.count)
        loan = RecordedLoan(
            call=row.call,
            session=row.session,
            name=row.name,
            location=row.location,
            extent_bytes=size,
            count=count,
            wait_ns=row.wait_ns,
        )
        if isinstance(row, trace.Create):
            loan.is_segment = True
        else:
            loan.ahead, loan.wanted_bytes = row.ahead, row.wanted_bytes
        self.loans[index].append(loan)
        self._calls[loan.call] = loan
        self._pending[_shape(loan)].append(loan)

    def _declare(self, row: ev.Declare, index: int, at: int) -> None:
        borrower = row.session, row.name, row.location
        before, answer = self._sums.get(borrower, 0), self._open.get(borrower)
        if answer is not None and row.recallable and row.declared_bytes < before:
            answer.declared.append((at - answer.at, index, before, row.declared_bytes))
            self._asked_sums[borrower] = row.declared_bytes
            return
        more = row.declared_bytes > before
        self.declared[index] = self._calls[row.call] = RecordedDeclaration(row.name, row.location, more)
        self._asked_sums[borrower] = row.declared_bytes

    def _declaration_set(self, row: ft.DeclarationSet, index: int, _: int) -> None:
        borrower = row.session, row.name, row.location
        if self._asked_sums.get(borrower) != row.declared_bytes:
            self.unasked_declarations.add(index)
        self._sums[borrower] = row.declared_bytes

    def _drained(self, row: ev.InputsDrained, index: int, at: int) -> None:
        self.drained[row.call] = at, index

    def _outcome(self, row: trace.Outcome, _: int, __: int) -> None:
        asked = self._calls.pop(row.call, None)
        if asked is None:
            return
        asked.outcome = row
        if isinstance(asked, RecordedLoan) and row.reason:
            pending = self._pending[_shape(asked)]
            if asked in pending:
                pending.remove(asked)
            if row.reason == GIVEN_UP:
                asked.failures.clear()
            elif asked.failures:
                asked.failures[-1] = (*asked.failures[-1][:2], row.reason)
        if not is_uncounted(asked):
            self._happened.answered(asked.name, asked.location, row.reason, row.waited_ns if row.waited else None)

    # --- loans ---

    def _debited(self, row: ft.Debited, index: int, at: int) -> None:
        shape = row.session, row.name, row.location, row.extent_bytes, row.count, False
        if self._pending[shape]:
            self._lent(self._pending[shape].popleft(), row.first, at)
            return
        for start in range(0, row.count, policy.MAX_COUNT):
            count = min(policy.MAX_COUNT, row.count - start)
            loan = RecordedLoan(0, row.session, row.name, row.location, row.extent_bytes, count)
            self.loans[index].append(loan)
            self._lent(loan, row.first + start, at)
            self._count_of_journal(loan)

    def _segment_began(self, row: ft.SegmentBegan, index: int, at: int) -> None:
        size = row.extent_bytes * (row.count - 1) + row.last_bytes
        shape = row.writer, row.name, row.location, size, 1, True
        if self._pending[shape]:
            loan = self._pending[shape].popleft()
        else:
            loan = RecordedLoan(0, row.writer, row.name, row.location, size, 1, is_segment=True)
            self.loans[index].append(loan)
            self._count_of_journal(loan)
        loan.granted_at = at
        self._segments[row.segment] = loan

    def _count_of_journal(self, loan: RecordedLoan) -> None:
        if self._is_journal:
            self._happened.answered(loan.name, loan.location, "", None)

    def _lent(self, loan: RecordedLoan, first: int, at: int) -> None:
        loan.first, loan.granted_at = first, at
        if not self._firsts or first > self._firsts[-1]:
            self._firsts.append(first)
        else:
            bisect.insort(self._firsts, first)
        self._by_first[first] = loan

    def _credited(self, row: CreditedRuns, index: int, at: int) -> None:
        if row.cause not in (*_BY_PROGRAM, "not made"):
            return
        by_loan: defaultdict[RecordedLoan, list[range]] = defaultdict(list)
        for run in row.runs:
            for loan, positions in self._parts_of(run):
                by_loan[loan].append(positions)
        for loan, found in by_loan.items():
            if row.cause == "not made":
                self._not_made(loan, found[0].start, index, at)
            else:
                self._released(loan, RecordedRelease(at - (loan.granted_at or 0), index, tuple(found)), at)

    def _parts_of(self, run: range) -> Iterator[tuple[RecordedLoan, range]]:
        """Yield each loan that has some of these extents, and their positions in it."""
        start = run.start
        while start < run.stop:
            place = bisect.bisect_right(self._firsts, start)
            stop = min([run.stop, *self._firsts[place : place + 1]])
            if place:
                loan = self._by_first[self._firsts[place - 1]]
                if positions := range(start - loan.first, min(stop - loan.first, loan.count)):
                    yield loan, positions
            start = stop

    def _released(self, loan: RecordedLoan, released: RecordedRelease, at: int) -> None:
        answer = self._open.get((loan.session, loan.name, loan.location))
        if answer is None:
            loan.life.append(released)
        else:
            answer.released.append((released._replace(after=at - answer.at), loan, answer.size))

    def _not_made(self, loan: RecordedLoan, position: int, index: int, at: int) -> None:
        """Note that a packet failed. The rest of the call is credited in the same step, and is not another failure."""
        if not loan.call:  # it was being made when the part began
            loan.life.append(RecordedRelease(at - (loan.granted_at or 0), index, (range(position, position + 1),)))
        elif not loan.failures or loan.failures[-1][0] != at:
            loan.failures.append((at, position, Reason.DEVICE_FULL))
            if loan.call in self._calls:  # it may be granted later: it waits for room on the device
                loan.granted_at = None
                self._pending[_shape(loan)].appendleft(loan)

    def _segment_credited(self, row: ft.SegmentCredited, index: int, at: int) -> None:
        loan = self._segments.get(row.segment)
        if loan is not None:
            self._not_made(loan, 0, index, at)

    def _segment_ended(self, row: ft.SegmentEnded, index: int, at: int) -> None:
        loan = self._segments.pop(row.segment, None)
        if loan is not None and loan.granted_at is not None:
            loan.life.append(RecordedRelease(at - loan.granted_at, index, (range(1),)))

    # --- recalls ---

    def _recall(self, row: fx.SendRecall, _: int, at: int) -> None:
        borrower = row.session, row.name, row.location
        known = self._numbers.get((row.session, row.recall))
        if known is not None:  # it is raised; or late, and repeated with what is left
            known[1].size = max(known[1].size, row.size)
        else:
            answer = RecordedAnswer(row.size, at)
            self.answers[borrower].append(answer)
            self._open[borrower] = answer
            self._numbers[row.session, row.recall] = borrower, answer

    def _recall_answered(self, row: ev.AnswerRecall, _: int, at: int) -> None:
        borrower, answer = self._numbers.get((row.session, row.recall), (None, None))
        if borrower is not None and answer is not None:
            answer.after = at - answer.at
            answer.has_heard = row.size >= answer.size
            if self._open.get(borrower) is answer:
                del self._open[borrower]

    def _recalled(self, row: fx.Recalled, _: int, __: int) -> None:
        self._happened.recalled(row)
        if row.result != "late":
            self._open.pop((row.session, row.name, row.location), None)

    def _moved(self, row: ft.SessionMoved, _: int, __: int) -> None:
        for borrower in [borrower for borrower in self._open if borrower[0] == row.session]:
            del self._open[borrower]

    # --- what is not in the trace ---

    def life_of(self, loan: RecordedLoan) -> list[RecordedRelease]:
        """Return how a loan is released. What was never granted lasts as long as the model's loans did most often.

        Nobody can know how long its program would have kept it. If none of the model's loans was released, it lasts
        until its session ends.
        """
        typical = self._typical.get((loan.name, loan.location, loan.is_segment))
        if loan.granted_at is not None or typical is None:
            return loan.life
        return [RecordedRelease(typical, 0, (range(loan.count),))]

    def _typical_lives(self) -> dict[tuple[ModelName, Location, bool], int]:
        lives: defaultdict[tuple[ModelName, Location, bool], list[int]] = defaultdict(list)
        for loan in self.all_loans():
            if loan.life:
                lives[loan.name, loan.location, loan.is_segment].append(loan.life[-1].after)
        return {key: statistics.median_low(found) for key, found in lives.items()}


def is_uncounted(asked: RecordedLoan | RecordedDeclaration) -> bool:
    """Say whether a request is not counted: nobody feels its refusal, or the trace does not say what became of it."""
    return asked.outcome is None or (asked.ahead if isinstance(asked, RecordedLoan) else not asked.asks_for_more)


def _shape(loan: RecordedLoan) -> tuple[Any, ...]:
    return loan.session, loan.name, loan.location, loan.extent_bytes, loan.count, loan.is_segment
