"""The second process that has copies: a keeper that may be killed, and systemd."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.keepers import Client, Keeper, content_of, end_keeper, memfd

from membroker.wire.descriptors import close_all
from membrokerd.restart import keeper as fdstore
from membrokerd.restart import keeper_client as mirrors
from membrokerd.restart.descriptor_store import Kept, Store
from membrokerd.restart.keeper_client import open_keeper
from membrokerd.restart.keeper_connection import KeeperConnection, Owned
from membrokerd.restart.systemd import SystemdMirror, open_systemd, systemd_available

_T = TypeVar("_T")
STUCK_SECONDS = 0.3
OWNER = "/run/membroker/host"


@pytest.fixture(autouse=True)
def descriptor_limit() -> Iterator[None]:
    """The daemon's side runs in this process here, and the daemon raises its soft limit when it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory of mode 0700; the keeper in it ends with the test."""
    made = Path(tempfile.mkdtemp(prefix="mb-"))
    yield made
    end_keeper(made / "keeper.sock")
    shutil.rmtree(made)


@pytest.fixture
def path(directory: Path) -> Path:
    return directory / "keeper.sock"


def play(story: Awaitable[_T]) -> _T:
    """Run a coroutine, and check that it has closed every descriptor that it opened."""

    async def main() -> _T:
        return await asyncio.wait_for(story, DEADLINE_SECONDS)

    before = len(os.listdir("/proc/self/fd"))
    told = asyncio.run(main())
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor is lost"
    return told


async def until(true: Callable[[], object]) -> None:
    """Wait for a state without an event of its own."""
    while not true():
        await asyncio.sleep(0.002)


def keeping(store: Store, segment: int, contents: dict[int, bytes]) -> asyncio.Future[None]:
    """Keep files as a segment's extents. The future is done when the store calls back."""
    told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    files = [memfd(content) for content in contents.values()]

    def done(error: OSError | None) -> None:
        assert not told.done(), "done was called twice"
        if error is None:
            told.set_result(None)
        else:
            close_all(files)
            told.set_exception(error)

    store.keep(segment, list(contents), files, done)
    return told


def read(kept: Kept) -> dict[int, dict[int, bytes]]:
    """Return the contents of the extents that a predecessor left, and close them all."""
    contents = {
        segment: {extent: content_of(descriptor) for extent, descriptor in extents.items()}
        for segment, extents in kept.segments.items()
    }
    close_all(descriptor for extents in kept.segments.values() for descriptor in extents.values())
    close_all([*kept.processes.values(), *kept.driver.values()])
    return contents


def keeping_not_long(store: Store, segment: int, contents: dict[int, bytes]) -> asyncio.Future[None]:
    """Keep files, with a shorter timeout for the mirror."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirrors, "PUT_SECONDS", STUCK_SECONDS)
        return keeping(store, segment, contents)


async def left_at(path: Path) -> Kept:
    """Return what the next daemon finds in the keeper at this path."""
    mirror, kept = await open_keeper(path, OWNER)
    mirror.close()
    return kept


def files_of(pid: int) -> set[str]:
    """Return the targets of a process's open descriptors. Each pipe and socket has a number of its own."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the descriptor of this listing itself
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {name for name in found if not name.startswith("anon_inode:")}


def end(store: Store) -> None:
    close_all(store.close())


# --- the keeper ---


def test_a_daemon_finds_what_its_predecessor_kept(path: Path) -> None:
    """Segments, a worker's pidfd and a driver's descriptor outlive the daemon. The next one lends and gives them up."""

    async def first() -> int:
        mirror, kept = await open_keeper(path, OWNER)
        assert kept == Kept()
        store = Store(mirror)
        await keeping(store, 0x1F, {extent: b"extent %d" % extent for extent in range(1, 101)})
        await keeping(store, 2, {200: b"other"})
        pidfd, watch = os.pidfd_open(os.getpid()), memfd(b"watch")
        store.keep_process(0xABC, pidfd)
        store.keep_driver({"watch": watch})
        close_all([pidfd, watch])
        await keeping(store, 3, {300: b"the last"})
        pid = mirror.pid
        assert pid is not None
        end(store)
        return pid

    async def second(pid: int) -> None:
        mirror, kept = await open_keeper(path, OWNER)
        assert mirror.pid == pid
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

    play(second(play(first())))

    async def third() -> None:
        kept = await left_at(path)
        assert list(kept.driver) == ["watch"]
        assert not kept.processes
        assert read(kept) == {2: {200: b"other"}, 3: {300: b"the last"}, 4: {400: b"new"}}

    play(third())


