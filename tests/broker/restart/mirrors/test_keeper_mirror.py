"""The keeper as the second process with copies of descriptors: it may be killed at any time."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import until_async
from tests.support.keepers import Client, Keeper, content_of, memfd
from tests.support.mirrors import OWNER, end, keeping, keeping_not_long, left_at, play, read

from membroker.wire.descriptors import close_all
from membrokerd.restart import keeper as fdstore
from membrokerd.restart import keeper_client as mirrors
from membrokerd.restart.descriptor_store import Store, StoredDescriptors
from membrokerd.restart.keeper_client import KeeperMirror, open_keeper
from membrokerd.restart.keeper_connection import KeeperConnection

_STRANGER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
os.setuid(65534)
listener.listen()
print("listening", flush=True)
sys.stdin.read()
print(listener.accept()[0].recv(100).decode() or "nothing")
"""
"""Another user's process at the socket of a keeper; it says what it got."""


async def opened(path: Path) -> tuple[KeeperMirror, Store]:
    """Return the mirror that a daemon opens, and a store that it copies."""
    mirror, _ = await open_keeper(path, OWNER)
    return mirror, Store(mirror)


def pid_of(mirror: KeeperMirror) -> int | None:
    """Return the pid of a mirror's keeper, or None while no keeper is connected."""
    return None if mirror._connection is None else mirror._connection.pid


