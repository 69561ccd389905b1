"""The writer: what changed in the books goes to the journal before anything comes of it.

Runs on the event loop's thread. It owns when the journal is compacted, and tells the core when it cannot be written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from membroker.vmm import format_size

from ..core import facts as ft
from ..core.checkpoint import checkpoint_facts
from ..core.machine import Broker
from ..restart.journal import RESERVE_BYTES, Journal
from ..restart.records import LEFT_OUT
from ..system import logs
from ..system.failpoints import reach
from ..system.turns import in_portions

_DEBITS = frozenset((ft.Debited, ft.SegmentBegan))


class JournalWriter:
    """Writes the facts of one broker to one journal. `observe` gets the seconds of each write.

    `is_in_place` says whether the daemon's directory is its own: in another's place, a successor has its journal.
    """

    def __init__(
        self,
        broker: Broker,
        journal: Journal,
        observe: Callable[[float], None] = lambda seconds: None,
        is_in_place: Callable[[], bool] = lambda: True,
    ) -> None:
        self._broker = broker
        self._journal = journal
        self._observe = observe
        self._is_in_place = is_in_place
        self._compacting: Generator[None, None, None] | None = None

    def write(self, facts: list[ft.Fact]) -> bool:
        """Append the facts of one step. False: they are not in the file, and nothing may come of a debit.

        Without facts it tries again to write what is left, and tells the core when there is room.
        """
        journal, books = self._journal, self._broker.books
        kinds = set(map(type, facts))
        if kinds <= LEFT_OUT and not books.cannot_write:
            return True
        kind = "credit" if kinds.isdisjoint(_DEBITS) else "debit"
        reach(kind)
        start = time.perf_counter()
        is_written = journal.append(facts)
        self._observe(time.perf_counter() - start)
        if journal.due and self._is_in_place():
            self.compact()
        if journal.full or books.cannot_write:
            self._tell_broker()
        reach(f"{kind}ed")
        return is_written

    def look(self) -> None:
        """Tell the core whether the journal has room, before the first step."""
        if self._journal.full:
            self._tell_broker()

    def compact(self) -> None:
        """Begin to replace the journal by a short one, in portions, unless that is going on already."""
        if self._compacting is None:
            reach("compact")
            self._compacting = self._compact()
            in_portions(self._compacting, lambda _: self._compacted())

    def _compact(self) -> Generator[None, None, None]:
        try:
            yield from self._journal.compact(checkpoint_facts(self._broker.ledger))
        except OSError as error:
            logs.warn("the journal cannot be compacted and keeps growing", error=error.strerror)
        finally:
            self._compacting = None

    def _compacted(self) -> None:
        self._tell_broker()
        reach("compacted")

    def _tell_broker(self) -> None:
        books, path = self._broker.books, str(self._journal.path)
        if self._journal.full and not books.cannot_write:
            logs.warn(
                "the journal cannot be written: the broker lends nothing more and begins no session; make room there",
                path=path,
                needs=format_size(2 * RESERVE_BYTES),
                error=self._journal.why,
            )
        elif books.cannot_write and not self._journal.full:
            logs.log("the journal can be written again", path=path)
        books.cannot_write = f"no room for its journal ({self._journal.why})" if self._journal.full else ""

    def close(self) -> None:
        """Abandon a compaction: the file that it would have replaced is whole."""
        if self._compacting is not None:
            self._compacting.close()
