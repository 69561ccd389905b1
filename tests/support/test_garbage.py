"""What tests use to see that a program's object is forgotten."""

from __future__ import annotations

import gc
import threading
import weakref

from tests.support.garbage import collect


class Forgotten:
    """An object that only a collection of garbage ends."""

    def __init__(self) -> None:
        self.itself = self


def test_a_collection_of_another_thread_is_waited_for() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        begun.set()
        assert go_on.wait(60)

    held = Forgotten()
    reference = weakref.ref(held, hold)
    other = threading.Thread(target=gc.collect)
    del held
    other.start()
    assert begun.wait(60)
    late = Forgotten()
    is_late = weakref.ref(late)
    del late
    assert gc.collect() == 0
    assert is_late() is not None
    threading.Timer(0.01, go_on.set).start()
    collect()
    assert is_late() is None
    other.join()
    assert reference() is None
