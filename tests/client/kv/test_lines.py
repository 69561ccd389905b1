"""Calls between the processes of one engine."""

from __future__ import annotations

import resource
from multiprocessing import Pipe
from threading import Thread

from tests.support.daemons import DEADLINE_SECONDS

from membroker.kv.lines import hang_up


def test_a_connection_is_ended_by_a_process_without_a_free_descriptor() -> None:
    """An engine that has used up its descriptors must be able to end: a thread waits for this connection."""
    ours, theirs = Pipe()
    waits = Thread(target=lambda: ours.poll(None), daemon=True)
    waits.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        hang_up(ours)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    waits.join(DEADLINE_SECONDS)
    assert not waits.is_alive()
    assert theirs.poll(0)
    ours.close()
    theirs.close()