def files_of(pid: int) -> set[str]:
    """Return the targets of a process's open descriptors. Each pipe and socket has a number of its own."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the descriptor of this listing itself
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {name for name in found if not name.startswith("anon_inode:")}


async def test_a_daemon_finds_what_its_predecessor_kept(path: Path) -> None:
    """Segments, a worker's pidfd and a driver's descriptor outlive the daemon. The next one lends and gives them up."""
    mirror, kept = await open_keeper(path, OWNER)
    assert kept == StoredDescriptors()
    store = Store(mirror)
    await keeping(store, 0x1F, {extent: b"extent %d" % extent for extent in range(1, 101)})
    await keeping(store, 2, {200: b"other"})
    pidfd, watch = os.pidfd_open(os.getpid()), memfd(b"watch")
    store.keep_process(0xABC, pidfd)
    store.keep_driver({"watch": watch})
    close_all([pidfd, watch])
    await keeping(store, 3, {300: b"the last"})
    pid = pid_of(mirror)
    assert pid is not None
    end(store)
    mirror, kept = await open_keeper(path, OWNER)
    assert pid_of(mirror) == pid
    store = Store(mirror)
    store.adopt(kept)
    assert len(store) == 102
    assert content_of(store.lend(0x1F, [64])[0]) == b"extent 64"
    assert not select.select([kept.processes[0xABC]], [], [], 0)[0]
    assert content_of(kept.driver["watch"]) == b"watch"
    close_all(store.give_up(0x1F))
    store.forget_process(0xABC)
    await keeping(store, 4, {400: b"new"})
    end(store)
    kept = await left_at(path)
    assert list(kept.driver) == ["watch"]
    assert not kept.processes
    assert read(kept) == {2: {200: b"other"}, 3: {300: b"the last"}, 4: {400: b"new"}}


async def test_a_daemon_that_fails_at_its_start_leaves_all_or_nothing(path: Path) -> None:
    """Its port is taken, so it exits before the keeper handles its put. Half of a put would stop every later start."""
    with Keeper(path) as keeper:
        _, store = await opened(path)
        keeper.process.send_signal(signal.SIGSTOP)
        os.waitpid(keeper.process.pid, os.WUNTRACED)
        file = memfd(b"")
        store.keep_driver({"watches": file, "table": file})
        close_all([*store.close(), file])
        keeper.process.send_signal(signal.SIGCONT)
        kept = await left_at(path)
        assert read(kept) == {}
        assert set(kept.driver) in (set(), {"watches", "table"})


def test_no_keeper_is_looked_for_where_others_can_listen(directory: Path) -> None:
    """A process of theirs would get the descriptors of all segments: it is not even connected to."""
    inner = directory / "inner"
    inner.mkdir(mode=0o700)
    directory.chmod(0o777)
    path = inner / "keeper.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        stranger.setblocking(False)
        with pytest.raises(PermissionError, match=f"{directory} "):
            play(open_keeper(path, OWNER))
        with pytest.raises(BlockingIOError):
            stranger.accept()
    for place in (path, directory / "later" / "keeper.sock"):
        with Keeper(place) as keeper:
            status, complaint = keeper.ended()
        assert status == 1
        assert f"{directory} can be changed by other users" in complaint
    assert list(directory.iterdir()) == [inner], "nothing was made there"


@pytest.mark.root
def test_a_keeper_of_another_user_gets_nothing(path: Path) -> None:
    """The kernel says whose the process is that listens: a place that only we can change does not tell."""
    with subprocess.Popen(
        [sys.executable, "-c", _STRANGER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout.readline() == "listening\n"
        with pytest.raises(PermissionError, match=rf"process {stranger.pid} .*uid 65534"):
            play(open_keeper(path, OWNER))
        said, _ = stranger.communicate("")
    assert said == "nothing\n"


async def test_signals_to_the_daemon_do_not_reach_the_keeper(path: Path) -> None:
    """Ctrl-C in the daemon's terminal, or the end of its log's reader, does not reach the keeper."""
    mirror, _ = await open_keeper(path, OWNER)
    assert pid_of(mirror) is not None
    assert os.getsid(pid_of(mirror)) == pid_of(mirror)
    shared = files_of(pid_of(mirror)) & files_of(os.getpid())
    assert shared <= {"/dev/null"}
    mirror.close()


async def test_a_keeper_is_killed_during_puts(path: Path) -> None:
    """The keeper is stopped, then killed with 30 packets unanswered.

    The next gets what was there, then those, in order, and nothing that was dropped without a keeper.
    """
    mirror, store = await opened(path)
    await keeping(store, 1, {extent: b"before %d" % extent for extent in range(1, 201)})
    store.keep_process(7, store.lend(1, [1])[0])
    first = pid_of(mirror)
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    order: list[int] = []
    puts = []
    for segment in range(2, 32):
        put = keeping(store, segment, {segment * 100 + extent: b"%d" % segment for extent in range(5)})
        put.add_done_callback(lambda _, segment=segment: order.append(segment))
        puts.append(put)
    close_all(store.give_up(1, range(1, 101)))
    for session in (5, 6):
        store.keep_process(session, store.lend(1, [200])[0])
    store.forget_process(5)
    assert not any(put.done() for put in puts)
    os.kill(first, signal.SIGKILL)
    await until_async(lambda: pid_of(mirror) != first)
    close_all(store.give_up(1, range(101, 151)))
    await asyncio.gather(*puts)
    assert order == list(range(2, 32))
    assert pid_of(mirror) not in (None, first)
    end(store)
    kept = await left_at(path)
    assert sorted(kept.processes) == [6, 7]
    contents = read(kept)
    assert contents.pop(1) == {extent: b"before %d" % extent for extent in range(151, 201)}
    assert contents == {
        segment: {segment * 100 + extent: b"%d" % segment for extent in range(5)} for segment in range(2, 32)
    }


async def test_another_daemon_took_the_connection(path: Path) -> None:
    """The connection is lost but the keeper lives: it is filled again, and drops every other name."""
    mirror, store = await opened(path)
    await keeping(store, 1, {1: b"goes"})
    await keeping(store, 2, {2: b"stays"})
    pid = pid_of(mirror)
    with Client(path) as other:
        assert other.ask(1, own=OWNER) == {"number": 1}
        other.put({"segment.9.9": b"another's"})
        close_all(store.give_up(1))
    await keeping(store, 3, {3: b"later"})
    assert pid_of(mirror) == pid
    end(store)
    assert read(await left_at(path)) == {2: {2: b"stays"}, 3: {3: b"later"}}


async def test_no_keeper_can_be_started(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory is open to others: puts fail in time and say why, retries slow down, and it recovers by itself."""
    monkeypatch.setattr(mirrors, "MAX_PAUSE_SECONDS", 0.4)

    def pauses() -> list[float]:
        return [
            record.fields["pause_seconds"]  # type: ignore[attr-defined]
            for record in caplog.records
            if record.getMessage().startswith("cannot reach or start a keeper of descriptors")
        ]

    mirror, store = await opened(path)
    await keeping(store, 1, {1: b"stays"})
    path.parent.chmod(0o755)
    assert pid_of(mirror) is not None
    os.kill(pid_of(mirror), signal.SIGKILL)
    with pytest.raises(OSError, match="keeper"):
        await keeping_not_long(store, 2, {2: b"refused"})
    assert len(store) == 1
    await until_async(lambda: len(pauses()) >= 4)
    assert pauses()[:4] == [0.1, 0.2, 0.4, 0.4]
    path.parent.chmod(0o700)
    await until_async(lambda: pid_of(mirror) is not None)
    await keeping(store, 3, {3: b"after"})
    end(store)
    assert read(await left_at(path)) == {1: {1: b"stays"}, 3: {3: b"after"}}


