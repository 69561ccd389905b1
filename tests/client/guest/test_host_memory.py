"""Host memory for the images of guests: what is free, and what those claim that fall asleep at the same time."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.sizes import MIB

from membroker.guest import host_memory
from membroker.guest.host_memory import claimed, of_groups
from membroker.guest.tree import start_of


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the claims, on a machine with 100 MiB."""
    monkeypatch.setattr(host_memory, "CLAIMS", tmp_path)
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 100 * MIB)
    return tmp_path / f"membroker-images-{os.geteuid()}"


def test_one_that_finds_too_little_beside_anothers_claim_waits_until_that_one_sleeps(file: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        file.write_text(f"{other.pid} {start_of(other.pid)} {60 * MIB}\n")
        with claimed(40 * MIB) as lacking:
            assert lacking == ""
        found: list[str] = []

        def sleep() -> None:
            with claimed(41 * MIB) as lacking:
                found.append(lacking)

        sleeper = threading.Thread(target=sleep)
        sleeper.start()
        until(lambda: sleeper.is_alive() and not found)
        other.communicate(b"", timeout=DEADLINE_SECONDS)
    sleeper.join()
    assert found == [""]
    assert not file.exists(), "the last one removes it"


def test_it_does_not_wait_forever_and_says_why(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CLAIM_SECONDS", 0.0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        file.write_text(f"{other.pid} {start_of(other.pid)} {60 * MIB}\n")
        with claimed(41 * MIB) as lacking:
            assert lacking == (
                "the machine has 100.0 MiB of memory free, and its image needs 41.0 MiB beside 60.0 MiB for images of "
                "others"
            )
        other.communicate(b"", timeout=DEADLINE_SECONDS)


def test_what_nobody_alive_claims_counts_for_nothing(file: Path) -> None:
    for text in ("", "1 1 1000000000\n", "\xff", "x\n1 2\n-1 3 9\n", "9" * 100_000):
        file.write_text(text, encoding="latin-1")
        with claimed(100 * MIB) as lacking:
            assert lacking == ""


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
