"""Whose a path is: every part of it counts, links too, and a number that stands for many users is nobody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from membroker.wire import ownership
from membroker.wire.ownership import stranger_in

STRANGER = 60_001


def test_a_path_of_ours_has_no_stranger(tmp_path: Path) -> None:
    """Also one that does not exist yet, one behind a link of ours, and one below a directory like /tmp."""
    assert stranger_in(tmp_path) == ""
    assert stranger_in(tmp_path / "later" / "state") == ""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "link").symlink_to(Path("shared", "..", "shared"))
    assert stranger_in(tmp_path / "link" / "later") == ""
    assert stranger_in(shared) == ""
    assert stranger_in(shared, alone=True) == f"{shared} can be changed by other users, as its mode is 1777"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_directory_that_others_may_write_is_named(tmp_path: Path, mode: int) -> None:
    """Whether it is the last part or one above it, and also where only a link leads into it."""
    opened = tmp_path / "opened"
    inner = opened / "inner"
    inner.mkdir(parents=True)
    opened.chmod(mode)
    (tmp_path / "link").symlink_to(inner)
    said = f"{opened} can be changed by other users, as its mode is {mode:04o}"
    for path in (opened, inner, inner / "later", tmp_path / "link", tmp_path / "link" / "file"):
        assert stranger_in(path) == said, path


def test_a_link_to_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert stranger_in(tmp_path / "a").endswith("leads to itself")


@pytest.mark.root
@pytest.mark.parametrize("part", ["", "state", "link", "link/file"])
def test_what_belongs_to_another_user_is_named(tmp_path: Path, part: str) -> None:
    """The directory, one above it, a link in a directory like /tmp, and the file that a link of ours leads to."""
    theirs = tmp_path / "theirs"
    (theirs / "state").mkdir(parents=True)
    (theirs / "state" / "file").touch()
    (theirs / "link").symlink_to("state")
    owned = theirs / part
    os.chown(owned, STRANGER, STRANGER, follow_symlinks=False)
    where = theirs / "state" / "file" if part == "link/file" else owned
    assert stranger_in(theirs / "link" / "file") == f"{where} belongs to uid {STRANGER}"


def _proc(directory: Path, rows: str) -> Path:
    """Make what the kernel says of a user namespace."""
    for name, text in (("self/uid_map", rows), ("sys/kernel/overflowuid", "65534\n")):
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        ("         0          0 4294967295\n", None),
        ("0 0 1000\n1000 1000 4294966295\n", None),
        ("         0       1000          1\n", 65_534),
        ("0 100000 65536\n", 65_534),
        ("", 65_534),
    ],
    ids=["the first namespace", "all in two rows", "unshare -Ur", "a rootless container", "nothing yet"],
)
def test_which_number_stands_for_many_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, number: int | None
) -> None:
    """In a rootless container 65534 is mapped, and stands for everybody outside nevertheless."""
    monkeypatch.setattr(os, "geteuid", lambda: 1_000)  # nobody's is 65534 itself
    monkeypatch.setattr(ownership, "_PROC", _proc(tmp_path, rows))
    assert ownership.overflow_id("uid") == number
    assert ownership.is_mapped("uid", 65_534) == (number is None)
    assert ownership.is_mapped("uid", 0) == bool(rows)
    assert ownership.is_ours(1_000)
    assert not ownership.is_ours(65_534)


def test_a_file_of_the_outside_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `unshare -Ur` the root directory belongs to 65534: that may stand above a path, and not at its end."""
    monkeypatch.setattr(ownership, "_PROC", _proc(tmp_path / "proc", "0 1000 1\n"))
    found, lstat, own = tmp_path / "theirs", os.lstat, os.geteuid()

    def outside(path: Path) -> os.stat_result:
        status = list(lstat(path))
        status[4] = 65_534 if path == found else 1_000 if status[4] == own else status[4]
        return os.stat_result(status)

    (found / "state").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 1_000)  # nobody's is 65534 itself
    monkeypatch.setattr(os, "lstat", outside)
    assert stranger_in(found / "state") == ""
    assert "belongs to" in stranger_in(found)
