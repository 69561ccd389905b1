"""The soak: twenty workers, thousands of loans, and nothing left of it but a higher revision.

The fault to find is the slow one: a descriptor for each export, a row for each session, a byte for each release.
"""

from __future__ import annotations

import time

import pytest
from tests.support.daemons import Daemon, running
from tests.support.seeds import chosen_seed
from tests.support.sizes import MIB
from tests.support.workers import Worker, descriptors_at_start, until_clean, workers

pytestmark = pytest.mark.deep

WORKERS = 20
LOANS = {"handoff": 10_000, "grpc": 2_000}
"""Allocations, each with its release, of all workers together."""
WARM_UP = 0.1
"""Of the loans, as a round before what is measured: threads, arenas and tables find their size."""
RSS_GROWTH_BYTES = {"handoff": MIB, "grpc": 2 * MIB}
"""What the daemon may have grown by afterwards. 128 bytes kept of each loan over the handoff would be 1.2 MiB."""

LOOP = """
import random
choose = random.Random({seed})
granted = refused = 0
held = []
def give_back():
    what = held.pop(choose.randrange(len(held)))
    if isinstance(what, tuple):
        pool.free(*what)
    else:
        what.close()
while granted < {loans}:
    while len(held) > choose.randrange(4):
        give_back()
    size = choose.choice((1, 1, 1, 2, 4)) * PAGE
    offset = choose.randrange(0, pool.capacity - size, PAGE)
    try:
        if choose.random() < 0.3:
            held.append(model.allocate(size - 1))
            view = held[-1].view()
        else:
            pool.allocate(offset, size)
            held.append((offset, size))
            view = pool.view(offset, size)
    except membroker.AlreadyMapped:
        continue
    except membroker.OutOfMemory:
        refused += 1
        while held:
            give_back()
        continue
    assert view[:4] == bytes(4), "lent what somebody had written"
    view[:4] = b'mine'
    view.release()
    granted += 1
while held:
    give_back()
answer = [granted, refused]
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", LOANS)
def test_the_daemon_is_as_it_was_after_thousands_of_loans(transport: str) -> None:
    """Twenty engines borrow, run into the capacity, release and end, in two rounds, of which the first one warms up."""
    seed = chosen_seed()
    with running({"capacity": "64MiB", "model_grace_seconds": 3600, "log": {"level": "info"}}) as daemon:
        at_start = descriptors_at_start(daemon)
        with workers(WORKERS) as engines:
            soak(engines, daemon, transport, int(LOANS[transport] * WARM_UP), seed)
            for each in engines:
                each.do("client.close()")
            until_clean(daemon, at_start)
            warm, revision = daemon.resident_bytes(), daemon.device().revision
            began = time.monotonic()
            soak(engines, daemon, transport, LOANS[transport], seed + 1)
            end(engines)
            until_clean(daemon, at_start)
        seconds, grown = time.monotonic() - began, daemon.resident_bytes() - warm
        print(f"{LOANS[transport]} loans in {seconds:.1f} s; RssAnon {warm // 1024} KiB, grown by {grown // 1024} KiB")
        assert grown < RSS_GROWTH_BYTES[transport]
        assert daemon.device().revision - revision >= 2 * LOANS[transport], "a debit and a credit for each loan"
        granted, returned = (daemon.figure(f"membroker_model_{what}_total") for what in ("allocations", "releases"))
        assert granted == returned >= LOANS[transport] * (1 + WARM_UP)
        assert daemon.figure("membroker_model_denials_total") > 0
        assert daemon.figure("membroker_memory_descriptors_open") == 1, "the anchor is all the memory that it holds"


def soak(engines: list[Worker], daemon: Daemon, transport: str, loans: int, seed: int) -> None:
    """Run one round: a session for each worker, and its share of the loans."""
    for number, each in enumerate(engines):
        each.connect(daemon, ["red", "blue"][number % 2], transport)
        each.do(f"model = client.model('m{number}', virtual_capacity='512MiB')")
        each.do("pool = model.pool(page_size='2MiB')")
    for number, each in enumerate(engines):
        each.begin(LOOP.format(seed=seed * WORKERS + number, loans=loans // WORKERS))
    outcomes = [each.result() for each in engines]
    assert sum(granted for granted, _ in outcomes) == loans
    assert sum(refused for _, refused in outcomes) > 0, "nobody was ever short: it was no contest"


def end(engines: list[Worker]) -> None:
    """End the workers as interpreters end, every tenth by SIGKILL with something in its hands."""
    for number, each in enumerate(engines):
        if number % 10 == 9:
            each.do("last = model.allocate(PAGE)")
            each.kill()
        else:
            assert each.finish() == 0
