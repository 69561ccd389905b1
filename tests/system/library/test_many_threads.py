"""Many threads share one client, as the handlers of a web service do: more than the broker lets a session have calls.

Those that would be too many wait in front of the broker, the oldest first (`test_calls_in_front.py`).
"""

from __future__ import annotations

from functools import partial

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.fake_broker import Caller
from tests.support.sizes import PAGE
from tests.support.threads import together
from tests.system.library.test_waiting import waiting

import membroker
from membroker.errors import OutOfMemory
from membroker.session.machine import MOST_PATIENT

HANDLERS = 40
LONG = 600


@pytest.mark.deep
def test_a_thousand_threads() -> None:
    """Nobody is refused while memory is free, and each has its turn: halfway, none has more than twice another's.

    With 100 calls each (100,000) it took 105 s on two cores at a load of 17, and halfway each had made 49 to 52.
    """
    threads, calls = 1_000, 10
    made, halfway = [0] * threads, list[tuple[int, int]]()
    with running({"capacity": "4GiB"}) as daemon, membroker.connect(daemon.endpoint()) as client:
        model = client.model("m")

        def borrow_and_return(number: int) -> None:
            for _ in range(calls):
                model.allocate(PAGE).close()
                made[number] += 1
                if not halfway and sum(made) >= threads * calls // 2:
                    halfway.append((min(made), max(made)))

        together([partial(borrow_and_return, number) for number in range(threads)])
        assert sum(made) == threads * calls
        fewest, most = halfway[0]
        assert most <= 2 * fewest + 2
        assert daemon.books().lent_bytes == 0


def test_forty_handlers_while_memory_is_full(daemon: Daemon, red: membroker.Client) -> None:
    """They wait in the broker and in front of it, and hold up no release, read, attach, or call that does not wait."""
    model, other = red.model("m"), red.model("other")
    segment = other.create_segment("weights", PAGE)
    held = [other.allocate(PAGE) for _ in range(red.capacities["device"] // PAGE - 1)]
    handlers = [Caller(lambda: model.allocate(PAGE, timeout=LONG)) for _ in range(HANDLERS)]
    until(lambda: waiting(daemon) == MOST_PATIENT)
    reader = Caller(lambda: red.attach("weights", timeout=LONG))
    assert other.stats().name == other.resource_name
    with pytest.raises(OutOfMemory):
        other.allocate(PAGE, timeout=0)
    red.model("third").leave()
    segment.seal()
    reader.value().close()
    while handlers:
        held.pop().close()
        until(lambda handlers=handlers: any(not one.is_alive() for one in handlers))
        done = [one for one in handlers if not one.is_alive()]
        held += [one.value() for one in done]
        handlers = [one for one in handlers if one not in done]
    assert waiting(daemon) == 0
    assert daemon.books().free_bytes == 0
