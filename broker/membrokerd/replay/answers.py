"""How programs answer recalls in a replay: as they did, after the same time and with the same part of what is asked."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from ..ext import Broker
from ..ext import effects as fx
from ..ext import events as ev
from .past import Answered, Past, PastLoan, Where

LAST = math.inf
"""The place of what the trace does not place: behind the rows of the same time."""


class Programs(Protocol):
    """What answers need of the world around the core."""

    broker: Broker
    now: int
    extents: dict[PastLoan, range]

    def tell(self, event: ev.Event) -> None:
        """Give the core an event."""
        ...

    def release(self, session: int, ids: list[int]) -> None:
        """Let a session release what it has of these extents."""
        ...

    def do_later(self, at: int, index: float, what: Callable[[], None]) -> None:
        """Do something at a time, in the place of a row."""
        ...


@dataclass(slots=True)
class _Asked:
    """A recall that a program works on. It looks at the `size` when it releases: `heard` is what it saw last."""

    size: int
    heard: int
    given: int = 0


class Answers:
    """The answers of all sessions."""

    def __init__(self, programs: Programs, past: Past) -> None:
        self._programs = programs
        self._past = past
        self._asked: dict[tuple[int, int], _Asked] = {}
        self._answered: Counter[Where] = Counter()

    def recall(self, recall: fx.SendRecall, recorded: int) -> None:
        """Answer a recall of the session that is `recorded` in the trace.

        Its first as its first there, and so on; one more as its last, or else as another session of its model.
        """
        asked = self._asked.get((recall.session, recall.recall))
        if asked is not None:  # it is raised; or late, and repeated with what is left
            asked.size = max(asked.size, recall.size)
            return
        self._asked[recall.session, recall.recall] = _Asked(recall.size, recall.size)
        where = recorded, recall.name, recall.location
        number, known = self._answered[where], self._past.answers.get(where, [])
        self._answered[where] += 1
        answer = known[min(number, len(known) - 1)] if known else None
        if answer is None:
            answer = next((found[-1] for key, found in self._past.answers.items() if key[1:] == where[1:]), None)
        if answer is None:  # nothing like it was recorded: it releases all that is asked, at once
            self._give_later(recall, Fraction(1), (), 0, LAST)
            self._say(recall, 0, has_heard=True)
        else:
            self._answer(recall, answer)

    def _answer(self, recall: fx.SendRecall, answer: Answered) -> None:
        total = after = 0
        for row, together in itertools.groupby(answer.released, lambda one: one[0].row):
            own: list[int] = []
            size = of = 0
            for released, loan, asked in together:
                of = asked
                ids, after = self._programs.extents.get(loan, range(0)), released.after
                for positions in released.positions:
                    own += ids[positions.start : positions.stop]
                    size += len(positions) * loan.extent_bytes
            total += size
            self._give_later(recall, Fraction(total, max(1, of)), tuple(own), after, row)
        if answer.after is not None:
            self._say(recall, answer.after, has_heard=answer.has_heard)
        elif total >= answer.size:  # its last byte ended it
            self._say(recall, after, has_heard=False)

    def _give_later(self, recall: fx.SendRecall, part: Fraction, own: tuple[int, ...], after: int, row: float) -> None:
        """Release, in some time, what is then missing of a part of all that is asked for."""

        def give() -> None:
            asked = self._asked.get((recall.session, recall.recall))
            if asked is not None:
                asked.heard = asked.size
                size = math.ceil(part * asked.size) - asked.given
                asked.given += size
                self._give_back(recall, size, own)

        self._programs.do_later(self._programs.now + after, row, give)

    def _say(self, recall: fx.SendRecall, after: int, *, has_heard: bool) -> None:
        def say() -> None:
            asked = self._asked.pop((recall.session, recall.recall), None)
            if asked is not None:
                size = asked.size if has_heard else asked.heard
                self._programs.tell(ev.AnswerRecall(recall.session, recall.recall, size))

        self._programs.do_later(self._programs.now + after, LAST, say)

    def _give_back(self, recall: fx.SendRecall, size: int, own: tuple[int, ...]) -> None:
        """Let a session release `size` bytes: the extents that it did release, if it has them, then its newest ones."""
        row = self._programs.broker.ledger.sessions.get(recall.session)
        if row is None:
            return
        mine = {
            extent: loan.extent_bytes
            for extent, loan in row.extents.items()
            if (loan.name, loan.location) == (recall.name, recall.location)
        }
        chosen: list[int] = []
        for extent in [*(one for one in own if one in mine), *sorted(mine.keys() - set(own), reverse=True)]:
            if size <= 0:
                break
            chosen.append(extent)
            size -= mine[extent]
        self._programs.release(recall.session, chosen)
