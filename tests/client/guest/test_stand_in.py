"""The stand-in for GPU memory, as a program has it."""

from __future__ import annotations

from tests.support.template import run


def test_a_call_that_waits_has_the_memory_before_it_is_taken_again() -> None:
    """Else a program could have turn after turn, each too short for the thread that waits to be scheduled."""
    code = """
import threading
from membroker.guest.stand_in import StandInMemory

memory = StandInMemory(4096)
memory._take()
found, has_begun = [], threading.Event()
wait = memory._changed.wait

def waits(*given):
    has_begun.set()
    return wait(*given)

memory._changed.wait = waits
reader = threading.Thread(target=lambda: found.append(len(memory.read())), daemon=True)
reader.start()
has_begun.wait()
with memory._changed:  # the reader waits by now, and has it not before this thread waits
    memory._give()
    memory._take()
    print(found, memory._map)
"""
    assert run(["-c", code]).stdout == "[4096] None\n"
