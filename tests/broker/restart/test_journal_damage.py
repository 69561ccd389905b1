"""Damaged journals: what the next daemon still reads, what it sets aside, and what it does not trust."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tests.support.journals import BEGAN, BINDING, STEPS, ends, read, record, write

from membrokerd.core import facts as ft
from membrokerd.restart.journal import MAX_FILE_BYTES, RESERVE_BYTES, Journal

HEADER = record(["membroker journal", 1, "boot-1", "GPU-1", 0])


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
            byte = at + bit // 8
            path.write_bytes(data[:byte] + bytes([data[byte] ^ 1 << bit % 8]) + data[byte + 1 :])
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
    assert int.from_bytes(b"\0\0\0 ", "little") >= MAX_FILE_BYTES, "a text can be a length"


def test_the_search_after_damage_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst case: heads of records that each reach to the end of the file, one after the other."""
    size = 4 << 20
    head = struct.pack("<II", size // 2, 1) + b"[[3,"
    path.write_bytes(HEADER + b"\xff" * 8 + head * (size // len(head)))
    summed, checksum = [0], zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data: summed.append(len(data)) or checksum(data))
    facts, (sentence,) = read(path)
    assert not facts
    assert "is damaged at its byte" in sentence
    assert sum(summed) < 64 * size, "it computed a checksum of half the file for each of 350,000 heads"


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
    "an epoch that is too large": (record(["membroker journal", 1, "boot-1", "GPU-1", 1 << 24]), "other-format"),
    "more extents than a GPU has": (HEADER + record([[10, 1, ["a", "m"], "device", 2, 1, 1 << 40]]), "other-format"),
    "an extent without a size": (HEADER + record([[10, 1, ["a", "m"], "device", 0, 1, 1]]), "other-format"),
    "an extent that is too large": (HEADER + record([[10, 1, ["a", "m"], "device", 1 << 63, 1, 1]]), "other-format"),
    "a negative id": (HEADER + record([[10, 1, ["a", "m"], "device", 2, -1, 1]]), "other-format"),
    "a segment of nothing": (HEADER + record([[14, 1, ["a", "m"], "s", "device", 2, 2, 1, 0, 1, 1]]), "other-format"),
    "a time before the boot": (HEADER + record([[3, 1, -1]]), "other-format"),
    "a limit below zero": (HEADER + record([[4, ["a", "m"], None, {"device": -1}]]), "other-format"),
    "a pid above 2^31": (HEADER + record([[1, 1, "a", 1 << 31, 0, "p", False, "c", 1, "", ""]]), "other-format"),
    "a user above 2^32": (HEADER + record([[1, 1, "a", 1, 1 << 32, "p", False, "c", 1, "", ""]]), "other-format"),
    "an id above 2^64": (HEADER + record([[3, 1 << 64, 2]]), "other-format"),
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
