"""What the driver sees of processes is held against the books: who has more than it may is found, others are not."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.sizes import MIB

from membrokerd.core.effects import SegmentView
from membrokerd.core.events import ModelName, SegmentName
from membrokerd.core.snapshot import SessionView, Snapshot
from membrokerd.observe.suspects import Process, command_of, compare

MODEL = ModelName("t", "m")
WEIGHTS = SegmentName("t", "m", "weights")


def session(
    number: int, pid: int, *, device: int = 0, host: int = 0, segments: tuple[SegmentName, ...] = ()
) -> SessionView:
    """A session that is charged so many MiB at each place."""
    locations = (("device", device * MIB, 1), ("host", host * MIB, 1))
    return SessionView(number, "t", "open", pid, 0, False, "test", (MODEL,), locations, segments, 0)  # type: ignore[arg-type]


def segment(name: SegmentName, size: int, location: str = "device") -> SegmentView:
    return SegmentView(9, name, "sealed", location, size * MIB, 1, 1, 1, 0)  # type: ignore[arg-type]


def books(*sessions: SessionView, segments: tuple[SegmentView, ...] = ()) -> Snapshot:
    return Snapshot(1, (), (), sessions, segments)


def excesses(found: list[Process]) -> list[tuple[int, int]]:
    return [(process.pid, process.excess // MIB) for process in found]


def test_a_stranger_and_a_liar_stand_before_the_honest() -> None:
    """One process has no session, one gave 64 MiB back by its word, one has what it is charged, one less."""
    now = books(session(1, 11), session(2, 12, device=32), session(3, 13, device=32))
    found = compare([(10, 8 * MIB), (11, 64 * MIB), (12, 32 * MIB), (13, 2 * MIB)], now, now)
    assert excesses(found) == [(11, 64), (10, 8), (12, 0), (13, 0)]
    assert (found[0].sessions, found[0].models) == ((1,), (MODEL,))
    assert (found[1].sessions, found[1].models) == ((), ())


def test_all_sessions_of_a_process_count_and_at_the_device_only() -> None:
    """Two clients in one process; what one has of the host is not what the device shows."""
    now = books(session(1, 11, device=32, host=64), session(2, 11, device=16), session(3, 12, device=64))
    (only,) = compare([(11, 60 * MIB)], now, now)
    assert (only.charged, only.excess, only.sessions) == (48 * MIB, 12 * MIB, (1, 2))


def test_a_segment_that_is_held_is_no_excess() -> None:
    """The model is charged for it and all who attach it map it; two sessions of one process map the same bytes."""
    other = SegmentName("t", "m", "other")
    hosts = SegmentName("t", "m", "hosts")
    now = books(
        session(1, 11, device=2, segments=(WEIGHTS, hosts)),
        session(2, 11, segments=(WEIGHTS,)),
        session(3, 12),
        segments=(segment(WEIGHTS, 64), segment(other, 8), segment(hosts, 8, "host")),
    )
    found = compare([(11, 66 * MIB), (12, 64 * MIB)], now, now)
    assert excesses(found) == [(12, 64), (11, 0)], "who holds it not has left it, or never had it"
    assert found[1].segments == 64 * MIB


def test_what_moves_while_the_driver_is_asked_is_no_excess() -> None:
    """One gives 64 MiB back and one borrows 64 MiB between the books and the driver's look at the processes."""
    before = books(session(1, 11, device=64), session(2, 12))
    after = books(session(2, 12, device=64))
    found = compare([(11, 64 * MIB), (12, 64 * MIB)], before, after)
    assert excesses(found) == [(11, 0), (12, 0)]


def test_a_command_is_the_kernels_word_and_nothing_where_nobody_is() -> None:
    assert command_of(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert command_of(ended.pid) == ""
