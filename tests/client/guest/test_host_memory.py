"""How much host memory an image may take, where control groups have limits."""

from __future__ import annotations

from pathlib import Path

from tests.support.sizes import MIB

from membroker.guest.host_memory import free_bytes, of_groups


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


def test_this_machine_has_some() -> None:
    free = free_bytes()
    assert free is None or free > 0
