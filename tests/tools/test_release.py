"""What keeps a tree from being released. tests/system/test_release.py makes a release."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("file", "was", "now", "says"),
    [
        (
            "deploy/helm/membroker/Chart.yaml",
            f"appVersion: {VERSION}",
            "appVersion: 0.0.9",
            f"Chart.yaml has 0.0.9, {VERSION}, and pyproject.toml {VERSION}",
        ),
        (
            "CHANGELOG.md",
            rf"\[{VERSION}\] - 2026",
            "[0.0.9] - 2026",
            f"CHANGELOG.md has no section `## [{VERSION}] - YYYY-MM-DD`",
        ),
        (
            "pyproject.toml",
            "https://example.org",
            "https://membroker.example",
            "placeholders (https://membroker.example)",
        ),
    ],
    ids=["chart", "change log", "home"],
)
def test_what_is_missing_is_one_sentence(tree: Path, file: str, was: str, now: str, says: str) -> None:
    change(tree, file, was, now)
    commit(tree)
    (problem,) = release.problems(tree)
    assert says in problem


def test_what_is_not_committed_or_has_the_tag_already_is_not_released(tree: Path) -> None:
    (tree / "forgotten.py").touch()
    (problem,) = release.problems(tree)
    assert "the tree has changes that are not committed, such as forgotten.py" in problem
    git(tree, "tag", "--annotate", "--message=it", f"v{VERSION}")
    commit(tree)
    (problem,) = release.problems(tree)
    assert f"the tag v{VERSION} is on another commit" in problem


def test_without_a_builder_the_tool_says_what_to_install(tmp_path: Path) -> None:
    """Before anything is built."""
    command = [sys.executable, "-m", "tools.release", "--rehearsal"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=release.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "an image takes buildah or podman: apt-get install buildah\n"
