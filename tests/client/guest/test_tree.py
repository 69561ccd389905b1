"""The processes of a guest, and its warden: real ones, children of this test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.garbage import without_collections
from tests.support.processes import descriptors, descriptors_limited
from tests.support.workers import is_gone

from membroker.guest import warden
from membroker.guest.tree import ProcessTree, open_process, send, start_of
from membroker.guest.warden import VARIABLE, Warden

PIPE_BYTES = 1 << 16
PARENT = "import subprocess; child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); child.wait()"


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process and its child."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        yield parent.pid, child
        subprocess.run(["kill", str(child)], check=True)


def test_all_descendants_belong_to_it_but_what_is_left_out_and_what_is_gone(family: tuple[int, int]) -> None:
    tree = ProcessTree(list)
    assert set(family) <= set(tree.pids())
    assert not set(family) & set(ProcessTree(list, besides=[family[0]]).pids())
    assert tree.start_of(family[0]) != ""
    assert tree.start_of(0) == ""


def test_one_that_once_had_a_session_is_never_suspended_any_more(family: tuple[int, int]) -> None:
    sessions = [family[1], 1]
    tree = ProcessTree(lambda: sessions)
    assert tree.why_not(family[1]) == ""
    tree.look_at_sessions()
    sessions.clear()
    tree.look_at_sessions()
    assert tree.why_not(family[1]) == f"process {family[1]} has used memory of a broker, and would die of it"
    assert tree.why_not(family[0]) == ""


IMPORTING = """
import os, sys
from membroker import vmm
driver = vmm.open_driver("host")
(descriptor,) = driver.lend(driver.device.granularity, 1, vmm.Location.DEVICE)
print(os.getpid(), flush=True)
sys.stdin.readline()
if sys.argv[1] == "map":
    address = driver.reserve(driver.device.granularity)
    driver.map_descriptors(address, [descriptor], driver.device.granularity)
else:
    driver.release(driver.import_extent(descriptor, driver.device.granularity))
os.close(descriptor)
driver.close()
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["map", "import"])
def test_one_that_ever_imported_memory_is_never_suspended_also_without_a_session(how: str) -> None:
    """It has released all, and nobody knows of which broker it was: CUDA's driver would kill it."""
    command = [sys.executable, "-c", IMPORTING, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert ProcessTree(list).why_not(pid) == "", "what it has made itself does no harm"
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        assert ProcessTree(list).why_not(pid) == f"process {pid} has used memory of a broker, and would die of it"


def test_one_that_cannot_be_looked_at_is_not_taken_for_gone(family: tuple[int, int]) -> None:
    """A program would be left asleep, because its processes seem to have ended."""
    tree = ProcessTree(list)
    descriptors()  # what an earlier test has left would make room later
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = [os.open("/dev/null", os.O_RDONLY)]
    while fillers[-1] < highest:
        fillers.append(os.open("/dev/null", os.O_RDONLY))
    with without_collections(), descriptors_limited(fillers[-1] + 1):
        for look in (tree.pids, lambda: tree.start_of(family[0]), lambda: tree.why_not(family[0])):
            with pytest.raises(OSError, match="Too many open files"):
                look()
    for file in fillers:
        os.close(file)


def test_a_process_that_got_the_pid_of_another_one_is_not_killed(family: tuple[int, int]) -> None:
    send(signal.SIGKILL, family[1], "1")
    assert open_process(family[1], "1") is None
    file = open_process(family[1], start_of(family[1]))
    assert file is not None
    os.close(file)


# The warden


def test_what_it_watches_ends_with_it_and_the_children_that_nobody_has_named() -> None:
    watching = Warden()
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        watching.watch([parent.pid])
        watching.close()
        assert parent.wait(DEADLINE_SECONDS) == -9
        until(lambda: is_gone(child))


def test_what_nobody_has_named_and_has_lost_its_parents_ends_too() -> None:
    """A program has left it behind since the last look: it is found by a variable, as long as it keeps that."""
    watching = Warden()
    script = "setsid sleep 1000 >/dev/null & echo $!; env - setsid sleep 1000 >/dev/null & echo $!"
    environment = {**os.environ, VARIABLE: watching.mark}
    left = subprocess.run(["sh", "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    marked, unmarked = map(int, left.stdout.split())
    for pid in (marked, unmarked):  # before it is what it is to be, a process may have no environment, or the shell's
        until(lambda pid=pid: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0"))
    assert VARIABLE.encode() not in Path(f"/proc/{unmarked}/environ").read_bytes()
    watching.close()
    until(lambda: is_gone(marked))
    assert not is_gone(unmarked)
    os.kill(unmarked, signal.SIGKILL)


def test_a_stopped_one_keeps_nobody_waiting_and_ends_what_it_watches() -> None:
    watching = Warden()
    os.kill(watching.pid, signal.SIGSTOP)
    with subprocess.Popen(["sleep", "1000"]) as last:
        watching.watch([last.pid])
        for _ in range(PIPE_BYTES // len(f"{last.pid} 1\n")):
            watching.watch([])
            watching.watch([last.pid])
        watching.close()
        assert last.wait(DEADLINE_SECONDS) == -9


def test_a_process_that_got_the_pid_of_one_that_it_watches_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warden, "start_of", lambda pid: "1")
    watching = Warden()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        watching.watch([other.pid])
        watching.close()
        assert other.poll() is None
        other.communicate(b"", timeout=DEADLINE_SECONDS)
        assert other.returncode == 0
