"""Ctrl-C around a block that holds it off. What it does to real calls stands beside them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.fake_lender import PAGE, Lender

from membroker import VirtualMemoryPool, interrupts
from membroker.interrupts import HeldOff

SetHandler = Callable[[int, Any], Any]


@pytest.fixture
def set_handler(monkeypatch: pytest.MonkeyPatch) -> SetHandler:
    """What sets handlers. The interpreter first calls those of signals that have come: a test plays that."""
    return interrupts._set_handler  # type: ignore[no-any-return]


def test_an_interrupt_at_the_very_end_is_raised(set_handler: SetHandler, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the handler is given back, and the program hears of it at once, not at its next allocation."""

    def interrupted(number: int, handler: Any) -> None:
        if handler is signal.default_int_handler:
            interrupts._handle(number, None)
        set_handler(number, handler)

    monkeypatch.setattr(interrupts, "_set_handler", interrupted)
    with pytest.raises(KeyboardInterrupt), HeldOff():
        pass
    with HeldOff():
        monkeypatch.undo()


def test_a_child_forked_by_another_thread_holds_off_interrupts() -> None:
    """Its main thread is the one that forked, and Ctrl-C comes there."""

    def fork() -> None:
        child = os.fork()
        if not child:
            try:
                with HeldOff():
                    signal.raise_signal(signal.SIGINT)
                    held_off.append(True)
            except KeyboardInterrupt:
                os._exit(0 if held_off else 1)
            finally:
                os._exit(2)
        statuses.append(os.waitpid(child, 0)[1])

    held_off: list[bool] = []
    statuses: list[int] = []
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert statuses == [0]


def test_a_handler_of_the_programs_own_that_raises_takes_no_interrupts_away(
    set_handler: SetHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit by SIGALRM ends while the handler is given back: Ctrl-C works afterwards."""
    alarms = [TimeoutError("the program's own")]

    def alarmed(number: int, handler: Any) -> None:
        if handler is signal.default_int_handler and alarms:
            raise alarms.pop()
        set_handler(number, handler)

    monkeypatch.setattr(interrupts, "_set_handler", alarmed)
    with pytest.raises(TimeoutError, match="own"), HeldOff():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_was_set_meanwhile_stays(lender: Lender) -> None:
    """A program's `on_move`, called in the middle of a compaction, wants to end in its own way from now on."""

    def stop(_number: int, _frame: Any) -> None:
        stopped.append(True)

    stopped: list[bool] = []
    with VirtualMemoryPool(lender, 8 * PAGE, PAGE) as pool:
        pool.allocate(PAGE, PAGE)
        try:
            pool.compact(on_move=lambda _: signal.signal(signal.SIGINT, stop))
            assert signal.getsignal(signal.SIGINT) is stop
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    assert stopped


def test_a_handler_that_is_set_again_later_is_as_good_as_pythons() -> None:
    """Found in the middle of a call by what a program's function did, and put back by it when the call was over."""
    reached: list[bool] = []
    try:
        with HeldOff():
            found = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGINT, found)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), HeldOff():  # noqa: PT012 - that the block goes on is what is tested
            signal.raise_signal(signal.SIGINT)
            reached.append(True)
        assert reached
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
