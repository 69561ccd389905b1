"""The tables of lifecycles, the daemon's and the library's: closed, reachable, drawn in docs/lifecycles.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from membroker.memory import lifetime
from membroker.session import machine, outages, recalls
from membrokerd.core import facts as ft
from membrokerd.core import lifecycles
from membrokerd.core.ledger import Ledger
from membrokerd.core.names import ModelName
from membrokerd.core.traffic import CallInFlight

DOCUMENT = Path(__file__).parents[3] / "docs" / "lifecycles.md"
LIBRARY = {
    "connection": outages.LIFECYCLE,
    "call": machine.LIFECYCLE,
    "recall": recalls.LIFECYCLE,
    "mapped memory": lifetime.LIFECYCLE,
}
TABLES = {**lifecycles.ALL, **LIBRARY}
SENTENCES = {
    "session": "One `connect()` of one process. It outlives its connection and is charged until it ends.",
    "request": "A request for bytes: an allocation, a declaration or a new segment. Each is decided once for good.",
    "extent": "A piece of lent memory. It is charged until its borrower releases it or the device shows it free.",
    "packet": "Up to 64 extents of a call, sent together. At most 128 of a session are unacknowledged.",
    "segment": "Memory with a name. Its model is charged until it is deleted and no process can have it mapped.",
    "connection": "In the library: a session's connection to its broker. Any other cause comes too late.",
    "call": "In the library: one call over one connection. After a loss it is repeated over the next one.",
    "recall": "In the library: the broker asks for memory of a model at a location, until the program has answered.",
    "mapped memory": "In the library: the memory of one pool, buffer, array or segment, in one process.",
}
MODEL = ModelName("t", "m")


def draw() -> str:
    """Return docs/lifecycles.md: a sentence and a Mermaid state diagram for each table."""
    parts = [
        "# Lifecycles",
        "",
        "`tests/broker/core/test_lifecycles.py` checks this page against the tables in the code, and writes it when",
        "`MEMBROKER_REWRITE=1` is set. The daemon's are in `broker/membrokerd/core/lifecycles.py`, the library's in",
        "`outages.py`, `machine.py` and `recalls.py` of `client/membroker/session/`, and in",
        "`client/membroker/memory/lifetime.py`. Any other transition of the daemon is a bug and raises an error.",
    ]
    for name, table in TABLES.items():
        arrows = [
            f"    {state} --> {following}: {cause}"
            for state, moves in table.items()
            for cause, following in moves.items()
        ]
        ends = [f"    {state} --> [*]" for state, moves in table.items() if not moves]
        diagram = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(table))}", *arrows, *ends, "```"]
        parts += ["", f"## {name.capitalize()}", "", SENTENCES[name], "", *diagram]
    return "\n".join(parts) + "\n"


def test_the_document_is_what_the_tables_say(golden: Callable[[Path, str], None]) -> None:
    golden(DOCUMENT, draw())


@pytest.mark.parametrize("table", TABLES)
def test_a_table_is_closed_and_every_state_is_reached_and_ends(table: str) -> None:
    """Each move leads to a state that the table knows, and from each state there is a way to an end."""
    states = TABLES[table]
    reached, ending = {next(iter(states))}, {state for state, moves in states.items() if not moves}
    for _ in states:
        reached |= {following for state in reached for following in states[state].values()}
        ending |= {state for state, moves in states.items() if ending & set(moves.values())}
    assert reached == set(states) == ending


@pytest.mark.parametrize("table", lifecycles.ALL)
def test_every_other_move_raises(table: str) -> None:
    """Every pair of state and cause that is no move of the table is an IllegalMove."""
    states = lifecycles.ALL[table]
    causes = {cause for moves in states.values() for cause in moves} | {"no such cause"}
    for state, moves in states.items():
        for cause in causes - moves.keys():
            with pytest.raises(lifecycles.IllegalMove, match=f"{cause}.*{state}"):
                moves[cause]


def lent() -> Ledger:
    ledger = Ledger({"device": 64})
    ledger.apply(ft.SessionBegan(1, "t", 1, 0, "p", False, "test", 0))
    ledger.apply(ft.ModelBegan(MODEL, None, {}))
    ledger.apply(ft.ModelJoined(MODEL, 1))
    ledger.apply(ft.Debited(1, MODEL, "device", 2, 10, 3))
    ledger.apply(ft.SegmentBegan(20, MODEL, "weights", "device", 4, 2, 21, 3, 1, 0))
    ledger.apply(ft.SegmentHeld(20, 1))
    ledger.apply(ft.SegmentBegan(30, MODEL, "cache", "device", 4, 4, 31, 1, 1, 0))
    return ledger


@pytest.mark.parametrize(
    "fact",
    [
        ft.SessionMoved(1, "settled", 5),
        ft.SessionMoved(1, "last packet", 5),
        ft.Credited(1, (10, 11), "settled"),
        ft.Credited(1, (10, 11), "no such cause"),
        ft.LocationSettled(1, "device", True),
        ft.SegmentMoved(20, "sealed"),
        ft.SegmentMoved(20, "last session left"),
        ft.SegmentMoved(20, "dropped after a death"),
        ft.SegmentMoved(20, "no such cause"),
        ft.SegmentEnded(30, None),
        ft.SegmentEnded(30, True),
    ],
    ids=str,
)
def test_an_illegal_fact_changes_nothing(fact: ft.Fact, books: Callable[[Ledger], object]) -> None:
    """A living session's bytes are not settled, a segment that is written does not end, no byte is credited without a
    cause: the books stand.
    """
    ledger = lent()
    before = books(ledger)
    with pytest.raises(lifecycles.IllegalMove):
        ledger.apply(fact)
    assert books(ledger) == before


def test_an_illegal_move_of_a_packet_changes_nothing() -> None:
    call = CallInFlight(1, 1, MODEL, "device", 2, 2, range(10, 13), on_done=lambda session, call: None)
    with pytest.raises(lifecycles.IllegalMove):
        call.move(0, "made")
    assert call.states == ["waiting"]
