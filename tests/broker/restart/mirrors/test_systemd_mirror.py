"""systemd as the second process with copies of descriptors."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.broker.coroutines import played_by
from tests.support.daemons import until_async
from tests.support.keepers import content_of, memfd
from tests.support.mirrors import end, keeping, keeping_not_long, play

from membroker.wire.descriptors import close_all
from membrokerd.restart import systemd as systemd_mirror
from membrokerd.restart.descriptor_store import Store, StoredDescriptors
from membrokerd.restart.systemd import SystemdMirror, open_systemd, systemd_available
from membrokerd.system.retry import IN_FLIGHT_SECONDS


class Systemd:
    """How systemd treats a service's messages: its descriptor store, as in service.c and manager.c."""

    mirror: SystemdMirror
    store: Store
    """The daemon's, which it copies here."""

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


def play_systemd(story: Callable[[Systemd], Awaitable[None]], maximum: int) -> None:
    """Run a coroutine as a daemon that systemd started."""

    async def main(directory: Path) -> None:
        systemd = Systemd(directory, maximum)
        systemd.work()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NOTIFY_SOCKET", str(directory / "notify"))
            patch.setenv("FDSTORE", str(maximum))
            assert systemd_available()
            systemd.mirror, kept = open_systemd()
            assert kept == StoredDescriptors()
            systemd.store = Store(systemd.mirror)
            await story(systemd)
            end(systemd.store)
            systemd.end()

    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        play(main(Path(directory)))


@played_by(play_systemd, maximum=100)
async def test_nothing_is_lent_before_systemd_has_it(systemd: Systemd) -> None:
    """systemd is busy: the store reports nothing until systemd has reached the barrier, and then in order."""
    systemd.rest()
    order: list[int] = []
    puts = []
    for segment in range(1, 4):
        put = keeping(systemd.store, segment, {extent: b"%d" % extent for extent in range(1, 31)})
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


@played_by(play_systemd, maximum=5)
async def test_barriers_count_in_the_order_of_the_puts(systemd: Systemd) -> None:
    """The loop was busy while three pipes were closed, and sees the last one first."""
    systemd.barriers = []
    order: list[int] = []
    for number in range(1, 4):
        watch = memfd(b"kept")
        systemd.mirror.put([(f"driver.{number}", watch)], lambda _, number=number: order.append(number))
        close_all([watch])
    await until_async(lambda: len(systemd.barriers or ()) == 3)
    close_all(reversed(systemd.barriers))
    await until_async(lambda: len(order) == 3)
    assert order == [1, 2, 3]


@played_by(play_systemd, maximum=2000)
async def test_too_many_descriptors_are_in_flight(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd was busy and reads again. Meanwhile this user's workers read nothing, and have what the kernel allows."""
    refusals = 0

    def refuse(*_: object) -> None:
        nonlocal refusals
        refusals += 1
        raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")

    systemd.rest()
    putting = keeping(systemd.store, 1, dict.fromkeys(range(1, 1001), b"kept"))
    assert systemd.mirror._unsent, "the socket has room for all of it"
    with monkeypatch.context() as patch:
        patch.setattr(systemd_mirror, "send", refuse)
        systemd.work()
        await until_async(lambda: refusals)
        await asyncio.sleep(4 * IN_FLIGHT_SECONDS)  # time for four more tries, if it waits between them
        assert refusals < 50, "it asks the kernel in every turn of the loop"
    await putting
    assert len(systemd.stored) == 1000
    await keeping(systemd.store, 2, {1: b"more"})


@played_by(play_systemd, maximum=5)
async def test_systemd_drops_what_is_dropped_or_replaced(systemd: Systemd) -> None:
    """systemd would keep both descriptors of one name, so the old one is removed first."""
    await keeping(systemd.store, 1, {1: b"goes", 2: b"stays"})
    for content in (b"old", b"new"):
        watch = memfd(content)
        systemd.mirror.put([("driver.watch", watch)], lambda error: None)
        close_all([watch])
    close_all(systemd.store.give_up(1, [1]))
    systemd.store.keep_process(5, systemd.store.lend(1, [2])[0])
    systemd.store.forget_process(5)
    systemd.store.forget_process(6)
    await keeping(systemd.store, 3, {3: b"later"})
    assert systemd.contents() == [("segment.1.2", b"stays"), ("driver.watch", b"new"), ("segment.3.3", b"later")]


@played_by(play_systemd, maximum=5)
async def test_systemds_maximum_is_respected(systemd: Systemd) -> None:
    """systemd would silently drop the sixth descriptor, and a segment would be lost at the next start."""
    await keeping(systemd.store, 1, dict.fromkeys(range(1, 5), b"kept"))
    said = list(systemd.said)
    with pytest.raises(OSError, match=r"4 descriptors .* 5: .*FileDescriptorStoreMax="):
        await keeping(systemd.store, 2, {1: b"one", 2: b"more"})
    assert systemd.said == said
    await keeping(systemd.store, 3, {1: b"the fifth"})
    close_all(systemd.store.give_up(1, [1, 2]))
    await keeping(systemd.store, 2, {1: b"one", 2: b"more"})
    assert len(systemd.stored) == len(systemd.store) == 5


@played_by(play_systemd, maximum=1000)
async def test_systemd_does_not_answer(systemd: Systemd) -> None:
    """A put fails in time. What systemd takes of it later is removed again."""
    systemd.rest()
    with pytest.raises(TimeoutError):
        await keeping_not_long(systemd.store, 1, dict.fromkeys(range(1, 1001), b"refused"))
    assert len(systemd.store) == 0
    systemd.work()
    await keeping(systemd.store, 2, {1: b"after"})
    assert systemd.contents() == [("segment.2.1", b"after")]


@played_by(play_systemd, maximum=5)
async def test_systemd_is_gone(systemd: Systemd) -> None:
    """systemd's socket is closed: puts fail with the kernel's error."""
    await keeping(systemd.store, 1, {1: b"stays"})
    systemd.end()
    with pytest.raises(ConnectionRefusedError):
        await keeping(systemd.store, 2, {2: b"refused"})
    assert len(systemd.store) == 1


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
