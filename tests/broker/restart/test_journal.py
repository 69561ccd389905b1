"""The journal: its format, and the books that the next daemon reads from it."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.broker.core.test_story import books
from tests.simulation.world import CAPACITIES, World
from tests.support.journals import BEGAN, BINDING, NAME, SESSIONS, STEPS, ends, read, record, write
from tests.support.processes import descriptors

from membroker.vmm.sizes import MAX_BYTES
from membrokerd.core import facts as ft
from membrokerd.core.checkpoint import checkpoint_facts
from membrokerd.core.ledger import replay
from membrokerd.core.names import LOCATIONS, Location, ModelName
from membrokerd.restart import records
from membrokerd.restart.journal import Journal

LEFT_OUT = (ft.StockChanged, ft.QuotaSet)


# --- writing and reading back ---

SIZES = st.integers(0, MAX_BYTES)
TEXTS = st.text(st.characters(exclude_categories=[]), max_size=20)
IDS = st.integers(1, (1 << 64) - 1)
RANGES = st.builds(lambda first, count: range(first, first + count), IDS, st.integers(0, 100_000))
FIELDS: Mapping[Any, st.SearchStrategy[Any]] = {
    int | None: st.none() | SIZES,
    str: TEXTS,
    bool: st.booleans(),
    bool | None: st.none() | st.booleans(),
    Location: st.sampled_from(LOCATIONS),
    ModelName: st.builds(ModelName, TEXTS, TEXTS),
    Mapping[Location, int]: st.dictionaries(st.sampled_from(LOCATIONS), SIZES),
    range: RANGES,
    tuple[int, ...] | range: RANGES | st.lists(IDS | st.integers(1, 9), max_size=20).map(tuple),
}


def any_of(kind: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, *(any_value(field.name, hints[field.name]) for field in dataclasses.fields(kind)))


def any_value(name: str, hint: Any) -> st.SearchStrategy[Any]:
    """A plain number may have any value within its bounds, the bounds included."""
    if hint is not int:
        return FIELDS[hint]
    least, most = records._BOUNDS[name]
    return st.integers(least, most) | st.sampled_from((least, most))


@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.deep)])
@pytest.mark.parametrize("kind", [kind for kind in typing.get_args(ft.Fact) if kind not in LEFT_OUT])
def test_every_fact_is_read_back_unchanged(tmp_path_factory: pytest.TempPathFactory, kind: type, examples: int) -> None:
    """Every field of every fact is read back unchanged, whatever its value: a process may choose any name."""
    path = tmp_path_factory.mktemp("state") / "journal"

    @settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(any_of(kind), min_size=1, max_size=3), any_of(kind))
    def come_back(step: list[ft.Fact], other: ft.Fact) -> None:
        write(path, step, [other], story=[*step, *step])
        assert read(path) == ([*step, *step, *step, other], [])

    come_back()


def test_the_least_and_the_most_that_can_be_are_read_back(path: Path) -> None:
    """Root and the last user, and extents of a byte: the bounds of the test above are those of the code."""
    outer: list[ft.Fact] = [
        *(ft.SessionBegan(1, "t", pid, uid, "", False, "", 0) for pid, uid in ((0, 0), ((1 << 31) - 1, (1 << 32) - 1))),
        ft.Debited(1, NAME, "device", 1, 1, 1),
        ft.UnaccountedSeen("device", -1),
    ]
    write(path, outer)
    assert read(path) == (outer, [])


def test_the_number_of_a_fact_never_changes() -> None:
    """Another version may have written the journal: a number may be added, and must never change its meaning."""
    tags = {tag: form.kind.__name__ for tag, form in records._TAGGED.items()}
    names = (
        "SessionBegan SessionMoved SessionEnded ModelBegan ModelAsked ModelJoined ModelLeft ModelEnded ModelCarried "
        "Debited Credited DeclarationSet LocationSettled SegmentBegan SegmentMoved SegmentHeld SegmentLeft "
        "SegmentDoubted SegmentCredited SegmentEnded UnaccountedSeen SegmentHeldAgain SegmentBound GuestSet TurnBegan"
    )
    assert tags == dict(enumerate(names.split(), 1))
    journaled = {form.kind for form in records._TAGGED.values()}
    assert journaled | set(LEFT_OUT) == set(typing.get_args(ft.Fact)), "a fact is neither journaled nor left out"


def test_the_format_to_the_byte(path: Path) -> None:
    """The bytes, written by hand: a header, the story, a record for each step, and zeros."""
    step = [ft.Credited(7, (1, 2, 3, 9), "released"), ft.Credited(7, range(20, 25), "not made")]
    write(path, step, story=[ft.SessionMoved(7, "goodbye", 5)])
    records = [[[2, 7, "goodbye", 5]], [[11, 7, [[1, 3], [9, 1]], "released"], [11, 7, [20, 5], "not made"]]]
    compact = [json.dumps(content, separators=(",", ":")).encode() for content in records]
    header = b'["membroker journal",1,"boot-1","GPU-1",0]'
    assert path.read_bytes().rstrip(b"\0") == b"".join(map(record, (header, *compact)))
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_no_successor_needs_is_not_written(path: Path) -> None:
    """The warm pool ends with the daemon and quotas have their own file. A step of only these leaves no record."""
    stock, quota = ft.StockChanged("device", 2 << 20, 3, "made"), ft.QuotaSet("acme", None, "device", 5)
    write(path, [stock], [quota, *STEPS[0], stock], [], story=[quota])
    assert read(path) == (STEPS[0], [])
    assert len(list(ends(path.read_bytes()))) == 2


# --- a daemon's life ---


@pytest.mark.deep
def test_a_successor_has_the_books_of_a_whole_world(path: Path) -> None:
    """Every step is journaled, with compactions in between. A successor rebuilds the same books."""
    world = World(41)
    journal = Journal(path, BINDING, compact_bytes=20_000)
    journal.begin(checkpoint_facts(world.broker.ledger))
    compacted = 0
    steps: Iterator[None] = iter(())
    for number in range(4_000):
        seen = len(world.history)
        world.turn(number)
        assert journal.append(world.history[seen:])
        if journal.due:
            steps = journal.compact(checkpoint_facts(world.daemons.books))
            compacted += 1
        next(steps, None)
        if number % 500 == 499:
            facts, sentences = read(path)
            assert books(replay(CAPACITIES, facts)) == books(world.daemons.books)
            assert not sentences
    assert compacted > 3
    assert not list(steps)
    assert list(path.parent.iterdir()) == [path]
    journal.close()


def test_a_compaction_keeps_what_is_appended_during_it(path: Path) -> None:
    """The old file is the whole journal until the last step. From then on the new, shorter one is."""
    journal = Journal(path, BINDING, compact_bytes=1_000)
    journal.begin(BEGAN)
    inode = path.stat().st_ino
    steps = journal.compact(SESSIONS)
    expected = [*BEGAN]
    for number, step in enumerate(STEPS):
        next(steps)
        assert journal.append(step)
        expected += step
        assert read(path) == (expected, [])
        assert not journal.due
        assert path.stat().st_ino == inode, number
    list(steps)
    assert path.stat().st_ino != inode
    assert read(path) == ([*SESSIONS, *(fact for step in STEPS for fact in step)], [])
    assert journal.append(BEGAN)
    assert read(path)[0][-2:] == BEGAN
    journal.close()


def test_an_abandoned_compaction_leaves_the_journal(path: Path) -> None:
    """The daemon stops during a compaction: the old file has everything, and the next compaction can start."""
    journal = Journal(path, BINDING, compact_bytes=1_000)
    journal.begin(BEGAN)
    opened = descriptors()
    for _ in range(2):
        steps = journal.compact(SESSIONS)
        next(steps)
        assert journal.append(STEPS[0])
        steps.close()
        assert list(path.parent.iterdir()) == [path]
        assert descriptors() == opened
    assert read(path) == ([*BEGAN, *STEPS[0], *STEPS[0]], [])
    journal.close()


def test_a_journal_grows_to_four_times_its_first_size(path: Path) -> None:
    """Otherwise large books would be rewritten at every step, and small ones to save a few bytes."""
    for story_facts, due_at in (([], 1_000), (BEGAN * 100, None)):
        journal = Journal(path, BINDING, compact_bytes=1_000)
        journal.begin(story_facts)
        at_first = end = len(path.read_bytes().rstrip(b"\0"))
        while end <= (due_at or 4 * at_first):
            assert not journal.due
            journal.append(STEPS[0])
            end = len(path.read_bytes().rstrip(b"\0"))
        assert journal.due
        journal.close()


_LIFE = """
import sys
from pathlib import Path
from membrokerd.core import facts as ft
from membrokerd.restart.journal import Binding, Journal
journal = Journal(Path(sys.argv[1]), Binding("boot-1", "GPU-1"))
journal.begin([])
number = 0
while True:
    number += 1
    assert journal.append([ft.SessionEnded(number, 0), ft.SessionEnded(number + 1, 0)])
    if number % 1_000 == 0:
        print(number, flush=True)
"""


def test_a_killed_daemon_has_written_every_finished_step(path: Path) -> None:
    """The daemon is killed while it works: every step it finished is in the file, and none is there in part."""
    with subprocess.Popen([sys.executable, "-c", _LIFE, path], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout
        for _ in range(20):
            done = int(daemon.stdout.readline())
        daemon.send_signal(signal.SIGKILL)
    facts, _ = read(path)
    assert len(facts) >= 2 * done
    assert facts == [ft.SessionEnded(at, 0) for step in range(1, len(facts) // 2 + 1) for at in (step, step + 1)]
