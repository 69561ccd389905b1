"""The processes of a guest, and its warden: real ones, children of this test."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.daemons import until
from tests.support.sizes import MIB
from tests.support.workers import is_gone

from membroker.guest import warden
from membroker.guest.host_memory import of_groups
from membroker.guest.tree import ProcessTree, kill, open_process, start_of
from membroker.guest.warden import Warden

PARENT = "import subprocess; child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); child.wait()"


@contextmanager
def descriptors_limited(most: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


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
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = [os.open("/dev/null", os.O_RDONLY)]
    while fillers[-1] < highest:
        fillers.append(os.open("/dev/null", os.O_RDONLY))
    with descriptors_limited(fillers[-1] + 1):
        for look in (tree.pids, lambda: tree.start_of(family[0]), lambda: tree.why_not(family[0])):
            with pytest.raises(OSError, match="Too many open files"):
                look()
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


# The warden


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
    with descriptors_limited(200):
        watching = Warden()
    for _ in range(300):
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as short:
            watching.watch([short.pid])
    with subprocess.Popen(["sleep", "1000"]) as last:
        watching.watch([last.pid])
        watching.close()
        assert last.wait(60) == -9


# Host memory for an image


def test_the_least_that_a_group_leaves_counts_and_memory_of_files_is_free(tmp_path: Path) -> None:
    """A program in a container, or a service with MemoryMax, is killed at its own limit."""
    own = tmp_path / "groups" / "slice" / "service"
    own.mkdir(parents=True)
    for path, limit, used in ((own.parent, str(100 * MIB), 90 * MIB), (own, str(80 * MIB), 60 * MIB)):
        (path / "memory.max").write_text(f"{limit}\n")
        (path / "memory.current").write_text(f"{used}\n")
    (own / "memory.stat").write_text(f"anon 1\ninactive_file {15 * MIB}\n")
    file = tmp_path / "cgroup"
    file.write_text("0::/slice/service\n")
    assert list(of_groups(tmp_path / "groups", file)) == [35 * MIB, 10 * MIB]
    (own / "memory.max").write_text("max\n")
    assert list(of_groups(tmp_path / "groups", file)) == [10 * MIB]
    assert list(of_groups(tmp_path / "groups", tmp_path / "none")) == []
