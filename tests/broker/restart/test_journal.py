"""The journal: a successor reads what a daemon wrote, even if the daemon died or the disk or the file is damaged."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import struct
import subprocess
import sys
import time
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.broker.core.test_story import books
from tests.simulation.world import CAPACITIES, World

from membroker.vmm.sizes import MAX_BYTES
from membrokerd.core import facts as ft
from membrokerd.core.events import LOCATIONS, Location, ModelName
from membrokerd.core.facts_of import story
from membrokerd.core.ledger import replay
from membrokerd.restart import records
from membrokerd.restart.journal import MAX_FILE_BYTES, RESERVE_BYTES, Binding, Journal, boot_id

BINDING = Binding("boot-1", "GPU-1")
NAME = ModelName("acme", "llama-7b")
SESSION = 1 << 40
LEFT_OUT = (ft.StockChanged, ft.QuotaSet)
BEGAN = [ft.ModelBegan(NAME, None, {"device": 1 << 30}), ft.ModelEnded(NAME)]
SESSIONS: list[ft.Fact] = [ft.SessionEnded(number, 0) for number in range(400)]
STEPS = [[ft.Debited(SESSION, NAME, "device", 2 << 20, SESSION + number, 1)] for number in range(1, 6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def write(path: Path, *steps: list[ft.Fact], story: list[ft.Fact] | None = None) -> None:
    """Act as a daemon that began with a story, recorded these steps, and was killed."""
    journal = Journal(path, BINDING)
    journal.begin(story or [])
    assert all(journal.append(step) for step in steps)
    assert not journal.full
    journal.close()


def read(path: Path, binding: Binding = BINDING) -> tuple[list[ft.Fact], list[str]]:
    return Journal(path, binding).read(list)


def record(content: Any) -> bytes:
    """Return a record, with the format written out a second time."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<II", len(data), zlib.crc32(data)) + data


HEADER = record(["membroker journal", 1, "boot-1", "GPU-1", 0])


def ends(data: bytes) -> Iterator[int]:
    """Yield the offset at which each record ends."""
    at = 0
    while data[at : at + 4].strip(b"\0"):
        at += 8 + int.from_bytes(data[at : at + 4], "little")
        yield at


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


@pytest.mark.parametrize("kind", [kind for kind in typing.get_args(ft.Fact) if kind not in LEFT_OUT])
def test_every_fact_is_read_back_unchanged(tmp_path_factory: pytest.TempPathFactory, kind: type) -> None:
    """Every field of every fact is read back unchanged, whatever its value: a process may choose any name."""
    path = tmp_path_factory.mktemp("state") / "journal"

    @settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(any_of(kind), min_size=1, max_size=3), any_of(kind))
    def come_back(step: list[ft.Fact], other: ft.Fact) -> None:
        write(path, step, [other], story=[*step, *step])
        assert read(path) == ([*step, *step, *step, other], [])

    come_back()