def test_a_daemon_that_fails_at_its_start_leaves_all_or_nothing(path: Path) -> None:
    """Its port is taken, so it exits before the keeper handles its put. Half of a put would stop every later start."""
    with Keeper(path) as keeper:

        async def first() -> None:
            mirror, _ = await open_keeper(path, OWNER)
            store = Store(mirror)
            keeper.process.send_signal(signal.SIGSTOP)
            os.waitpid(keeper.process.pid, os.WUNTRACED)
            file = memfd(b"")
            store.keep_driver({"watches": file, "table": file})
            close_all([*store.close(), file])
            keeper.process.send_signal(signal.SIGCONT)

        async def second() -> set[str]:
            kept = await left_at(path)
            assert read(kept) == {}
            return set(kept.driver)

        play(first())
        assert play(second()) in (set(), {"watches", "table"})


def test_signals_to_the_daemon_do_not_reach_the_keeper(path: Path) -> None:
    """Ctrl-C in the daemon's terminal, or the end of its log's reader, does not reach the keeper."""

    async def story() -> None:
        mirror, _ = await open_keeper(path, OWNER)
        assert mirror.pid is not None
        assert os.getsid(mirror.pid) == mirror.pid
        shared = files_of(mirror.pid) & files_of(os.getpid())
        assert shared <= {"/dev/null"}
        mirror.close()

    play(story())


def test_a_keeper_is_killed_during_puts(path: Path) -> None:
    """The keeper is stopped, then killed with 30 packets unanswered.

    The next gets what was there, then those, in order.
    """

    async def story() -> None:
        mirror, _ = await open_keeper(path, OWNER)
        store = Store(mirror)
        await keeping(store, 1, {extent: b"before %d" % extent for extent in range(1, 201)})
        store.keep_process(7, store.lend(1, [1])[0])
        first = mirror.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        order: list[int] = []
        puts = []
        for segment in range(2, 32):
            put = keeping(store, segment, {segment * 100 + extent: b"%d" % segment for extent in range(5)})
            put.add_done_callback(lambda _, segment=segment: order.append(segment))
            puts.append(put)
        close_all(store.give_up(1, range(1, 101)))
        assert not any(put.done() for put in puts)
        os.kill(first, signal.SIGKILL)
        await asyncio.gather(*puts)
        assert order == list(range(2, 32))
        assert mirror.pid not in (None, first)
        end(store)
        kept = await left_at(path)
        assert list(kept.processes) == [7]
        contents = read(kept)
        assert contents.pop(1) == {extent: b"before %d" % extent for extent in range(101, 201)}
        assert contents == {
            segment: {segment * 100 + extent: b"%d" % segment for extent in range(5)} for segment in range(2, 32)
        }

    play(story())


def test_what_was_dropped_without_a_keeper_is_not_put_again(path: Path) -> None:
    """A session begins and ends, and a segment is given up, while the keeper is dead: the next one never gets them."""

    async def story() -> None:
        mirror, _ = await open_keeper(path, OWNER)
        store = Store(mirror)
        await keeping(store, 1, {1: b"goes"})
        await keeping(store, 2, {2: b"stays"})
        assert mirror.pid is not None
        os.kill(mirror.pid, signal.SIGSTOP)
        store.keep_process(5, store.lend(2, [2])[0])
        store.keep_process(6, store.lend(2, [2])[0])
        store.forget_process(5)
        os.kill(mirror.pid, signal.SIGKILL)
        await until(lambda: mirror.pid is None)
        close_all(store.give_up(1))
        await keeping(store, 3, {3: b"later"})
        end(store)
        kept = await left_at(path)
        assert list(kept.processes) == [6]
        assert read(kept) == {2: {2: b"stays"}, 3: {3: b"later"}}

    play(story())


