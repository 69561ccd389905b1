"""What a daemon takes over from its predecessor, when the configuration has changed since."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.keepers import memfd

from membroker.vmm.sizes import MAX_BYTES
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.core.checkpoint import checkpoint_facts
from membrokerd.core.denied import Reason
from membrokerd.core.machine import Broker
from membrokerd.core.names import Location, ModelName, SegmentName
from membrokerd.device.executor import OWN
from membrokerd.restart import takeover as inheritance
from membrokerd.restart.descriptor_store import Store, StoredDescriptors
from membrokerd.restart.records import MAX_IDS
from membrokerd.restart.takeover import cover_lent, last_epoch, rebuild_books, take_descriptors, warn_of_holders

MODEL = ModelName("t", "m")


def broker(capacities: dict[Location, int]) -> Broker:
    return Broker(policy.Rules(granularity=2, capacities=capacities), epoch=1)


def test_a_removed_location_can_have_a_segment_of_zero_bytes() -> None:
    """A create failed, and the daemon died before the keeper dropped it. Then an operator removed the location."""
    before = broker({"device": 64, "host": 64})
    before.step(ev.OpenSession(1, "t", 1, 1, "p", False, ""), 0)
    (session,) = before.ledger.sessions
    before.step(ev.RegisterModel(2, session, 1, MODEL, None, {}, False), 0)
    before.step(ev.CreateSegment(3, session, 2, SegmentName("t", "m", "s"), "host", 4), 0)
    before.step(ev.NotMade(session, 2, 0, Reason.DEVICE_FULL, {}), 0)
    told, charged, *_ = rebuild_books(checkpoint_facts(before.ledger))
    held = cover_lent({"device": 64}, charged)
    after = Broker(policy.Rules(granularity=2, capacities=held), 2, told)
    after.step(ev.Restarted(frozenset(), {}), 0)
    (segment,) = after.ledger.segments
    after.step(ev.Dropped(segment), 0)
    assert not after.ledger.segments
    assert held == {"device": 64, "host": 0}


def test_capacities_are_raised_to_what_is_lent() -> None:
    """An extent is lent at a location whose configured capacity is now smaller, or that is not configured any more.

    A location at which all was released stays removed.
    """
    before = broker({"device": 64, "host": 64})
    _, charged, *_ = rebuild_books(checkpoint_facts(before.ledger))
    assert cover_lent({"device": 64}, charged) == {"device": 64}
    before.step(ev.OpenSession(1, "t", 1, 1, "p", False, ""), 0)
    (session,) = before.ledger.sessions
    before.step(ev.RegisterModel(2, session, 1, MODEL, None, {}, False), 0)
    before.step(ev.Allocate(3, session, 2, MODEL, "device", 2, 4), 0)
    before.step(ev.Allocate(4, session, 3, MODEL, "host", 2, 3), 0)
    _, charged, *_ = rebuild_books(checkpoint_facts(before.ledger))
    assert cover_lent({"device": 4}, charged) == {"device": 8, "host": 6}
    assert cover_lent({"device": 9, "host": 6}, charged) == {"device": 9, "host": 6}


SESSION = ft.SessionBegan(7 << 40, "t", 5, 1, "p", False, "", 1)
BEGAN: list[ft.Fact] = [ft.ModelBegan(MODEL, None, {}), SESSION, ft.ModelJoined(MODEL, SESSION.session)]


def debit(first: int, count: int, size: int = 2) -> ft.Debited:
    return ft.Debited(SESSION.session, MODEL, "device", size, first, count)


def test_the_epoch_of_the_books_is_that_of_the_last_id() -> None:
    """New ids must be above all ids that an earlier daemon issued and that are still in the books."""
    assert rebuild_books([]).epoch == 0
    assert rebuild_books(BEGAN).epoch == 7
    lent = [*BEGAN, debit((8 << 40) + 1, 3)]
    assert rebuild_books(lent).epoch == 8
    assert rebuild_books(lent).by_pid == {5: 6}
    segment = ft.SegmentBegan(9 << 40, MODEL, "s", "device", 2, 2, (9 << 40) + 1, 1, SESSION.session, 1)
    assert rebuild_books([*lent, segment]).epoch == 9
    assert last_epoch(StoredDescriptors()) == 0
    assert last_epoch(StoredDescriptors({9 << 40: {(10 << 40) + 1: 0}}, {3 << 40: 0})) == 10


CONTRADICTIONS = {
    "a debit of an unknown session": [debit(1, 1)],
    "a second owner of an extent": [*BEGAN, debit(1, 3), debit(3, 1)],
    "too many bytes": [*BEGAN, debit(1, 4, MAX_BYTES)],
    "a credit of an extent that was not lent": [
        *BEGAN,
        debit(1, 1),
        ft.Credited(SESSION.session, range(1, 3), "released"),
    ],
    "too many extents at once": [*BEGAN, *(debit(1 + at * MAX_IDS, MAX_IDS) for at in range(1000))],
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradicting_facts_are_an_error(case: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        rebuild_books(CONTRADICTIONS[case])


def test_released_extents_do_not_count_towards_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker allocates and releases all night. In total that exceeds the bound, but never at once."""
    monkeypatch.setattr(inheritance, "MAX_IDS", 10)
    churn: list[ft.Fact] = []
    for round_ in range(20):
        ids = range(1 + 8 * round_, 9 + 8 * round_)
        churn += [debit(ids.start, 8), ft.Credited(SESSION.session, ids, "released")]
    assert not rebuild_books([*BEGAN, *churn]).charged
    with pytest.raises(AssertionError, match="lent at once"):
        rebuild_books([*BEGAN, *churn, debit(1000, 6), debit(2000, 6)])