def test_the_number_of_a_fact_never_changes() -> None:
    """Another version may have written the journal: a number may be added, and must never change its meaning."""
    tags = {tag: form.kind.__name__ for tag, form in records._TAGGED.items()}
    names = (
        "SessionBegan SessionMoved SessionEnded ModelBegan ModelAsked ModelJoined ModelLeft ModelEnded ModelCarried "
        "Debited Credited DeclarationSet LocationSettled SegmentBegan SegmentMoved SegmentHeld SegmentLeft "
        "SegmentDoubted SegmentCredited SegmentEnded UnaccountedSeen SegmentHeldAgain"
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


def test_what_no_successor_needs_is_not_written(path: Path) -> None:
    """The warm pool ends with the daemon and quotas have their own file. A step of only these leaves no record."""
    stock, quota = ft.StockChanged("device", 2 << 20, 3, "made"), ft.QuotaSet("acme", None, "device", 5)
    write(path, [stock], [quota, *STEPS[0], stock], [], story=[quota])
    assert read(path) == (STEPS[0], [])
    assert len(list(ends(path.read_bytes()))) == 2


def test_without_a_predecessor_there_are_no_facts(path: Path) -> None:
    journal = Journal(path, BINDING)
    assert journal.read(list) == ([], [])
    assert list(path.parent.iterdir()) == [], "reading made something"


def test_only_the_owner_can_read_a_journal(path: Path) -> None:
    write(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_boots_have_names() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36


# --- a daemon's life ---


def test_a_successor_has_the_books_of_a_whole_world(path: Path) -> None:
    """Every step is journaled, with compactions in between. A successor rebuilds the same books."""
    world = World(41)
    journal = Journal(path, BINDING, compact_bytes=20_000)
    journal.begin(story(world.broker.ledger))
    compacted = 0
    steps: Iterator[None] = iter(())
    for number in range(4_000):
        seen = len(world.history)
        world.turn(number)
        assert journal.append(world.history[seen:])
        if journal.due:
            steps = journal.compact(story(world.daemons.books))
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
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        steps = journal.compact(SESSIONS)
        next(steps)
        assert journal.append(STEPS[0])
        steps.close()
        assert list(path.parent.iterdir()) == [path]
        assert len(os.listdir("/proc/self/fd")) == descriptors
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


# --- damaged files ---


def test_a_record_that_was_cut_short_is_ignored(path: Path) -> None:
    """Cut at every byte, with nothing or with zeros after it: the earlier steps are read, and the log says so."""
    write(path, *STEPS)
    data = path.read_bytes()
    *_, last, end = ends(data)
    whole = [fact for step in STEPS[:-1] for fact in step]
    for cut in range(last, end):
        for rest in (b"", bytes(RESERVE_BYTES)):
            path.write_bytes(data[:cut] + rest)
            facts, sentences = read(path)
            assert facts == whole, cut
            shows = bool(data[last:cut].strip(b"\0"))
            assert len(sentences) == shows, (cut, sentences)
            assert not shows or "is incomplete" in sentences[0]


@pytest.mark.parametrize("behind", [0, 50])
def test_a_flipped_byte_is_noticed(path: Path, behind: int) -> None:
    """In a header, a length, a checksum, a fact or after them: fewer facts are read, and the log says so."""
    write(path, *STEPS, story=BEGAN)
    data = path.read_bytes()
    data = data[: len(data.rstrip(b"\0")) + behind]
    used = len(data.rstrip(b"\0"))
    whole = BEGAN + [fact for step in STEPS for fact in step]
    aside = cut = 0
    for at in range(len(data)):
        for bit in (0, 6, 7):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            facts, sentences = read(path)
            assert facts == whole[: len(facts)], (at, bit)
            assert len(facts) < len(whole) or at >= used, (at, bit)
            (sentence,) = sentences
            if path.exists():
                copy = Path(sentence.rpartition(" ")[2])
                assert copy.name.startswith("journal.torn-")
                assert copy.samefile(path)
                path.unlink()
                cut += 1
            else:
                assert facts == []
                assert "journal.broken-" in sentence
                aside += 1
    assert aside > cut > 0


def test_damage_before_whole_records_is_never_a_torn_end(path: Path) -> None:
    """One flipped bit in a length hides the next record.

    Taken for a torn end, all later records would be overwritten.
    """
    write(path, *STEPS, story=BEGAN)
    data = path.read_bytes()
    *starts, _last, _end = (0, *ends(data))
    for at in starts[1:]:
        for bit in range(32):
            path.write_bytes(
                data[: at + bit // 8] + bytes([data[at + bit // 8] ^ 1 << bit % 8]) + data[at + bit // 8 + 1 :]
            )
            facts, (sentence,) = read(path)
            assert facts == []
            assert f"is damaged at its byte {at}: the books start empty" in sentence, (at, bit)
            assert not path.exists()


def test_text_that_a_tenant_chose_is_not_a_record(path: Path) -> None:
    """A client's name looks like a record, and its session's record is cut short: only that record is lost."""
    name = "\x02\0\0\0xxxx[[3,1,2]]" + record([[3, 1, 2]]).decode("latin-1") * 3
    write(path, STEPS[0], [ft.SessionBegan(1, "red", 1, 1, "p", False, name, 1)])
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data[:-4])
    facts, (sentence,) = read(path)
    assert facts == STEPS[0]
    assert "is incomplete" in sentence


def test_the_search_after_damage_is_bounded(path: Path) -> None:
    """The worst case: heads of records that each reach to the end of the file, one after the other."""
    size = 4 << 20
    head = struct.pack("<II", size // 2, 1) + b"[[3,"
    path.write_bytes(HEADER + b"\xff" * 8 + head * (size // len(head)))
    began = time.process_time()
    facts, (sentence,) = read(path)
    assert not facts
    assert "is damaged at its byte" in sentence
    assert time.process_time() - began < 2.0, "it computed a checksum of half the file for each of 350,000 heads"


def test_a_torn_end_is_kept_once(path: Path) -> None:
    """The daemon that ignored the torn end fails at its start again and again: the first copy stays."""
    write(path, *STEPS)
    torn = path.read_bytes().rstrip(b"\0")[:-3]
    path.write_bytes(torn)
    for number in range(3):
        facts, (sentence,) = read(path)
        assert len(facts) == len(STEPS) - 1
        assert ("is kept as" in sentence) == (number == 0)
        assert "kept already" in sentence or number == 0
    journal = Journal(path, BINDING)
    journal.begin(STEPS[0])
    journal.close()
    assert read(path) == (STEPS[0], [])
    assert path.with_name("journal.torn-1").read_bytes() == torn


def test_the_last_epoch_is_in_the_header(path: Path) -> None:
    """The books may have no ids any more, and the epoch's file may be missing."""
    journal = Journal(path, BINDING)
    journal.epoch = 41
    journal.begin([])
    journal.close()
    successor = Journal(path, BINDING)
    assert successor.read(list) == ([], [])
    assert successor.epoch == 41
    path.write_bytes(record(["membroker journal", 1, "boot-1", "GPU-1"]))
    older = Journal(path, BINDING)
    assert older.read(list) == ([], [])
    assert older.epoch == 0


def test_contradicting_facts_are_set_aside(path: Path) -> None:
    """Each fact is valid, but together they contradict each other. The log says so, and the books start empty."""
    write(path, *STEPS)

    def take(told: Iterable[ft.Fact]) -> int:
        for _ in told:
            raise AssertionError("a session that nobody knows")
        return 0

    count, (sentence,) = Journal(path, BINDING).read(take)
    assert count == 0
    assert "contradicts itself (a session that nobody knows" in sentence
    assert path.with_name("journal.broken-1").exists()


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_journal_that_is_not_a_regular_file(path: Path, kind: Callable[[Path], None]) -> None:
    """It is not waited for or followed.

    It may be the books of living workers, so the daemon must not start without it.
    """
    kind(path)
    with pytest.raises(OSError, match="must be a regular file") as caught:
        read(path)
    assert caught.value.filename == str(path)
    assert os.path.lexists(path)


def test_a_journal_that_is_too_long_is_not_read(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_FILE_BYTES + 1)
    with pytest.raises(OSError, match="longer than"):
        read(path)


ASIDE = {
    "an epoch that is too large": (
        record(["membroker journal", 1, "boot-1", "GPU-1", 1 << 24]),
        "other-format",
    ),
    "more extents than a GPU has": (HEADER + record([[10, 1, ["a", "m"], "device", 2, 1, 1 << 40]]), "other-format"),
    "an extent without a size": (HEADER + record([[10, 1, ["a", "m"], "device", 0, 1, 1]]), "other-format"),
    "an extent that is too large": (HEADER + record([[10, 1, ["a", "m"], "device", 1 << 63, 1, 1]]), "other-format"),
    "a negative id": (HEADER + record([[10, 1, ["a", "m"], "device", 2, -1, 1]]), "other-format"),
    "a segment without extents": (
        HEADER + record([[14, 1, ["a", "m"], "s", "device", 2, 2, 1, 0, 1, 1]]),
        "other-format",
    ),
    "a time before the boot": (HEADER + record([[3, 1, -1]]), "other-format"),
    "a limit below zero": (HEADER + record([[4, ["a", "m"], None, {"device": -1}]]), "other-format"),
    "a pid above 2^31": (HEADER + record([[1, 1, "a", 1 << 31, 0, "p", False, "c", 1, "", ""]]), "other-format"),
    "another boot": (record(["membroker journal", 1, "boot-0", "GPU-1"]), "other-boot"),
    "another device": (record(["membroker journal", 1, "boot-1", "GPU-2"]), "other-device"),
    "another version": (record(["membroker journal", 2, {"boot": "boot-1"}]), "other-format"),
    "no journal": (record(["dear diary", 1, "boot-1", "GPU-1"]), "broken"),
    "a header that is not a list": (record({"membroker journal": 1}), "other-format"),
    "a text file": (b"Dear diary,\n", "broken"),
    "nothing": (b"", "broken"),
    "zeros": (bytes(5_000), "broken"),
    "half a header": (HEADER[:-5], "broken"),
    "damage in the middle": (HEADER + b"\5\0\0\0xxxxxxxxx" + record([[3, 1, 2]]), "broken"),
    "a fact of another version": (HEADER + record([[3, 1, 2]]) + record([[99, 1]]), "other-format"),
    "an extra field": (HEADER + record([[3, 1, 2, 3]]), "other-format"),
    "a missing field": (HEADER + record([[3, 1]]), "other-format"),
    "a field of another type": (HEADER + record([[3, 1, "2"]]), "other-format"),
    "a number that is true": (HEADER + record([[3, 1, True]]), "other-format"),
    "a tag that is a float": (HEADER + record([[3.0, 1, 2]]), "other-format"),
    "an unknown location": (HEADER + record([[13, 1, "moon", True]]), "other-format"),
    "a model name that is text": (HEADER + record([[8, "ab"]]), "other-format"),
    "too many extents": (HEADER + record([[11, 1, [[1, 1 << 50]], "released"]]), "other-format"),
    "a range that is too long": (HEADER + record([[19, 1, [1, 1 << 50]]]), "other-format"),
    "many ranges": (HEADER + record([[11, 1, [[1, 1 << 22], [1 << 22, 1]], "released"]]), "other-format"),
    "a negative number of extents": (HEADER + record([[19, 1, [1, -1]]]), "other-format"),
    "a record that is not JSON": (HEADER + record(b"\xff\xfe"), "other-format"),
    "a record in 100,000 lists": (HEADER + record(b"[" * 100_000), "other-format"),
    "facts in 900 lists": (HEADER + record(b"[" * 900 + b"]" * 900), "other-format"),
    "a number of 5,000 digits": (HEADER + record(b"[[3,1," + b"9" * 5_000 + b"]]"), "other-format"),
    "no fact": (HEADER + record([[]]), "other-format"),
    "facts that are not lists": (HEADER + record([7]), "other-format"),
}


@pytest.mark.parametrize("case", ASIDE)
def test_an_unusable_journal_is_set_aside(path: Path, case: str) -> None:
    """An operator finds the file under a name that says why, and the books start empty."""
    data, reason = ASIDE[case]
    path.write_bytes(data)
    facts, sentences = read(path)
    assert facts == []
    aside = path.with_name(f"journal.{reason}-1")
    assert aside.read_bytes() == data
    assert list(path.parent.iterdir()) == [aside]
    (sentence,) = sentences
    assert sentence.endswith(f"the books start empty, and the file is kept as {aside}")
    assert len(sentence) < 400
    assert read(path) == ([], [])


def test_only_the_last_few_unusable_journals_are_kept(path: Path) -> None:
    """A daemon that cannot read what it writes must not fill the disk. It must not remove files of others either."""
    stranger = path.with_name("journal.of-mine")
    stranger.touch()
    for number in range(1, 13):
        path.write_bytes(b"%d" % number)
        Journal(path, BINDING).set_aside("broken" if number % 2 else "refused")
    names = {file.name for file in path.parent.iterdir()}
    assert names == {
        "journal.of-mine",
        *(f"journal.broken-{n}" for n in (9, 11)),
        "journal.refused-10",
        "journal.refused-12",
    }
    assert path.with_name("journal.broken-11").read_bytes() == b"11"


# --- a full disk ---

_FULL = """
import os, resource, sys
from pathlib import Path
from membrokerd.core import facts as ft
from membrokerd.restart.journal import RESERVE_BYTES, Binding, Journal

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

path = Path(sys.argv[1])
journal = Journal(path, Binding("boot-1", "GPU-1"))
journal.begin([])
number = 0

def append():
    global number
    number += 1
    return journal.append([ft.SessionMoved(number, "x" * 1_000, 0)])

def size():
    return len(path.read_bytes().rstrip(b"\\0"))
"""


def child(path: Path, script: str) -> int:
    """Run a daemon with a limit on the size of its files, and return how many steps it took."""
    done = subprocess.run([sys.executable, "-c", _FULL + script, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def steps(count: int) -> list[ft.Fact]:
    return [ft.SessionMoved(number, "x" * 1_000, 0) for number in range(1, count + 1)]


def test_releases_are_written_on_a_full_disk(path: Path) -> None:
    """The disk is full, the reserve is left: that is reported at once, and a megabyte of credits is still written."""
    script = """
limit(path.stat().st_size)
while not journal.full:
    assert append()
full_at = size()
assert journal.full and path.stat().st_size - full_at > RESERVE_BYTES * 0.99
while size() < full_at + RESERVE_BYTES * 0.9:
    assert append() and journal.full
print(number, flush=True)
os._exit(0)
"""
    assert read(path) == ([], [])
    count = child(path, script)
    assert count > 1_900
    assert read(path) == (steps(count), [])


def test_pending_records_are_written_when_there_is_room(path: Path) -> None:
    """Even the reserve is used up: later steps are kept in order, and written when there is room again."""
    script = """
limit(path.stat().st_size)
while append():
    pass
assert journal.full
for _ in range(50):
    assert not append() and journal.full
assert not journal.append(()) and journal.full
limit(resource.RLIM_INFINITY)
assert journal.append(()) and not journal.full
assert append() and not journal.full
print(number, flush=True)
os._exit(0)
"""
    count = child(path, script)
    assert read(path) == (steps(count), [])


def test_a_disk_that_fails_every_write(path: Path) -> None:
    """There is a reserve, but no write succeeds: no debit is made. A compaction then writes everything."""
    script = """
assert append()
limit(size() + 100)
for _ in range(9):
    assert not append() and journal.full
limit(resource.RLIM_INFINITY)
journal.begin([ft.SessionMoved(done, "x" * 1_000, 0) for done in range(1, number + 1)])
assert not journal.full and append()
print(number, flush=True)
"""
    assert child(path, script) == 11
    assert read(path) == (steps(11), [])


def test_a_daemon_that_dies_with_a_full_disk(path: Path) -> None:
    """A partial write looks like a record that was cut short: the steps before it are read."""
    script = """
limit(path.stat().st_size)
while append():
    pass
append()
print(number, flush=True)
os._exit(0)
"""
    count = child(path, script)
    facts, (sentence,) = read(path)
    assert facts == steps(count - 2)
    assert "is incomplete" in sentence


def test_a_compaction_without_room_leaves_the_journal(path: Path) -> None:
    """No room for the story or for its reserve: the old file stays, and the compaction is tried again later."""
    script = """
journal.close()
journal = Journal(path, Binding("boot-1", "GPU-1"), compact_bytes=10_000)
journal.begin([])
limit(path.stat().st_size)
descriptors = len(os.listdir("/proc/self/fd"))
for count in (300_000, 80_000):
    while not journal.due:
        assert append() and not journal.full
    try:
        journal.begin([ft.SessionEnded(1, 0)] * count)
    except OSError:
        assert not journal.due
    else:
        raise AssertionError("there was room")
    assert list(path.parent.iterdir()) == [path]
    assert len(os.listdir("/proc/self/fd")) == descriptors
assert append() and not journal.full
print(number, flush=True)
"""
    count = child(path, script)
    assert 20 < count < 30
    assert read(path) == (steps(count), [])


def test_a_new_file_without_a_reserve(path: Path) -> None:
    """A successor on a full disk has its books, and lends nothing until there is room. The books must be complete."""
    script = """
journal.close()
limit(RESERVE_BYTES)
journal = Journal(path, Binding("boot-1", "GPU-1"))
try:
    journal.begin([ft.SessionEnded(1, 0)] * 300_000)
except OSError:
    assert journal.read(list) == ([], [])
else:
    raise AssertionError("there was room")
journal.begin([])
assert journal.full
assert append() and journal.full
limit(resource.RLIM_INFINITY)
assert append() and not journal.full
print(number, flush=True)
"""
    assert child(path, script) == 2
    assert read(path) == (steps(2), [])


def test_room_that_a_compaction_makes_is_used_at_once(path: Path) -> None:
    """A full file that may not grow is compacted: the next request is admitted at once, without another event."""
    script = """
import asyncio
from membrokerd.core import events as ev, policy
from membrokerd.core.machine import Broker
from membrokerd.loop import Loop
from membrokerd.restart.descriptor_store import Store
from membrokerd.writer import Writer

async def main():
    journal.close()
    fresh = Journal(path, Binding("boot-1", "GPU-1"), compact_bytes=RESERVE_BYTES + 2_000)
    fresh.begin([])
    limit(path.stat().st_size + 100_000)
    broker = Broker(policy.Rules(2, {"device": 64}, max_sessions_per_process=100), epoch=1)
    loop = Loop(broker, None, Store(), 1.0, writer=Writer(broker, fresh))

    def come():
        loop.ask(lambda call: ev.OpenSession(call, "t", 1, 1, "p", False, "x" * 1_000), lambda answer: None)

    def go():
        session = next(iter(broker.ledger.sessions))
        loop.ask(lambda call: ev.Goodbye(call, session, 1), lambda answer: None)

    for _ in range(50):
        come()
    while not broker.cannot_write:
        go()
        come()
    while fresh.full:
        go()
    loop.tell(ev.Elapsed())
    print(len(broker.cannot_write))

asyncio.run(main())
"""
    assert child(path, script) == 0


def test_nothing_stays_open(path: Path) -> None:
    """A journal has one descriptor, which programs that the daemon starts do not inherit."""
    before = set(os.listdir("/proc/self/fd"))
    journal = Journal(path, BINDING)
    assert journal.read(list) == ([], [])
    for _ in range(5):
        journal.begin(BEGAN)
        journal.append(STEPS[0])
    (descriptor,) = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(path)]
    assert not os.get_inheritable(int(descriptor))
    journal.close()
    journal.close()
    assert set(os.listdir("/proc/self/fd")) == before