def test_another_daemon_took_the_connection(path: Path) -> None:
    """The connection is lost but the keeper lives: it is filled again, and drops every other name."""

    async def story() -> None:
        mirror, _ = await open_keeper(path, OWNER)
        store = Store(mirror)
        await keeping(store, 1, {1: b"goes"})
        await keeping(store, 2, {2: b"stays"})
        pid = mirror.pid
        with Client(path) as other:
            assert other.ask(1, own=OWNER) == {"number": 1}
            other.put({"segment.9.9": b"another's"})
            close_all(store.give_up(1))
        await keeping(store, 3, {3: b"later"})
        assert mirror.pid == pid
        end(store)
        assert read(await left_at(path)) == {2: {2: b"stays"}, 3: {3: b"later"}}

    play(story())


def test_no_keeper_can_be_started(
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

    async def story() -> None:
        mirror, _ = await open_keeper(path, OWNER)
        store = Store(mirror)
        await keeping(store, 1, {1: b"stays"})
        path.parent.chmod(0o755)
        assert mirror.pid is not None
        os.kill(mirror.pid, signal.SIGKILL)
        with pytest.raises(OSError, match="no keeper can be started"):
            await keeping_not_long(store, 2, {2: b"refused"})
        assert len(store) == 1
        await until(lambda: len(pauses()) >= 4)
        assert pauses()[:4] == [0.1, 0.2, 0.4, 0.4]
        path.parent.chmod(0o700)
        await until(lambda: mirror.pid is not None)
        await keeping(store, 3, {3: b"after"})
        end(store)
        assert read(await left_at(path)) == {1: {1: b"stays"}, 3: {3: b"after"}}

    play(story())


def test_a_keeper_that_does_not_answer(path: Path) -> None:
    """The keeper is stopped, not dead: a put fails in time and leaves nothing behind, and the keeper serves again."""

    async def story() -> None:
        mirror, _ = await open_keeper(path, OWNER)
        store = Store(mirror)
        await keeping(store, 1, {1: b"stays"})
        pid = mirror.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError, match="does not answer"):
            await keeping_not_long(store, 2, dict.fromkeys(range(1000, 2000), b"refused"))
        assert mirror.pid is None, "it would be sent the rest of the put, whose copies are closed"
        os.kill(pid, signal.SIGCONT)
        await until(lambda: mirror.pid is not None)
        await keeping(store, 3, {3: b"after"})
        assert mirror.pid == pid
        end(store)
        assert read(await left_at(path)) == {1: {1: b"stays"}, 3: {3: b"after"}}

    play(story())


def test_a_full_keeper_keeps_no_part_of_a_segment(path: Path) -> None:
    """Two packets fit and the third does not: the segment is refused, and what was put of it is dropped."""

    async def story() -> None:
        mirror, _ = await open_keeper(path, OWNER)
        store = Store(mirror)
        await keeping(store, 1, {1: b"stays"})
        with pytest.raises(OSError, match="it has 129 descriptors and may have 150"):
            await keeping(store, 2, dict.fromkeys(range(1000, 1190), b"refused"))
        assert len(store) == 1
        await keeping(store, 3, dict.fromkeys(range(2000, 2149), b"as many as fit"))
        close_all(store.give_up(3))
        await keeping(store, 4, {4: b"after"})
        end(store)
        assert read(await left_at(path)) == {1: {1: b"stays"}, 4: {4: b"after"}}

    with Keeper(path, fdstore.RESERVED + 150):
        play(story())


