"""Many threads share one client, as the handlers of a web service do: more than the broker lets a session have calls.

Those that would be too many wait in front of the broker, the oldest first, and their time runs. Nothing else is held
up by them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.fake_broker import Caller
from tests.support.sizes import MIB

import membroker
from membroker.errors import OutOfMemory
from membroker.session.places import MOST_PATIENT

PAGE = 2 * MIB
CAPACITY = 64 * MIB
HANDLERS = 40
LONG = 600


def waiting(daemon: Daemon) -> int:
    """Return how many requests wait for memory in the broker."""
    return sum(books.waiting_requests for model in daemon.models() for books in model.books)


def crowd(count: int, work: Callable[[], object]) -> Counter[str]:
    """Run `work` in so many threads at once, and return how often it ended with each error, or with "" for success."""
    outcomes: Counter[str] = Counter()
    begin = threading.Barrier(count)

    def run() -> None:
        begin.wait(DEADLINE_SECONDS)
        try:
            work()
        except Exception as error:  # noqa: BLE001 - counted
            outcomes[repr(error)] += 1
        else:
            outcomes[""] += 1

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    return outcomes


def borrow_and_return(model: membroker.Model, times: int) -> None:
    """Borrow a page and give it back, again and again."""
    for _ in range(times):
        model.allocate(PAGE).close()


@pytest.mark.parametrize("transport", ["handoff", "grpc"])
def test_sixty_four_threads(transport: str) -> None:
    """Memory is free for all of them: nobody is refused, although the broker accepts 16 calls of a session."""
    with (
        running({"capacity": "1GiB"}) as daemon,
        membroker.connect(daemon.endpoint(), transport=transport) as client,
    ):
        model = client.register_model("m")
        assert crowd(64, lambda: borrow_and_return(model, 10)) == {"": 64}
        assert daemon.books().lent_bytes == 0


@pytest.mark.deep
def test_a_thousand_threads() -> None:
    """10,000 calls of 1,000 threads: each gets its memory."""
    with running({"capacity": "4GiB"}) as daemon, membroker.connect(daemon.endpoint()) as client:
        model = client.register_model("m")
        assert crowd(1000, lambda: borrow_and_return(model, 10)) == {"": 1000}
        assert daemon.books().lent_bytes == 0


def test_forty_handlers_while_memory_is_full() -> None:
    """All of them wait, some in the broker and the others in front of it; as memory comes back each gets its page.

    Beside them a release, a read of the books, and a call that does not wait are not held up.
    """
    with running({"capacity": CAPACITY}) as daemon, membroker.connect(daemon.endpoint()) as client:
        model = client.register_model("m")
        other = client.register_model("other")
        held = [other.allocate(PAGE) for _ in range(CAPACITY // PAGE)]
        handlers = [Caller(lambda: model.allocate(PAGE, wait=LONG)) for _ in range(HANDLERS)]
        until(lambda: waiting(daemon) == MOST_PATIENT)
        assert other.stats().name == other.resource_name
        with pytest.raises(OutOfMemory):
            other.allocate(PAGE, wait=0)
        client.register_model("third").leave()
        while handlers:
            held.pop().close()
            until(lambda handlers=handlers: any(not one.is_alive() for one in handlers))
            done = [one for one in handlers if not one.is_alive()]
            held += [one.value() for one in done]
            handlers = [one for one in handlers if one not in done]
        assert waiting(daemon) == 0
        assert daemon.books().lent_bytes == CAPACITY


def test_a_model_beside_another_that_waits() -> None:
    """Forty handlers of one model wait for device memory. Another model of the client borrows at the host meanwhile.

    So does an attach that waits for its seal: they wait for something else, and nobody is before them.
    """
    with (
        running({"capacity": CAPACITY, "host_capacity": CAPACITY}) as daemon,
        membroker.connect(daemon.endpoint()) as client,
    ):
        model, other = client.register_model("m"), client.register_model("other")
        held = model.allocate(CAPACITY)
        segment = other.create_segment("weights", PAGE, "host")
        handlers = [Caller(lambda: model.allocate(PAGE, wait=LONG)) for _ in range(HANDLERS)]
        until(lambda: waiting(daemon) == MOST_PATIENT)
        reader = Caller(lambda: client.attach("weights", timeout=LONG))
        for _ in range(20):
            other.allocate(PAGE, "host", wait=LONG).close()
        assert waiting(daemon) == MOST_PATIENT
        segment.seal()
        reader.value().close()
        held.close()
        for handler in handlers:
            handler.value().close()


def test_their_time_runs_in_front_of_the_broker() -> None:
    """Memory does not come back: forty handlers hear so from the broker when their time is over."""
    with running({"capacity": CAPACITY}) as daemon, membroker.connect(daemon.endpoint()) as client:
        model = client.register_model("m")
        held = model.allocate(CAPACITY)
        begun = time.monotonic()
        errors: list[OutOfMemory] = []

        def handle() -> None:
            try:
                model.allocate(PAGE, wait=1)
            except OutOfMemory as error:
                errors.append(error)

        assert crowd(HANDLERS, handle) == {"": HANDLERS}
        assert time.monotonic() - begun >= 1
        assert [error.reason for error in errors] == ["CAPACITY"] * HANDLERS
        held.close()
        model.allocate(CAPACITY).close()
