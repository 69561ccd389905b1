"""The warden of a guest, with real processes."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from tests.support.daemons import until
from tests.support.workers import is_gone

from membroker.guest import warden
from membroker.guest.warden import Warden

PARENT = "import subprocess; child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); child.wait()"


def test_what_it_watches_ends_with_it_and_the_children_that_nobody_has_named() -> None:
    watching = Warden()
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        watching.watch([parent.pid])
        watching.close()
        assert parent.wait(60) == -9
        until(lambda: is_gone(child))


def test_a_process_that_got_the_pid_of_one_that_it_watches_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warden, "start_of", lambda pid: "1")
    watching = Warden()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        watching.watch([other.pid])
        watching.close()
        assert other.poll() is None
        other.communicate(b"", timeout=60)
        assert other.returncode == 0


def test_thousands_of_short_processes_leave_it_descriptors_for_the_next_one() -> None:
    """A program that compiles, or calls nvidia-smi every second."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        watching = Warden()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for _ in range(300):
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as short:
            watching.watch([short.pid])
    with subprocess.Popen(["sleep", "1000"]) as last:
        watching.watch([last.pid])
        watching.close()
        assert last.wait(60) == -9