def test_names_that_no_broker_uses_are_dropped(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names of another version, or of no version: the daemon logs them and the keeper drops them."""
    names = ["junk", "segment.0.1", "segment.01.2", "segment.1.2.3", "segment.1.G", "process.A", "driver."]

    async def story() -> None:
        for _ in range(2):
            assert read(await left_at(path)) == {1: {2: b"segment.1.2"}}

    with Keeper(path):
        with Client(path) as client:
            client.put({name: name.encode() for name in [*names, "segment.1.2"]})
        play(story())
    said = [record.fields for record in caplog.records if "whose names no broker uses" in record.getMessage()]  # type: ignore[attr-defined]
    assert said == [{"names": names}]


def test_the_daemon_stops_during_puts(path: Path) -> None:
    """The put fails exactly once, and the caller owns its descriptors again."""

    async def story() -> None:
        mirror, _ = await open_keeper(path, OWNER)
        store = Store(mirror)
        assert mirror.pid is not None
        os.kill(mirror.pid, signal.SIGSTOP)
        put = keeping(store, 1, {1: b"late"})
        os.kill(mirror.pid, signal.SIGCONT)
        end(store)
        with pytest.raises(ConnectionError, match="the broker is stopping"):
            await put

    play(story())


def test_a_keeper_of_another_device_is_refused_at_once(path: Path) -> None:
    """Two daemons have one keeper_socket: the second is told what to do, and the first stays connected."""

    async def story() -> None:
        mirror, _ = await open_keeper(path, OWNER)
        store = Store(mirror)
        await keeping(store, 1, {1: b"the first one's"})
        with pytest.raises(Owned, match=rf"keeps the descriptors of {OWNER}: give each device a keeper"):
            await open_keeper(path, "/run/membroker/host-1")
        await keeping(store, 2, {2: b"more"})
        end(store)
        with pytest.raises(Owned):
            await open_keeper(path, "/run/membroker/host-1")
        assert read(await left_at(path)) == {1: {1: b"the first one's"}, 2: {2: b"more"}}

    play(story())


def test_a_keeper_that_an_older_daemon_started(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper does not know owners and serves the newest connection: an upgrade finds its predecessor's segments."""

    async def story() -> None:
        with Client(path) as older:
            older.put({"segment.1.1": b"kept"})
        assert read(await left_at(path)) == {1: {1: b"kept"}}

    with Keeper(path):
        # An unknown request is refused with an error without an owner, as in every version.
        line_ask = KeeperConnection.ask

        def ask(line: Any, message: Any, descriptors: Any = ()) -> Any:
            return line_ask(line, {"unknown": 1} if "own" in message else message, descriptors)

        monkeypatch.setattr(KeeperConnection, "ask", ask)
        play(story())


def test_an_open_directory_is_an_error_of_the_daemon(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's error includes the keeper's own complaint."""
    monkeypatch.setattr(mirrors, "FIRST_PAUSE_SECONDS", 0.0)
    path.parent.chmod(0o750)
    with pytest.raises(OSError, match=r"membroker-fdstore: cannot listen at .* is not this user's alone"):
        play(open_keeper(path, OWNER))


# --- systemd ---


class Systemd:
    """How systemd treats a service's messages: its descriptor store, as in service.c and manager.c."""

    def __init__(self, directory: Path, maximum: int) -> None:
        self.maximum = maximum
        self.stored: list[tuple[str, int]] = []
        self.said: list[str] = []
        self.barriers: list[int] | None = None
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._sock.bind(str(directory / "notify"))

    def work(self) -> None:
        """Handle messages as they come."""
        asyncio.get_running_loop().add_reader(self._sock, self._take)

    def rest(self) -> None:
        """Stop handling messages."""
        asyncio.get_running_loop().remove_reader(self._sock)

    def _take(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._sock, 4096, 253)
        assignments = [line.partition("=") for line in data.decode().split("\n")]
        fields = {key: value for key, _, value in assignments}
        name = fields.get("FDNAME", "stored")
        if fields == {"BARRIER": "1"}:
            self.said.append("BARRIER")
            if self.barriers is not None:
                self.barriers += descriptors
                return
        elif fields.get("FDSTOREREMOVE") == "1":
            self.said.append(f"remove {name}")
            close_all(descriptor for kept, descriptor in self.stored if kept == name)
            self.stored = [item for item in self.stored if item[0] != name]
        elif fields.get("FDSTORE") == "1":
            assert fields["FDPOLL"] == "0", "it would drop a pidfd when its process dies"
            self.said.append(f"store {name}")
            if len(self.stored) + len(descriptors) <= self.maximum:  # else systemd drops it silently
                self.stored += [(name, os.dup(descriptor)) for descriptor in descriptors]
        close_all(descriptors)

    def contents(self) -> list[tuple[str, bytes]]:
        """Return what is in the store."""
        return [(name, content_of(descriptor)) for name, descriptor in self.stored]

    def end(self) -> None:
        """Close all descriptors."""
        if self._sock.fileno() >= 0:
            self.rest()
            self._sock.close()
            close_all(descriptor for _, descriptor in self.stored)


def play_systemd(
    directory: Path, maximum: int, story: Callable[[Systemd, SystemdMirror, Store], Awaitable[None]]
) -> None:
    """Run a coroutine as a daemon that systemd started."""

    async def main() -> None:
        systemd = Systemd(directory, maximum)
        systemd.work()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NOTIFY_SOCKET", str(directory / "notify"))
            patch.setenv("FDSTORE", str(maximum))
            assert systemd_available()
            mirror, kept = open_systemd()
            assert kept == Kept()
            store = Store(mirror)
            await story(systemd, mirror, store)
            end(store)
            systemd.end()

    play(main())


def test_nothing_is_lent_before_systemd_has_it(directory: Path) -> None:
    """systemd is busy: the store reports nothing until systemd has reached the barrier, and then in order."""

    async def story(systemd: Systemd, mirror: SystemdMirror, store: Store) -> None:
        systemd.rest()
        order: list[int] = []
        puts = []
        for segment in range(1, 4):
            put = keeping(store, segment, {extent: b"%d" % extent for extent in range(1, 31)})
            put.add_done_callback(lambda _, segment=segment: order.append(segment))
            puts.append(put)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not any(put.done() for put in puts)
        systemd.work()
        await asyncio.gather(*puts)
        assert order == [1, 2, 3]
        assert systemd.contents() == [
            (f"segment.{segment:x}.{extent:x}", b"%d" % extent) for segment in range(1, 4) for extent in range(1, 31)
        ]
        assert systemd.said.count("BARRIER") == 3

    play_systemd(directory, 100, story)


def test_barriers_count_in_the_order_of_the_puts(directory: Path) -> None:
    """The loop was busy while three pipes were closed, and sees the last one first."""

    async def story(systemd: Systemd, mirror: SystemdMirror, store: Store) -> None:
        systemd.barriers = []
        order: list[int] = []
        puts = [keeping(store, segment, {1: b"kept"}) for segment in range(1, 4)]
        for segment, put in enumerate(puts, 1):
            put.add_done_callback(lambda _, segment=segment: order.append(segment))
        await until(lambda: len(systemd.barriers or ()) == 3)
        close_all(reversed(systemd.barriers))
        await asyncio.gather(*puts)
        assert order == [1, 2, 3]

    play_systemd(directory, 5, story)


def test_systemd_drops_what_is_dropped_or_replaced(directory: Path) -> None:
    """systemd would keep both descriptors of one name, so the old one is removed first."""

    async def story(systemd: Systemd, mirror: SystemdMirror, store: Store) -> None:
        await keeping(store, 1, {1: b"goes", 2: b"stays"})
        for content in (b"old", b"new"):
            watch = memfd(content)
            mirror.put([("driver.watch", watch)], lambda error: None)
            close_all([watch])
        close_all(store.give_up(1, [1]))
        store.keep_process(5, store.lend(1, [2])[0])
        store.forget_process(5)
        store.forget_process(6)
        await keeping(store, 3, {3: b"later"})
        assert systemd.contents() == [("segment.1.2", b"stays"), ("driver.watch", b"new"), ("segment.3.3", b"later")]

    play_systemd(directory, 5, story)


def test_systemds_maximum_is_respected(directory: Path) -> None:
    """systemd would silently drop the sixth descriptor, and a segment would be lost at the next start."""

    async def story(systemd: Systemd, mirror: SystemdMirror, store: Store) -> None:
        await keeping(store, 1, dict.fromkeys(range(1, 5), b"kept"))
        said = list(systemd.said)
        with pytest.raises(
            OSError, match="has 4 descriptors of this service and keeps at most 5: raise FileDescriptorStoreMax="
        ):
            await keeping(store, 2, {1: b"one", 2: b"more"})
        assert systemd.said == said
        await keeping(store, 3, {1: b"the fifth"})
        close_all(store.give_up(1, [1, 2]))
        await keeping(store, 2, {1: b"one", 2: b"more"})
        assert len(systemd.stored) == len(store) == 5

    play_systemd(directory, 5, story)


def test_systemd_does_not_answer(directory: Path) -> None:
    """A put fails in time. What systemd takes of it later is removed again."""

    async def story(systemd: Systemd, mirror: SystemdMirror, store: Store) -> None:
        systemd.rest()
        with pytest.raises(TimeoutError, match="systemd does not answer"):
            await keeping_not_long(store, 1, dict.fromkeys(range(1, 1001), b"refused"))
        assert len(store) == 0
        systemd.work()
        await keeping(store, 2, {1: b"after"})
        assert systemd.contents() == [("segment.2.1", b"after")]

    play_systemd(directory, 1000, story)


def test_systemd_is_gone(directory: Path) -> None:
    """systemd's socket is closed: puts fail with the kernel's error."""

    async def story(systemd: Systemd, mirror: SystemdMirror, store: Store) -> None:
        await keeping(store, 1, {1: b"stays"})
        systemd.end()
        with pytest.raises(ConnectionRefusedError):
            await keeping(store, 2, {2: b"refused"})
        assert len(store) == 1

    play_systemd(directory, 5, story)


_DAEMON = """
import asyncio, json, os, sys
from membrokerd.restart.systemd import open_systemd
from tests.support.keepers import content_of

async def main():
    mirror, kept = open_systemd()
    print(json.dumps({
        "segments": {s: {e: content_of(d).decode() for e, d in x.items()} for s, x in kept.segments.items()},
        "processes": list(kept.processes),
        "driver": {name: content_of(descriptor).decode() for name, descriptor in kept.driver.items()},
        "inheritable": [d for d in range(3, 9) if os.path.exists(f"/proc/self/fd/{d}") and os.get_inheritable(d)],
        "closed": not os.path.exists("/proc/self/fd/7"),
        "environment": [key for key in os.environ if key.startswith("LISTEN_")],
    }))
    mirror.close()

asyncio.run(main())
"""
_AS_SYSTEMD = """
import os, sys
for number, descriptor in enumerate(map(int, sys.argv[3:]), 3):
    os.dup2(descriptor, number)
os.environ["LISTEN_PID"] = sys.argv[2] or str(os.getpid())
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


def started(directory: Path, names: list[str], pid: str = "") -> tuple[list[str], dict[str, object]]:
    """Start a daemon as systemd does, with one file per name.

    Return what systemd received, and what the daemon found.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(directory / "notify"))
        files = [memfd(name.encode()) for name in names]
        high = [os.dup2(file, 200 + number) for number, file in enumerate(files)]  # away from their final numbers
        told = subprocess.check_output(
            [sys.executable, "-c", _AS_SYSTEMD, _DAEMON, pid, *map(str, high)],
            pass_fds=high,
            env={
                **os.environ,
                "NOTIFY_SOCKET": str(directory / "notify"),
                "FDSTORE": "100",
                "LISTEN_FDS": str(len(names)),
                "LISTEN_FDNAMES": ":".join(names),
            },
        )
        close_all([*files, *high])
        heard = []
        while select.select([notified], [], [], 0)[0]:
            heard.append(notified.recv(4096).decode())
        return heard, json.loads(told)


def test_a_daemon_inherits_what_systemd_kept(directory: Path) -> None:
    """systemd restarts it with five files: four belong to the daemon, and the unknown fifth is closed and dropped."""
    names = ["segment.1.a", "segment.1.b", "driver.watch", "process.2", "stored"]
    heard, found = started(directory, names)
    assert found == {
        "segments": {"1": {"10": "segment.1.a", "11": "segment.1.b"}},
        "processes": [2],
        "driver": {"watch": "driver.watch"},
        "inheritable": [],
        "closed": True,
        "environment": [],
    }
    assert heard == ["FDSTOREREMOVE=1\nFDNAME=stored"]


def test_a_descendant_of_a_daemon_inherits_nothing(directory: Path) -> None:
    """LISTEN_PID names one process: a child that finds these variables must not touch the descriptors."""
    heard, found = started(directory, ["segment.1.a"], pid="1")
    assert found["segments"] == {}
    assert found["environment"] == []
    assert heard == []


@pytest.mark.parametrize(
    ("environment", "configured", "available"),
    [
        ({}, 0, False),
        ({}, 512, False),
        ({"NOTIFY_SOCKET": "/run/systemd/notify"}, 0, False),
        ({"NOTIFY_SOCKET": "/run/systemd/notify"}, 512, True),
        ({"NOTIFY_SOCKET": "/run/systemd/notify", "FDSTORE": "512"}, 0, True),
        ({"NOTIFY_SOCKET": "/run/systemd/notify", "FDSTORE": "0"}, 512, False),
        ({"FDSTORE": "512"}, 0, False),
    ],
)
def test_systemd_or_the_configuration_says_how_many_are_kept(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], configured: int, available: bool
) -> None:
    """systemd says so from version 254 on; before that, the configuration does.

    A container's notify socket is no store.
    """
    for key in ("NOTIFY_SOCKET", "FDSTORE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert systemd_available(configured) is available
