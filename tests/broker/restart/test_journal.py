"""The journal: what a daemon wrote its successor reads, whatever became of the daemon, the disk or the file."""

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
    """Be a daemon that began with a story, saw these steps, and was killed."""
    journal = Journal(path, BINDING)
    journal.begin(story or [])
    assert all(journal.append(step) for step in steps)
    assert not journal.full
    journal.close()


def read(path: Path, binding: Binding = BINDING) -> tuple[list[ft.Fact], list[str]]:
    return Journal(path, binding).read(list)


def record(content: Any) -> bytes:
    """Return a record as the format has it, stated here once more."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<II", len(data), zlib.crc32(data)) + data


HEADER = record(["membroker journal", 1, "boot-1", "GPU-1", 0])


def ends(data: bytes) -> Iterator[int]:
    """Yield where each record ends."""
    at = 0
    while data[at : at + 4].strip(b"\0"):
        at += 8 + int.from_bytes(data[at : at + 4], "little")
        yield at


# --- what is written is what is read ---

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
    """A plain number is anything within its bounds, these included."""
    if hint is not int:
        return FIELDS[hint]
    least, most = records._BOUNDS[name]
    return st.integers(least, most) | st.sampled_from((least, most))


@pytest.mark.parametrize("kind", [kind for kind in typing.get_args(ft.Fact) if kind not in LEFT_OUT])
def test_every_fact_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, kind: type) -> None:
    """Each field of each fact, whatever is in it: a process may call itself anything."""
    path = tmp_path_factory.mktemp("state") / "journal"

    @settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(any_of(kind), min_size=1, max_size=3), any_of(kind))
    def come_back(step: list[ft.Fact], other: ft.Fact) -> None:
        write(path, step, [other], story=[*step, *step])
        assert read(path) == ([*step, *step, *step, other], [])

    come_back()


def test_a_fact_keeps_its_number_for_ever() -> None:
    """A journal that another version wrote is read by these: a number may be added, and none ever changed."""
    tags = {tag: form.kind.__name__ for tag, form in records._TAGGED.items()}
    names = (
        "SessionBegan SessionMoved SessionEnded ModelBegan ModelAsked ModelJoined ModelLeft ModelEnded ModelCarried "
        "Debited Credited DeclarationSet LocationSettled SegmentBegan SegmentMoved SegmentHeld SegmentLeft "
        "SegmentDoubted SegmentCredited SegmentEnded UnaccountedSeen SegmentHeldAgain"
    )
    assert tags == dict(enumerate(names.split(), 1))
    journaled = {form.kind for form in records._TAGGED.values()}
    assert journaled | set(LEFT_OUT) == set(typing.get_args(ft.Fact)), "a fact is neither journaled nor left out"


def test_the_format_is_as_it_is_told(path: Path) -> None:
    """By hand, to the byte: a header, the story, a record for each step, and zeros."""
    step = [ft.Credited(7, (1, 2, 3, 9), "released"), ft.Credited(7, range(20, 25), "not made")]
    write(path, step, story=[ft.SessionMoved(7, "goodbye", 5)])
    records = [[[2, 7, "goodbye", 5]], [[11, 7, [[1, 3], [9, 1]], "released"], [11, 7, [20, 5], "not made"]]]
    compact = [json.dumps(content, separators=(",", ":")).encode() for content in records]
    header = b'["membroker journal",1,"boot-1","GPU-1",0]'
    assert path.read_bytes().rstrip(b"\0") == b"".join(map(record, (header, *compact)))


def test_what_no_successor_needs_is_not_written(path: Path) -> None:
    """Stock dies with the daemon and quotas have a file of their own: a step of these alone leaves no record."""
    stock, quota = ft.StockChanged("device", 2 << 20, 3, "made"), ft.QuotaSet("acme", None, "device", 5)
    write(path, [stock], [quota, *STEPS[0], stock], [], story=[quota])
    assert read(path) == (STEPS[0], [])
    assert len(list(ends(path.read_bytes()))) == 2


def test_nobody_was_here_before(path: Path) -> None:
    journal = Journal(path, BINDING)
    assert journal.read(list) == ([], [])
    assert list(path.parent.iterdir()) == [], "reading made something"


def test_a_journal_is_its_owners_alone(path: Path) -> None:
    write(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_boots_have_names() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36


# --- a daemon's life ---


def test_a_world_is_written_down_and_read(path: Path) -> None:
    """Every step of a world is journaled, and compacted while the world goes on; a successor has the same books."""
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


def test_a_compaction_takes_in_what_is_appended_meanwhile(path: Path) -> None:
    """Until its last step the old file is the journal, whole; with the last step the short one is, whole too."""
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


def test_a_compaction_that_is_abandoned_leaves_the_journal(path: Path) -> None:
    """As when the daemon stops: the old file has all, and the next compaction can begin."""
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


def test_a_journal_grows_to_four_times_its_beginning(path: Path) -> None:
    """Large books would else be told at every step, and small ones for a few bytes."""
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


def test_a_killed_daemon_has_written_what_it_did(path: Path) -> None:
    """It is killed in the midst of its work: nothing that it did is missing, and no step is there in part."""
    with subprocess.Popen([sys.executable, "-c", _LIFE, path], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout
        for _ in range(20):
            done = int(daemon.stdout.readline())
        daemon.send_signal(signal.SIGKILL)
    facts, _ = read(path)
    assert len(facts) >= 2 * done
    assert facts == [ft.SessionEnded(at, 0) for step in range(1, len(facts) // 2 + 1) for at in (step, step + 1)]


# --- files that are not as they were written ---


def test_a_record_that_was_cut_short_is_left_out(path: Path) -> None:
    """At each of its bytes, with nothing behind it or with zeros: the steps before it stand, and it is told."""
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
def test_a_flipped_byte_is_never_believed(path: Path, behind: int) -> None:
    """Wherever it is, in a header, a length, a checksum, a fact or behind them: what is read is told to be less."""
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
    """A length with one bit flipped hides where the next record is: all that follow would be overwritten."""
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


def test_text_that_a_tenant_chose_is_no_record(path: Path) -> None:
    """A client calls itself like a record, and its session's record is cut short: that is all that is lost."""
    name = "\x02\0\0\0xxxx[[3,1,2]]" + record([[3, 1, 2]]).decode("latin-1") * 3
    write(path, STEPS[0], [ft.SessionBegan(1, "red", 1, 1, "p", False, name, 1)])
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data[:-4])
    facts, (sentence,) = read(path)
    assert facts == STEPS[0]
    assert "is incomplete" in sentence


