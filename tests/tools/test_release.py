"""What keeps a tree from being released. tests/system/test_release.py makes a release."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.release_tree import VERSION, change, commit, git, make_ready
from tools import release


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A commit that can be released: a home of its own, and a section of the change log."""
    for name in ("pyproject.toml", "CHANGELOG.md", *release.VERSIONED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(release.ROOT / name, tmp_path / name)
    make_ready(tmp_path)
    return tmp_path


def test_the_version_is_the_same_everywhere() -> None:
    """In what `--version`, /metrics and Welcome tell, and in every image that a manifest or a page names."""
    assert list(release.wrong_versions(release.ROOT)) == []


def test_a_commit_that_is_ready_has_no_problem_and_may_be_released_again(tree: Path) -> None:
    assert list(release.problems(tree)) == []
    git(tree, "tag", "--annotate", "--message=it", f"v{VERSION}")
    assert list(release.problems(tree)) == []


def forget_chart(tree: Path) -> None:
    change(tree, "deploy/helm/membroker/Chart.yaml", f"appVersion: {VERSION}", "appVersion: 0.0.9")
    commit(tree)


def forget_change_log(tree: Path) -> None:
    change(tree, "CHANGELOG.md", rf"\[{VERSION}\] - 2026", "[0.0.9] - 2026")
    commit(tree)


def forget_home(tree: Path) -> None:
    change(tree, "pyproject.toml", "https://example.org", "https://membroker.example")
    commit(tree)


def forget_file(tree: Path) -> None:
    (tree / "forgotten.py").touch()


def release_twice(tree: Path) -> None:
    git(tree, "tag", "--annotate", "--message=it", f"v{VERSION}")
    change(tree, "CHANGELOG.md", "Unreleased", "Unreleased soon")
    commit(tree)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (forget_chart, f"Chart.yaml has 0.0.9, {VERSION}, and pyproject.toml {VERSION}"),
        (forget_change_log, f"CHANGELOG.md has no section `## [{VERSION}] - YYYY-MM-DD`"),
        (forget_home, "placeholders (https://membroker.example)"),
        (forget_file, "the tree has changes that are not committed, such as forgotten.py"),
        (release_twice, f"the tag v{VERSION} is on another commit"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_missing_is_one_sentence(tree: Path, spoil: Callable[[Path], None], says: str) -> None:
    spoil(tree)
    (problem,) = release.problems(tree)
    assert says in problem


def test_without_a_builder_the_tool_says_what_to_install(tmp_path: Path) -> None:
    """Before anything is built."""
    command = [sys.executable, "-m", "tools.release", "--rehearsal"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=release.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "an image takes buildah or podman: apt-get install buildah\n"
