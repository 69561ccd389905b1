"""The processes of a guest: real ones, children of this test."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.workers import is_gone

from membroker.guest.tree import ProcessTree, kill, open_process, start_of

PARENT = (
    "import subprocess, sys; child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); child.wait()"
)


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process and its child."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        yield parent.pid, child
        subprocess.run(["kill", str(child)], check=True)


def test_all_descendants_belong_to_it_and_what_is_left_out_does_not(family: tuple[int, int]) -> None:
    assert set(family) <= set(ProcessTree(list).pids())
    assert not set(family) & set(ProcessTree(list, besides=[family[0]]).pids())


def test_one_that_once_had_a_session_is_never_suspended_any_more(family: tuple[int, int]) -> None:
    sessions = [family[1], 1]
    tree = ProcessTree(lambda: sessions)
    assert tree.why_not(family[1]) == ""
    tree.look_at_sessions()
    sessions.clear()
    tree.look_at_sessions()
    assert tree.why_not(family[1]) == f"process {family[1]} has used memory of a broker, and would die of it"
    assert tree.why_not(family[0]) == ""


def test_one_that_is_gone_has_no_start(family: tuple[int, int]) -> None:
    tree = ProcessTree(list)
    assert tree.start_of(family[0]) != ""
    assert tree.start_of(0) == ""


def test_one_that_cannot_be_looked_at_is_not_taken_for_gone(family: tuple[int, int]) -> None:
    """A program would be left asleep, because its processes seem to have ended."""
    tree = ProcessTree(list)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = [os.open("/dev/null", os.O_RDONLY)]
    while fillers[-1] < highest:
        fillers.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1, hard))
    try:
        for look in (tree.pids, lambda: tree.start_of(family[0]), lambda: tree.why_not(family[0])):
            with pytest.raises(OSError, match="Too many open files"):
                look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in fillers:
            os.close(file)


def test_a_process_that_got_the_pid_of_another_one_is_not_killed(family: tuple[int, int]) -> None:
    kill(family[1], "1")
    assert open_process(family[1], "1") is None
    file = open_process(family[1], start_of(family[1]))
    assert file is not None
    os.close(file)


ENDING = """
import signal, subprocess, sys
from membroker.guest.tree import ProcessTree, adopt_orphans
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
adopt_orphans()
script = "(setsid sleep 1000 & echo $!; (sleep 1000 & echo $!) & )"
with open(sys.argv[1], "w") as said:
    subprocess.run(["sh", "-c", script], stdout=said)
tree = ProcessTree(list)
while len(open(sys.argv[1]).read().split()) < 2 or len(tree.pids()) < 2:
    pass
tree.end()
assert tree.pids() == []
"""


def test_all_are_ended_that_a_program_has_left_behind() -> None:
    """One has a session of its own, and one lost both its parents."""
    with tempfile.NamedTemporaryFile() as said:
        subprocess.run([sys.executable, "-c", ENDING, said.name], check=True, timeout=60)
        pids = list(map(int, Path(said.name).read_text().split()))
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)
