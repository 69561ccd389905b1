"""The journal on a full disk: releases are still written, and nothing is lent that is not recorded."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.journals import BEGAN, BINDING, STEPS, read, steps
from tests.support.processes import descriptors

from membrokerd.restart.journal import Journal

_FULL = """
import os, resource, sys
from pathlib import Path
from membrokerd.core import facts as ft
from membrokerd.restart.journal import RESERVE_BYTES, Binding, Journal

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def opened(**options):
    return Journal(path, Binding("boot-1", "GPU-1"), **options)

path = Path(sys.argv[1])
journal = opened()
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
    """Run a daemon that may limit the size of its files, and dies. Return how many steps it took."""
    code = f"{_FULL}{script}\nprint(number, flush=True)\nos._exit(0)"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.deep
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
"""
    assert child(path, script) == 11
    assert read(path) == (steps(11), [])


def test_a_journal_that_begins_or_goes_on_without_room_says_why(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says stays for the operator when there is room again, and until there is another reason."""
    journal, error = Journal(path, BINDING), errno.ENOSPC

    def no_room(descriptor: int, offset: int, length: int) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        journal.begin([])
        assert (journal.full, "ENOSPC" in journal.why) == (True, True)
        error = errno.EDQUOT
        assert journal.append(())
        assert (journal.full, "EDQUOT" in journal.why) == (True, True)
    assert journal.append(())
    assert (journal.full, "EDQUOT" in journal.why) == (False, True)
    journal.close()


def test_a_stop_writes_what_there_was_no_room_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator makes room and stops the daemon: no step comes between the two."""
    journal = Journal(path, BINDING)
    journal.begin([])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert not journal.append(steps(2))
    journal.close()
    assert read(path) == (steps(2), [])


def test_a_daemon_that_dies_with_a_full_disk(path: Path) -> None:
    """A partial write looks like a record that was cut short: the steps before it are read."""
    script = """
limit(path.stat().st_size)
while append():
    pass
append()
"""
    count = child(path, script)
    facts, (sentence,) = read(path)
    assert facts == steps(count - 2)
    assert "is incomplete" in sentence


def test_a_compaction_without_room_leaves_the_journal(path: Path) -> None:
    """No room for the story or for its reserve: the old file stays, and the compaction is tried again later."""
    script = """
journal.close()
journal = opened(compact_bytes=10_000)
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
"""
    count = child(path, script)
    assert 20 < count < 30
    assert read(path) == (steps(count), [])


def test_a_predecessors_file_with_a_reserve(path: Path) -> None:
    """A successor on a full disk that has read a whole file goes on with it: it has room, and a new one would not."""
    script = """
assert append()
journal.close()
limit(RESERVE_BYTES)
journal = opened()
assert len(journal.read(list)[0]) == 1
journal.begin([])
assert not journal.full
assert append() and not journal.full
assert not path.with_name("journal.new").exists()
limit(resource.RLIM_INFINITY)
for _ in journal.compact([]):
    pass
assert append() and not journal.full
"""
    assert child(path, script) == 3
    assert read(path) == (steps(3)[2:], [])


def test_a_predecessors_file_that_is_torn(path: Path) -> None:
    """Its copy is the same file under a second name, so it is not written to: the start is refused, as before."""
    script = """
assert append() and append()
journal.close()
os.truncate(path, size() - 1)
limit(1)
journal = opened()
assert len(journal.read(list)[0]) == 1
try:
    journal.begin([])
except OSError:
    number = 1
"""
    assert child(path, script) == 1
    assert read(path)[0] == steps(1)


def test_a_new_file_without_a_reserve(path: Path) -> None:
    """A successor on a full disk has its books, and lends nothing until there is room. The books must be complete."""
    script = """
journal.close()
limit(RESERVE_BYTES)
journal = opened()
try:
    journal.begin([ft.SessionEnded(1, 0)] * 300_000)
except OSError:
    assert opened().read(list) == ([], [])
else:
    raise AssertionError("there was room")
journal.begin([])
assert journal.full
assert append() and journal.full
limit(resource.RLIM_INFINITY)
assert append() and not journal.full
"""
    assert child(path, script) == 2
    assert read(path) == (steps(2), [])


def test_room_that_a_compaction_makes_is_used_at_once(path: Path) -> None:
    """A full file that may not grow is compacted: the next request is admitted at once. The log says both, once."""
    script = """
import asyncio, logging
from membrokerd.core import events as ev, policy
from membrokerd.core.machine import Broker
from membrokerd.runtime.loop import Loop
from membrokerd.restart.descriptor_store import Store
from membrokerd.runtime.journal_writer import JournalWriter

class Lines(logging.Handler):
    def emit(self, record):
        if "journal" in record.getMessage():
            lines.append(record.getMessage())

lines = []
logging.getLogger("membrokerd").addHandler(Lines())
logging.getLogger("membrokerd").setLevel("INFO")

async def main():
    journal.close()
    fresh = opened(compact_bytes=RESERVE_BYTES + 2_000)
    fresh.begin([])
    limit(path.stat().st_size + 100_000)
    broker = Broker(policy.Rules(2, {"device": 64}, max_sessions_per_process=100), epoch=1)
    loop = Loop(broker, None, Store(), audit_seconds=1.0, writer=JournalWriter(broker, fresh))

    def come():
        loop.ask(lambda call: ev.OpenSession(call, "t", 1, 1, "p", False, "x" * 1_000), lambda answer: None)

    def go():
        session = next(iter(broker.ledger.sessions))
        loop.ask(lambda call: ev.Goodbye(call, session, 1), lambda answer: None)

    for _ in range(50):
        come()
    while not broker.books.cannot_write:
        go()
        come()
    while fresh.full:
        if broker.ledger.sessions:
            go()
        await asyncio.sleep(0)  # on a busy machine the compaction is not over in its first portion
    loop.tell(ev.Elapsed())
    began, ended = lines
    assert began.startswith("the journal cannot be written: the broker lends nothing more and begins no session")
    assert ended == "the journal can be written again"
    return len(broker.books.cannot_write)

number = asyncio.run(main())
"""
    assert child(path, script) == 0


def test_nothing_stays_open(path: Path) -> None:
    """A journal has one descriptor, which programs that the daemon starts do not inherit."""
    before = descriptors()
    journal = Journal(path, BINDING)
    assert journal.read(list) == ([], [])
    for _ in range(5):
        journal.begin(BEGAN)
        journal.append(STEPS[0])
    (descriptor,) = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(path)]
    assert not os.get_inheritable(int(descriptor))
    journal.close()
    journal.close()
    assert descriptors() == before
