"""`membroker evict`, as an operator uses it: on a terminal, and in a script."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import pytest
from tests.support.command import COMMAND, good, refused
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.sizes import MIB
from tests.support.terminal import Terminal
from tests.support.workers import Worker, is_clean, worker


class Victim(NamedTuple):
    """A worker with a session at each of two tenants, by name: red's has 16 MiB, blue's 32."""

    worker: Worker
    red: str
    blue: str

    def lives(self) -> bool:
        """Say whether it still does what it is told."""
        return bytes(self.worker.ask("list(kept.view()[:4])")) == b"kept"


@pytest.fixture
def victim(daemon: Daemon) -> Iterator[Victim]:
    with worker() as one:
        one.connect(daemon)
        one.do("model = client.model('chat'); kept = model.allocate('16MiB'); kept.view()[:4] = b'kept'")
        one.do(f"other = membroker.connect({str(daemon.endpoint('blue'))!r})")
        one.do("held = other.model('Qwen/Qwen3-8B').allocate('32MiB')")
        yield Victim(one, one.ask("client.session"), one.ask("other.session"))


def answer(daemon: Daemon, name: str, typed: str) -> tuple[int, str]:
    """Run the command on a terminal, and type an answer; return its status, and what the terminal shows."""
    command = [*COMMAND, "evict", name, "--endpoint", str(daemon.admin)]
    with closing(Terminal(command, os.environ)) as terminal:
        until(lambda: b"[y/N]" in terminal.output)
        terminal.press(typed)
        return terminal.wait(DEADLINE_SECONDS), terminal.output.decode()


def test_only_yes_ends_a_process(daemon: Daemon, victim: Victim) -> None:
    """The operator sees that it serves another tenant, too, and thinks better of it. Then it is ended all the same."""
    pid = victim.worker.pid
    for typed in ("\n", "maybe\n", "\x04"):
        status, shown = answer(daemon, victim.red, typed)
        assert status == 1, typed
        assert f"process {pid} of blue and red would be ended, with all its sessions:" in shown
        listed = ((victim.red, ("red", "16.0 MiB", "chat")), (victim.blue, ("blue", "32.0 MiB", "Qwen/Qwen3-8B")))
        for name, figures in listed:
            (line,) = [line for line in shown.splitlines() if name.removeprefix("sessions/") in line]
            assert all(figure in line for figure in figures)
        assert victim.lives()
    assert refused("evict", victim.red, at=daemon.admin, status=2).endswith(": give --yes"), "nobody could be asked"
    assert "sessions/1 cannot be evicted: it is not known" in refused("evict", "sessions/1", "--yes", at=daemon.admin)
    assert victim.lives()
    assert "evicts" not in daemon.log()
    status, out = answer(daemon, victim.blue, "y\n")
    assert status == 0
    assert f"process {pid} of blue and red was sent SIGTERM" in out
    assert victim.worker.process.wait(DEADLINE_SECONDS) == -signal.SIGTERM
    until(lambda: is_clean(daemon))


def test_a_script_that_says_yes(daemon: Daemon, victim: Victim) -> None:
    """Another process is not listed, and not ended."""
    with worker() as bystander:
        bystander.connect(daemon, "blue").do("kept = client.model('search').allocate('2MiB')")
        told = json.loads(good("evict", victim.red.removeprefix("sessions/"), "--yes", "--json", at=daemon.admin))
        assert told["session"]["name"] == victim.red
        sessions = [(one["name"], one["tenant"], one["books"]["device"]["used_bytes"]) for one in told["sessions"]]
        assert sessions == [(victim.red, "tenants/red", 16 * MIB), (victim.blue, "tenants/blue", 32 * MIB)]
        assert victim.worker.process.wait(DEADLINE_SECONDS) == -signal.SIGTERM
        bystander.do("client.model('search').allocate('2MiB').close()")
