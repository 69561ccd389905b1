"""The driver's figures of processes are compared with the books: a process that uses more than its charge is found."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import Any, cast

from tests.support.sizes import MIB

from membrokerd.core import facts as ft
from membrokerd.core.ledger import Ledger
from membrokerd.core.names import Location, ModelName
from membrokerd.core.snapshot import MOST_MODELS, HolderView, each_holder
from membrokerd.device.suspects import SeenProcess, ancestors_of, compare

MODEL = ModelName("t", "m")


class Books(SimpleNamespace):
    """A ledger by facts."""

    def __init__(self, *told: ft.Fact) -> None:
        super().__init__(ledger=Ledger({"device": 1 << 40, "host": 1 << 40}))
        self.tell(ft.ModelBegan(MODEL, None, {}), *told)

    def tell(self, *facts: ft.Fact) -> None:
        for fact in facts:
            self.ledger.apply(fact)

    def holders(self) -> dict[int, HolderView]:
        return dict(each_holder(cast(Any, self)))


def session(number: int, pid: int, *, device: int = 0, host: int = 0) -> list[ft.Fact]:
    """A session that is charged so many MiB at each place."""
    return [
        ft.SessionBegan(number, "t", pid, 0, "pidfd:1", False, "test", 0),
        ft.ModelJoined(MODEL, number),
        *(ft.DeclarationSet(number, MODEL, "device", device * MIB) for _ in range(device > 0)),
        *(ft.DeclarationSet(number, MODEL, "host", host * MIB) for _ in range(host > 0)),
    ]


def segment(number: int, size: int, *holders: int, location: Location = "device") -> list[ft.Fact]:
    """A segment that sessions have attached."""
    began = ft.SegmentBegan(number, MODEL, f"s{number}", location, size * MIB, size * MIB, number, 1, 1, 0)
    return [began, *(ft.SegmentHeld(number, holder) for holder in holders)]


def excesses(found: list[SeenProcess]) -> list[tuple[int, int]]:
    return [(process.pid, process.excess // MIB) for process in found]


def test_a_stranger_and_a_liar_stand_before_the_honest() -> None:
    """One process has no session, one only says that it released 64 MiB, one uses exactly its charge, and one less."""
    now = Books(*session(1, 11), *session(2, 12, device=32), *session(3, 13, device=32)).holders()
    found = compare([(10, 8 * MIB), (11, 64 * MIB), (12, 32 * MIB), (13, 2 * MIB)], now, now)
    assert excesses(found) == [(11, 64), (10, 8), (12, 0), (13, 0)]
    assert (found[0].sessions, found[0].models) == ((1,), (MODEL,))
    assert (found[1].sessions, found[1].models) == ((), ())


def test_all_sessions_of_a_process_count_and_at_the_device_only() -> None:
    """Two clients in one process; the device does not show what one has of the host's memory."""
    now = Books(*session(1, 11, device=32, host=64), *session(2, 11, device=16), *session(3, 12, device=64)).holders()
    (only,) = compare([(11, 60 * MIB)], now, now)
    assert (only.charged, only.excess, only.sessions) == (48 * MIB, 12 * MIB, (1, 2))


def test_a_segment_that_is_held_is_no_excess() -> None:
    """The model is charged for it, and its readers map it; two sessions of one process map the same bytes."""
    now = Books(
        *session(1, 11, device=2),
        *session(2, 11),
        *session(3, 12),
        *segment(100, 64, 1, 2),
        *segment(101, 8),
        *segment(102, 8, 1, location="host"),
    ).holders()
    found = compare([(11, 66 * MIB), (12, 64 * MIB)], now, now)
    assert excesses(found) == [(12, 64), (11, 0)], "a session that does not hold it may not map it"
    assert found[1].segments == 64 * MIB


def test_what_moves_while_the_driver_is_asked_is_no_excess() -> None:
    """One releases 64 MiB and one borrows 64 MiB after the books were read and before the driver lists processes."""
    moving = Books(*session(1, 11, device=64), *session(2, 12))
    before = moving.holders()
    moving.tell(ft.DeclarationSet(1, MODEL, "device", 0), ft.DeclarationSet(2, MODEL, "device", 64 * MIB))
    found = compare([(11, 64 * MIB), (12, 64 * MIB)], before, moving.holders())
    assert excesses(found) == [(11, 0), (12, 0)]


def test_a_process_with_thousands_of_models_is_named_with_some() -> None:
    """A log line with all of them could be as long as a tenant likes."""
    names = [ModelName("t", f"m{number:04}") for number in range(1_000)]
    joined = [fact for name in names for fact in (ft.ModelBegan(name, None, {}), ft.ModelJoined(name, 1))]
    (only,) = compare([(11, MIB)], {}, Books(*session(1, 11), *joined).holders())
    assert only.models == (MODEL, *names[: MOST_MODELS - 1])


# --- guests ---


def test_what_an_ancestor_has_declared_counts_for_processes_without_a_session() -> None:
    """Two processes of a guest use 12 of 16 MiB; those of another guest use 4 MiB more than was declared."""
    now = Books(*session(1, 10, device=16), *session(2, 20, device=16)).holders()
    parents = {11: [10], 12: [11, 10], 21: [20], 22: [20], 30: [1]}
    found = compare(
        [(11, 8 * MIB), (12, 4 * MIB), (21, 12 * MIB), (22, 8 * MIB), (30, MIB)], now, now, lambda pid: parents[pid]
    )
    assert excesses(found) == [(22, 4), (30, 1), (11, 0), (12, 0), (21, 0)]
    assert [process.models for process in found] == [(MODEL,), (), (MODEL,), (MODEL,), (MODEL,)]


def test_what_a_worker_uses_itself_counts_for_no_child() -> None:
    now = Books(*session(1, 10, device=16)).holders()
    assert excesses(compare([(10, 14 * MIB), (11, 8 * MIB)], now, now, lambda pid: [10])) == [(11, 6), (10, 0)]


def test_the_ancestors_of_a_process_are_found_in_proc() -> None:
    with subprocess.Popen(["/bin/sh", "-c", "cat & wait"], stdin=subprocess.PIPE) as shell:
        assert next(ancestors_of(shell.pid)) == os.getpid()
        shell.stdin.close()
        pid = shell.pid
    assert list(ancestors_of(pid)) == []
