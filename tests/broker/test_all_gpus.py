"""When the parent of `membrokerd --all` kills a daemon that says nothing. It counts its looks, and reads no clock."""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.broker.coroutines import played_by

from membrokerd import all_gpus

LOOKS = int(all_gpus.SILENT_SECONDS / all_gpus.WATCH_SECONDS)


class OneDaemon(all_gpus._Child):
    """The daemon of one device, whose process is the test's to play."""

    def __init__(self, directory: Path) -> None:
        place = SimpleNamespace(private=lambda kind: directory / kind)
        super().__init__("host", ["no such program"], place, asyncio.Event(), lambda: None)  # type: ignore[arg-type]
        self.sent: list[signal.Signals] = []

    def send(self, number: signal.Signals) -> None:
        self.sent.append(number)

    def say(self, text: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as its:
            its.sendto(text.encode(), str(self._address))
        self._read_notice()

    def look(self, times: int) -> None:
        for _ in range(times):
            self.kill_if_silent()


def play(story: Callable[[OneDaemon], None]) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="mb-") as directory:
            one = OneDaemon(Path(directory))
            try:
                story(one)
            finally:
                one.close()

    asyncio.run(run())


@played_by(play)
def test_a_daemon_that_says_nothing_is_killed_once(one: OneDaemon) -> None:
    """A word of it begins the count again. It is killed again only after the same silence."""
    one.say("READY=1")
    one.look(LOOKS)
    one.say("WATCHDOG=1")
    one.look(LOOKS)
    assert one.sent == []
    one.look(1)
    assert one.sent == [signal.SIGKILL]
    one.look(LOOKS)
    assert one.sent == [signal.SIGKILL]


@played_by(play)
def test_one_that_starts_may_take_as_long_as_it_needs(one: OneDaemon) -> None:
    one.look(10 * LOOKS)
    assert one.sent == []


@played_by(play)
def test_a_machine_that_was_frozen_loses_no_daemon(one: OneDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker pause`: no look was made meanwhile, whatever the clock says."""
    one.say("READY=1")
    one.look(1)
    monkeypatch.setattr(all_gpus.time, "monotonic", lambda: 1e9)
    one.look(1)
    assert one.sent == []


@played_by(play)
def test_a_daemon_is_not_blamed_for_a_socket_that_was_removed(one: OneDaemon) -> None:
    """Somebody tidies up the runtime directory. A daemon whose word does not arrive is not a daemon that hangs."""
    one.say("READY=1")
    one.look(LOOKS)
    one._address.unlink()
    one.look(1 + LOOKS)
    assert one.sent == []
    one.say("WATCHDOG=1")
    assert one._silent_seconds == 0.0