async def test_a_keeper_that_does_not_answer(path: Path) -> None:
    """The keeper is stopped, not dead: a put fails in time and leaves nothing behind, and the keeper serves again."""
    mirror, store = await opened(path)
    await keeping(store, 1, {1: b"stays"})
    pid = pid_of(mirror)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        await keeping_not_long(store, 2, dict.fromkeys(range(1000, 2000), b"refused"))
    assert pid_of(mirror) is None, "it would be sent the rest of the put, whose copies are closed"
    os.kill(pid, signal.SIGCONT)
    await until_async(lambda: pid_of(mirror) is not None)
    await keeping(store, 3, {3: b"after"})
    assert pid_of(mirror) == pid
    end(store)
    assert read(await left_at(path)) == {1: {1: b"stays"}, 3: {3: b"after"}}


async def test_a_full_keeper_keeps_no_part_of_a_segment(path: Path) -> None:
    """Two packets fit and the third does not: the segment is refused, and what was put of it is dropped."""
    with Keeper(path, fdstore.RESERVED + 150):
        _, store = await opened(path)
        await keeping(store, 1, {1: b"stays"})
        with pytest.raises(OSError, match=r"129 descriptors .* 150"):
            await keeping(store, 2, dict.fromkeys(range(1000, 1190), b"refused"))
        assert len(store) == 1
        await keeping(store, 3, dict.fromkeys(range(2000, 2149), b"as many as fit"))
        close_all(store.give_up(3))
        await keeping(store, 4, {4: b"after"})
        end(store)
        assert read(await left_at(path)) == {1: {1: b"stays"}, 4: {4: b"after"}}


async def test_the_daemon_stops_during_puts(path: Path) -> None:
    """The put fails exactly once, and the caller owns its descriptors again."""
    mirror, store = await opened(path)
    assert pid_of(mirror) is not None
    os.kill(pid_of(mirror), signal.SIGSTOP)
    put = keeping(store, 1, {1: b"late"})
    os.kill(pid_of(mirror), signal.SIGCONT)
    end(store)
    with pytest.raises(ConnectionError):
        await put


async def test_a_keeper_that_an_older_daemon_started(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper does not know owners and serves the newest connection: an upgrade finds its predecessor's segments."""
    ask = KeeperConnection.ask

    def ask_an_older_one(line: Any, message: Any, descriptors: Any = ()) -> Any:
        """An unknown request is refused with an error without an owner, as in every version."""
        return ask(line, {"unknown": 1} if "own" in message else message, descriptors)

    monkeypatch.setattr(KeeperConnection, "ask", ask_an_older_one)
    with Keeper(path):
        with Client(path) as older:
            older.put({"segment.1.1": b"kept"})
        assert read(await left_at(path)) == {1: {1: b"kept"}}