def test_the_search_behind_damage_ends(path: Path) -> None:
    """Whatever the rest looks like: heads of records that reach to the end of the file, one behind the other."""
    size = 4 << 20
    head = struct.pack("<II", size // 2, 1) + b"[[3,"
    path.write_bytes(HEADER + b"\xff" * 8 + head * (size // len(head)))
    began = time.process_time()
    facts, (sentence,) = read(path)
    assert not facts
    assert "is damaged at its byte" in sentence
    assert time.process_time() - began < 2.0, "it computed a checksum of half the file for each of 350,000 heads"


def test_a_torn_end_is_kept_once(path: Path) -> None:
    """The daemon that left it out does not come far, again and again: what was kept before stays."""
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
    """The books may have no id any more, and the file of the epoch may be gone."""
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


def test_facts_that_make_no_books_are_set_aside(path: Path) -> None:
    """Each is one, and together they contradict each other: the reader says so, and gets nothing instead."""
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
def test_a_journal_that_is_no_file(path: Path, kind: Callable[[Path], None]) -> None:
    """It is not waited for and not followed. It may be the books of workers that live: nothing goes on without."""
    kind(path)
    with pytest.raises(OSError, match="must be a regular file") as caught:
        read(path)
    assert caught.value.filename == str(path)
    assert os.path.lexists(path)


def test_a_journal_without_end_is_not_read(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_FILE_BYTES + 1)
    with pytest.raises(OSError, match="longer than"):
        read(path)


ASIDE = {
    "a header of an epoch that cannot be": (
        record(["membroker journal", 1, "boot-1", "GPU-1", 1 << 24]),
        "other-format",
    ),
    "more extents than a card has": (HEADER + record([[10, 1, ["a", "m"], "device", 2, 1, 1 << 40]]), "other-format"),
    "an extent without a size": (HEADER + record([[10, 1, ["a", "m"], "device", 0, 1, 1]]), "other-format"),
    "an extent larger than all": (HEADER + record([[10, 1, ["a", "m"], "device", 1 << 63, 1, 1]]), "other-format"),
    "an id that none is": (HEADER + record([[10, 1, ["a", "m"], "device", 2, -1, 1]]), "other-format"),
    "a segment of no extent": (HEADER + record([[14, 1, ["a", "m"], "s", "device", 2, 2, 1, 0, 1, 1]]), "other-format"),
    "a time before the boot": (HEADER + record([[3, 1, -1]]), "other-format"),
    "a limit below zero": (HEADER + record([[4, ["a", "m"], None, {"device": -1}]]), "other-format"),
    "a pid that none is": (HEADER + record([[1, 1, "a", 1 << 31, 0, "p", False, "c", 1, "", ""]]), "other-format"),
    "another boot": (record(["membroker journal", 1, "boot-0", "GPU-1"]), "other-boot"),
    "another device": (record(["membroker journal", 1, "boot-1", "GPU-2"]), "other-device"),
    "another version": (record(["membroker journal", 2, {"boot": "boot-1"}]), "other-format"),
    "no journal": (record(["dear diary", 1, "boot-1", "GPU-1"]), "broken"),
    "a header that is no list": (record({"membroker journal": 1}), "other-format"),
    "a text file": (b"Dear diary,\n", "broken"),
    "nothing": (b"", "broken"),
    "zeros": (bytes(5_000), "broken"),
    "half a header": (HEADER[:-5], "broken"),
    "damage in the midst": (HEADER + b"\5\0\0\0xxxxxxxxx" + record([[3, 1, 2]]), "broken"),
    "a fact of another version": (HEADER + record([[3, 1, 2]]) + record([[99, 1]]), "other-format"),
    "a field more": (HEADER + record([[3, 1, 2, 3]]), "other-format"),
    "a field less": (HEADER + record([[3, 1]]), "other-format"),
    "a field of another type": (HEADER + record([[3, 1, "2"]]), "other-format"),
    "a number that is true": (HEADER + record([[3, 1, True]]), "other-format"),
    "a number that is no tag": (HEADER + record([[3.0, 1, 2]]), "other-format"),
    "a place that there is none of": (HEADER + record([[13, 1, "moon", True]]), "other-format"),
    "a name that is a text": (HEADER + record([[8, "ab"]]), "other-format"),
    "more extents than there can be": (HEADER + record([[11, 1, [[1, 1 << 50]], "released"]]), "other-format"),
    "a range of more": (HEADER + record([[19, 1, [1, 1 << 50]]]), "other-format"),
    "many ranges": (HEADER + record([[11, 1, [[1, 1 << 22], [1 << 22, 1]], "released"]]), "other-format"),
    "extents less than none": (HEADER + record([[19, 1, [1, -1]]]), "other-format"),
    "a record that is no JSON": (HEADER + record(b"\xff\xfe"), "other-format"),
    "a record in 100,000 lists": (HEADER + record(b"[" * 100_000), "other-format"),
    "facts in 900 lists": (HEADER + record(b"[" * 900 + b"]" * 900), "other-format"),
    "a number of 5,000 digits": (HEADER + record(b"[[3,1," + b"9" * 5_000 + b"]]"), "other-format"),
    "no fact": (HEADER + record([[]]), "other-format"),
    "facts that are no lists": (HEADER + record([7]), "other-format"),
}


@pytest.mark.parametrize("case", ASIDE)
def test_what_cannot_be_used_is_set_aside(path: Path, case: str) -> None:
    """It is there for whoever wants to know, under a name that says why, and the books start empty."""
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


def test_only_the_last_few_are_kept(path: Path) -> None:
    """A daemon that can't read what it writes must not fill the disk; others' files are not its own to remove."""
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


# --- a disk that is full ---

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
    """Run a daemon whose files may not grow beyond a limit, and return how many steps it took."""
    done = subprocess.run([sys.executable, "-c", _FULL + script, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def steps(count: int) -> list[ft.Fact]:
    return [ft.SessionMoved(number, "x" * 1_000, 0) for number in range(1, count + 1)]


def test_on_a_full_disk_what_is_given_back_is_written(path: Path) -> None:
    """The disk is full while there is a reserve: that is said at once, and a megabyte of credits still is written."""
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


def test_what_did_not_get_onto_the_disk_gets_there_later(path: Path) -> None:
    """Even the reserve is used up: all later steps are kept in their order, and written when there is room again."""
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


def test_a_disk_that_takes_nothing(path: Path) -> None:
    """There is a reserve, and still nothing can be written: no debit is made. A new beginning has all of it."""
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
    """What was written in part is a record that was cut short: the steps before it stand."""
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


def test_a_journal_that_cannot_begin_anew_goes_on(path: Path) -> None:
    """There is no room for a story, or none for its reserve: the file is the one before, and is tried again later."""
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


def test_a_beginning_without_a_reserve(path: Path) -> None:
    """A successor on a full disk has its books, and lends nothing until there is room; but whole they must be."""
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


def test_room_that_a_new_beginning_makes_is_known_at_once(path: Path) -> None:
    """A file may not grow, and begins anew as it is full: who comes next is let in, though nobody else says a word."""
    script = """
import asyncio
from membrokerd.core import events as ev, policy
from membrokerd.core.machine import Broker
from membrokerd.loop import Loop
from membrokerd.restart.descriptor_store import Store

async def main():
    journal.close()
    anew = Journal(path, Binding("boot-1", "GPU-1"), compact_bytes=RESERVE_BYTES + 2_000)
    anew.begin([])
    limit(path.stat().st_size + 100_000)
    broker = Broker(policy.Rules(2, {"device": 64}, max_sessions_per_process=100), epoch=1)
    loop = Loop(broker, None, Store(), 1.0, journal=anew)

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
    while anew.full:
        go()
    loop.tell(ev.Elapsed())
    print(len(broker.cannot_write))

asyncio.run(main())
"""
    assert child(path, script) == 0


def test_nothing_stays_open(path: Path) -> None:
    """A journal has one descriptor, which no program inherits that the daemon starts."""
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