def test_processes_that_may_hold_memory_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """The log names processes that use more than they are charged, the largest first, and counts the rest."""
    warn_of_holders([(1, 10), (2, 20), (3, 30)], {1: 10, 2: 5, 3: 31})
    assert [record.fields["pid"] for record in caplog.records] == [2]
    caplog.clear()
    warn_of_holders([(pid, pid) for pid in range(1, 101)], {})
    assert [record.fields.get("pid") for record in caplog.records] == [*range(100, 92, -1), None]
    assert caplog.records[-1].fields == {"count": 92}


def test_the_store_is_made_to_agree_with_the_books() -> None:
    """The store has all of one segment, half of another, and a segment and a process that are not in the books."""
    rules = policy.Rules(granularity=2, capacities={"device": 64}, segment_extent_bytes=2)
    books = Broker(rules, epoch=1)
    books.step(ev.OpenSession(1, "t", 1, 1, "p", False, ""), 0)
    (session,) = books.ledger.sessions
    books.step(ev.RegisterModel(2, session, 1, MODEL, None, {}, False), 0)
    for request_id, label in enumerate(("whole", "half"), start=2):
        books.step(ev.CreateSegment(request_id, session, request_id, SegmentName("t", "m", label), "device", 4), 0)
    whole, half = books.ledger.segments.values()
    mine, stranger, *descriptors = (memfd(b"") for _ in range(6))
    kept = StoredDescriptors(
        {
            whole.segment: dict(zip(whole.ids, descriptors[:2], strict=True)),
            half.segment: {half.ids[0]: descriptors[2]},
        },
        {session: mine, session + 1: stranger},
    )
    kept.segments[half.segment + 100] = {1: descriptors[3]}
    store = Store()
    store.adopt(kept)
    closed: list[int] = []

    class Executor:
        def close(self, whose: str, descriptors: Sequence[int]) -> None:
            assert whose == OWN
            closed.extend(descriptors)

    executor: Any = Executor()
    assert take_descriptors(books.ledger, store, executor, kept) == {half.segment}
    assert closed == descriptors[3:]
    with pytest.raises(OSError) as closed_too:
        os.fstat(stranger)
    assert closed_too.value.errno == errno.EBADF
    left = store.close()
    assert sorted(left) == sorted([*descriptors[:3], mine])
    for descriptor in [*left, *closed]:
        os.close(descriptor)
