"""The commit in what is built: of a checkout, of an archive of it, and where there is no git."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from membroker.wire import build

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The build's hook; hatchling itself is only where something is built."""
    monkeypatch.delenv("MEMBROKER_COMMIT", raising=False)
    name = "hatchling.builders.hooks.plugin.interface"
    for number in range(1, name.count(".") + 2):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:number]), ModuleType(name))
    sys.modules[name].BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.syspath_prepend(str(ROOT))
    import hatch_build  # type: ignore[import-not-found]

    yield hatch_build
    del sys.modules["hatch_build"]


def added(hook: Any, root: Path, target: str = "wheel", version: str = "standard") -> dict[str, str]:
    """Return the files that a build of this tree adds, with their text."""
    made, data = hook.CommitHook(), {"force_include": {}}
    made.root, made.target_name = str(root), target
    made.initialize(version, data)
    found = {place: Path(path).read_text() for path, place in data["force_include"].items()}
    made.finalize(version, data, "")
    assert not any(Path(path).exists() for path in data["force_include"])
    return found


def git(tree: Path, *words: str) -> str:
    command = ["git", "-C", str(tree), "-c", "user.name=x", "-c", "user.email=x@example.org", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_checkout_says_its_commit_and_whether_it_was_changed(hook: Any, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "x")
    git(tmp_path, "tag", "-a", "v1.0", "-m", "x")
    commit = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert added(hook, tmp_path) == {"membroker/commit.txt": f"{commit}\n"}
    assert added(hook, tmp_path, "sdist") == {"client/membroker/commit.txt": f"{commit}\n"}
    assert added(hook, tmp_path, version="editable") == {}, "its commit changes"
    (tmp_path / "file").write_text("two")
    assert added(hook, tmp_path) == {"membroker/commit.txt": f"{commit}-dirty\n"}


def test_an_archive_keeps_its_own_and_a_container_is_told(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree in a directory of another repository has not that one's commit."""
    assert added(hook, tmp_path) == {}
    monkeypatch.setenv("MEMBROKER_COMMIT", "1a2b3c")
    assert added(hook, tmp_path) == {"membroker/commit.txt": "1a2b3c\n"}
    (tmp_path / "client" / "membroker").mkdir(parents=True)
    (tmp_path / "client" / "membroker" / "commit.txt").write_text("archived\n")
    assert added(hook, tmp_path) == {}, "the archive's file is a file of the package"


def test_a_version_with_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_FILE", tmp_path / "commit.txt")
    assert build.version_text("0.1.0") == "0.1.0"
    (tmp_path / "commit.txt").write_text("1a2b3c4d5e6f\n")
    assert build.version_text("0.1.0") == "0.1.0 (1a2b3c4d5e6f)"
