"""Notifications to systemd, or to `membrokerd --all`, over real sockets: what a peer that does not read may hold up."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest
from tests.support.daemons import DEADLINE_SECONDS

from membrokerd.system.sd_notify import BEAT_SECONDS, Heartbeat, notify


class FakeTimers:
    """An event loop that only notes what is to be called later."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, beat: Callable[[], None]) -> None:
        self.timers.append((seconds, beat))


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What systemd listens at. It watches this process, which beats a thousand times a second."""
    with (
        tempfile.TemporaryDirectory(prefix="mb-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one,
    ):
        one.bind(f"{directory}/notify")
        monkeypatch.setenv("NOTIFY_SOCKET", f"{directory}/notify")
        monkeypatch.setenv("WATCHDOG_USEC", "2000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        yield one


def fill(address: str) -> None:
    """Send until the peer has no room for another message."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(BlockingIOError):
        while True:
            sender.sendto(b"WATCHDOG=1", socket.MSG_DONTWAIT, address)


def test_a_stopped_peer_does_not_stop_the_event_loop(peer: socket.socket, tmp_path: Path) -> None:
    """`membrokerd --all` is stopped (SIGSTOP, or it hangs), and reads nothing: its daemons must go on lending."""
    fill(peer.getsockname())

    async def turn() -> None:
        Heartbeat(asyncio.get_running_loop(), tmp_path)
        notify("STATUS=full")
        await asyncio.sleep(0.02)  # some beats
        notify("STOPPING=1")

    thread = threading.Thread(target=asyncio.run, args=(turn(),), daemon=True)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    held_up = thread.is_alive()
    peer.close()  # or the thread would live as long as the tests
    assert not held_up


def test_a_watchdog_of_no_time_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's environment says WATCHDOG_USEC=0. The event loop must not do nothing but beat."""
    monkeypatch.setenv("WATCHDOG_USEC", "0")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    loop = FakeTimers()
    Heartbeat(cast(asyncio.AbstractEventLoop, loop), tmp_path)
    assert [seconds for seconds, _ in loop.timers] == [BEAT_SECONDS]


def test_each_beat_touches_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where it cannot, the loop goes on, and the log says so once; and once more if it fails again later."""
    directory = tmp_path / "state"
    directory.mkdir()
    file, loop = directory / "alive", FakeTimers()
    Heartbeat(cast(asyncio.AbstractEventLoop, loop), directory)

    def seen() -> tuple[bool, int]:
        """Return whether a beat has touched the file, and how many warnings there were."""
        if file.exists():
            os.utime(file, (0, 0))
        loop.timers[-1][1]()
        return file.exists() and file.stat().st_mtime > 0, len(caplog.records)

    assert seen() == (True, 0)
    file.unlink()
    directory.rename(tmp_path / "moved")
    assert [seen(), seen()] == [(False, 1), (False, 1)]
    directory.mkdir()
    assert seen() == (True, 1)
    file.unlink()
    directory.rmdir()
    assert seen() == (False, 2)


def test_ready_is_never_lost(peer: socket.socket) -> None:
    """It waits until the peer reads: without it the start of the service would fail."""
    fill(peer.getsockname())
    thread = threading.Thread(target=notify, args=("READY=1\nSTATUS=lending",), daemon=True)
    thread.start()
    while b"READY=1" not in (said := peer.recv(4096)):
        assert said == b"WATCHDOG=1"
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
