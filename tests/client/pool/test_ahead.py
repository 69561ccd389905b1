"""Borrowing ahead: a pool keeps spare pages ready before they are needed, and lets go of what is too many."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect

from membroker.errors import InvalidRequest, OutOfMemory
from membroker.interrupts import Condition
from membroker.pool import ahead as ahead_module
from membroker.pool.ahead import Ahead
from membroker.pool.pool import VirtualMemoryPool
from membroker.types import Move


def threads() -> int:
    """How many threads borrow ahead."""
    return sum(thread.name == "membroker-ahead" for thread in threading.enumerate())


def spare(pool: VirtualMemoryPool) -> int:
    """How many spare pages a pool has."""
    return pool.stats().spare_pages


class Held:
    """A thread of the library that is stopped while it changes pages, until a user's call waits for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.waited, self.may_go_on = threading.Event(), threading.Event(), threading.Event()
        self.on_wait: Callable[[], None] = self.may_go_on.set
        wait = Condition.wait

        def noticed(condition: Condition, seconds: float | None = None) -> None:
            self.waited.set()
            self.on_wait()
            wait(condition, seconds)

        monkeypatch.setattr(Condition, "wait", noticed)

    def stop(self) -> None:
        """Part of what the library's thread does."""
        self.began.set()
        assert self.may_go_on.wait(DEADLINE_SECONDS)


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "LOOK_SECONDS", 0.02)


@contextmanager
def a_pool(lender: Lender, ahead: int = 4, *, is_ready: bool = True, **options: Any) -> Iterator[VirtualMemoryPool]:
    """A pool that borrows ahead, and has done so."""
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE, ahead=ahead, **options) as pool:
        if is_ready:
            until(lambda: spare(pool) == ahead)
        yield pool


@pytest.fixture
def asked_ahead(lender: Lender, monkeypatch: pytest.MonkeyPatch, looks_often: None) -> Iterator[Held]:
    """The thread that borrows ahead, stopped while it asks."""
    held, borrow = Held(monkeypatch), lender.borrow

    def slow(*args: object, ahead: bool = False, **options: object) -> None:
        if ahead:
            held.stop()
        borrow(*args, **options)  # type: ignore[arg-type]

    lender.borrow = slow  # type: ignore[method-assign,assignment]
    yield held
    held.may_go_on.set()
    until(lambda: threads() == 0)


def test_pages_are_there_before_they_are_wanted(lender: Lender) -> None:
    """Taking some lets the thread borrow as many again; the lowest free addresses come first."""
    with a_pool(lender) as pool:
        assert [pool.allocate_anywhere(PAGE) - pool.base_address for _ in range(3)] == [0, PAGE, 2 * PAGE]
        until(lambda: spare(pool) == 4)
        assert pool.stats().mapped_pages == 7
    until(lambda: threads() == 0)


def looks_again(pool: VirtualMemoryPool) -> None:
    """Wait until the thread has begun to look three times more, so that it has ended two looks."""
    ahead = pool._ahead
    assert ahead is not None
    looks: list[int] = []
    work_out = ahead.work_out

    def noted() -> int:
        looks.append(work_out())
        return looks[-1]

    ahead.work_out = noted  # type: ignore[method-assign]
    until(lambda: len(looks) >= 3)


@pytest.mark.parametrize("call", [VirtualMemoryPool.trim, VirtualMemoryPool.offload])
def test_what_releases_the_spare_pages_lets_it_rest(
    lender: Lender, looks_often: None, call: Callable[[VirtualMemoryPool], int]
) -> None:
    """Until the next page is taken: the pool sleeps, or others need the memory."""
    with a_pool(lender) as pool:
        call(pool)
        looks_again(pool)
        assert lender.lent_bytes == 0
        pool.allocate_anywhere(PAGE)
        until(lambda: spare(pool) == 4)


def a_hole(pool: VirtualMemoryPool) -> list[Move]:
    """Allocate two runs with a hole below each, and return the moves that close both."""
    for page in (4, 10):
        pool.allocate(page * PAGE, 2 * PAGE)
    return [Move(4 * PAGE, 0, 2 * PAGE), Move(10 * PAGE, 2 * PAGE, 2 * PAGE)]


def test_a_compaction_waits_for_pages_that_are_on_their_way(lender: Lender, asked_ahead: Held) -> None:
    """They lie in a hole. Ctrl-C ends the wait, because the broker may be away; then they come, and go back."""
    with a_pool(lender, is_ready=False) as pool:
        assert asked_ahead.began.wait(DEADLINE_SECONDS)
        moves = a_hole(pool)
        assert not asked_ahead.waited.is_set()
        asked_ahead.on_wait = lambda: signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            pool.compact()
        asked_ahead.on_wait = asked_ahead.may_go_on.set
        assert pool.compact(dry_run=True) == moves
        assert pool.compact() == moves
        looks_again(pool)
        assert lender.lent_bytes == 4 * PAGE


