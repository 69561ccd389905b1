"""The processes of a guest: real ones, children of this test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from membroker.guest.tree import ProcessTree

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
