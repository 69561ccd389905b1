"""Turns: one call at a time at each thing, and a wait that Ctrl-C ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection

import pytest
from tests.support.daemons import until

from membroker.interrupts import HeldOff, Turns, _state


def test_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads take overlapping things again and again: no two are ever at the same one, and all get through."""
    turns, at_it, errors, waits = Turns(), [threading.Lock() for _ in range(4)], [], []
    take_once = turns._take

    def counted(things: Collection[int]) -> threading.Event | None:
        wait = take_once(things)
        if wait is not None:
            waits.append(things)
        return wait

    monkeypatch.setattr(turns, "_take", counted)

    def take(number: int) -> None:
        things = {number % 4, (number + 1) % 4}
        for _ in range(200):
            with turns.taken(things):
                for thing in things:
                    if not at_it[thing].acquire(blocking=False):
                        errors.append(thing)
                for thing in things:
                    at_it[thing].release()

    threads = [threading.Thread(target=take, args=(number,), daemon=True) for number in range(8)]
    with turns.taken({0}):
        for thread in threads:
            thread.start()
        until(lambda: len(waits) >= 4)
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def test_other_things_are_not_waited_for() -> None:
    turns = Turns()
    with turns.taken({1, 2}), turns.taken({3}), turns.taken(()):
        pass


def test_a_failure_gives_up_what_was_taken() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns.taken({1}):
        raise ZeroDivisionError
    with turns.taken({1}):
        pass


def test_an_interrupt_ends_the_wait_and_nothing_else() -> None:
    """Ctrl-C while a thread waits for its turn at a call that hangs: it gets out, and has taken nothing."""
    turns, taken, done = Turns(), threading.Event(), threading.Event()

    def hang() -> None:
        with turns.taken({1}):
            taken.set()
            until(lambda: _state.waiting)
            os.kill(os.getpid(), signal.SIGINT)
            assert done.wait(30)

    hanging = threading.Thread(target=hang)
    hanging.start()
    assert taken.wait(30)
    with pytest.raises(KeyboardInterrupt), HeldOff(), turns.taken({1, 2}):
        raise AssertionError("it is not its turn")
    with turns.taken({2}):
        done.set()
    hanging.join()
    with HeldOff(), turns.taken({1, 2}):
        assert not _state.waiting