@pytest.mark.parametrize("call", ["compact", "grow"])
def test_a_call_waits_for_pages_that_are_being_released(
    lender: Lender, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The broker has asked for spare pages, which the library releases in a thread of its own: their place is taken."""
    held, give_back = Held(monkeypatch), lender.give_back
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=4) as pool:
        pool.prepare(4 * PAGE)
        moves = a_hole(pool) if call == "compact" else []
        lender.give_back = lambda ids: (held.stop(), give_back(ids))  # type: ignore[method-assign,assignment]
        release = threading.Thread(target=pool._holding.give_spare, args=(4 * PAGE, lambda _: True))
        release.start()
        assert held.began.wait(DEADLINE_SECONDS)
        if call == "compact":
            assert pool.compact() == moves
        else:
            assert pool.grow(2 * PAGE) == pool.base_address
        release.join()
        assert held.waited.is_set()
        assert spare(pool) == 0


@pytest.mark.parametrize("call", [VirtualMemoryPool.trim, VirtualMemoryPool.offload])
def test_pages_that_come_after_their_release_go_back(
    lender: Lender, asked_ahead: Held, call: Callable[[VirtualMemoryPool], int]
) -> None:
    """The call does not wait for them: the broker may be away."""
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=8, ahead=4) as pool:
        assert asked_ahead.began.wait(DEADLINE_SECONDS)
        call(pool)
        assert not asked_ahead.waited.is_set()
        asked_ahead.may_go_on.set()
        looks_again(pool)
        assert lender.lent_bytes == 0


def test_after_a_refusal_it_pauses(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 ms, then twice as long each time, at most a second; what is granted in between ends that."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(ahead_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ahead = Ahead(4, PAGE)
    pauses = []
    for _ in range(7):
        ahead.refused()
        began = clock.now
        while ahead.is_paused:
            clock.now += 0.0125
        pauses.append(round(clock.now - began, 1))
    assert pauses == [0.1, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    ahead.granted()
    ahead.refused()
    clock.now += 0.06
    assert not ahead.is_paused


def test_a_call_that_is_refused_takes_what_is_on_its_way(lender: Lender) -> None:
    """It counts against the same guarantee, and here it was the rest of it."""
    lender.capacity = PAGE
    borrow, lent, refused = lender.borrow, threading.Event(), threading.Event()

    def slow(*args: object, ahead: bool = False, **options: object) -> None:
        if ahead:
            borrow(*args, **options)  # type: ignore[arg-type]
            lent.set()
            assert refused.wait(DEADLINE_SECONDS)
            return
        assert lent.wait(DEADLINE_SECONDS)
        try:
            borrow(*args, **options)  # type: ignore[arg-type]
        except OutOfMemory:
            refused.set()
            raise

    lender.borrow = slow  # type: ignore[method-assign,assignment]
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE, ahead=1) as pool:
        pool.allocate_anywhere(PAGE)
        assert refused.is_set()
        lender.capacity = 0
        with pytest.raises(OutOfMemory):
            pool.allocate_anywhere(PAGE)


@pytest.mark.parametrize(
    "call", [lambda pool: pool.allocate_ranges([(0, PAGE)]), lambda pool: pool.allocate_anywhere(PAGE)]
)
@pytest.mark.parametrize("lends", [True, False])
def test_a_call_waits_for_pages_that_are_on_their_way(
    lender: Lender, asked_ahead: Held, call: Callable[[VirtualMemoryPool], object], lends: bool
) -> None:
    """The user cannot know that the library borrows them; if it is refused, the call borrows for itself."""

    def refuse() -> None:
        if threading.current_thread().name == "membroker-ahead":
            raise OutOfMemory("not ahead")

    if not lends:
        lender.before_borrow = refuse
    with VirtualMemoryPool(lender, 4 * PAGE, PAGE, ahead=4) as pool:
        assert asked_ahead.began.wait(DEADLINE_SECONDS)
        call(pool)
        assert asked_ahead.waited.is_set()
        assert pool.stats().mapped_pages >= 1


def test_auto_follows_the_busiest_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as were taken in any 20 ms of the last 10 seconds, at least one and at most 1 GiB."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(ahead_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ahead = Ahead(None, 64 << 20)
    assert ahead.work_out() == 1
    for _ in range(5):
        ahead.took(1, 9)
    clock.now += 0.03
    ahead.took(2, 9)
    assert ahead.work_out() == 5
    clock.now += 9.9
    ahead.took(1, 9)
    assert ahead.work_out() == 5
    clock.now += 0.2
    ahead.took(3, 9)
    assert ahead.work_out() == 3
    ahead.took(99, 9)
    assert ahead.work_out() == 16
    clock.now += 20
    assert ahead.work_out() == 1


def test_what_is_too_many_goes_back(lender: Lender, looks_often: None) -> None:
    """When the busiest moment is over, without a wait for the device."""
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE, ahead="auto") as pool:
        pool._ahead.took(12, 0)
        until(lambda: spare(pool) == 12)
        pool._backing._is_never_busy = False
        lender.driver.before_synchronize = lambda: pytest.fail("it waited for the device")
        pool._ahead._history.clear()
        pool._ahead._taken = 0
        until(lambda: spare(pool) == 1)
        lender.driver.before_synchronize = lambda: None


def test_a_pool_that_is_garbage_ends(lender: Lender) -> None:
    """The thread does not keep it."""
    pools = [VirtualMemoryPool(lender, 64 * PAGE, PAGE, ahead=2)]
    until(lambda: spare(pools[0]) == 2)
    pools.clear()
    collect()
    lender.settle()
    until(lambda: threads() == 0)


@pytest.mark.parametrize("ahead", [-1, 1.5, "much", None])
def test_what_is_no_number_of_pages_is_refused(lender: Lender, ahead: object) -> None:
    """Before anything is reserved."""
    with pytest.raises(InvalidRequest, match="ahead"):
        VirtualMemoryPool(lender, 64 * PAGE, PAGE, ahead=ahead)  # type: ignore[arg-type]
