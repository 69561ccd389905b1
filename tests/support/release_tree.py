"""A repository of a test's own whose commit can be released."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tools import release

VERSION = str(release.project()["version"])


def git(tree: Path, *arguments: str) -> str:
    """Run git in a repository that may belong to another user, and return what it says."""
    settings = ("-c", "safe.directory=*", "-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    return subprocess.run(
        ["git", *settings, *arguments], cwd=tree, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def change(tree: Path, name: str, pattern: str, new: str) -> None:
    """Replace a pattern in a file of the tree, which must have it."""
    text, count = re.subn(pattern, new, (tree / name).read_text())
    assert count
    (tree / name).write_text(text)


def make_ready(tree: Path) -> None:
    """Give the files a section of the change log and a home, and commit them as a repository."""
    change(tree, "CHANGELOG.md", r"## \[Unreleased\]\n", f"## [Unreleased]\n\n## [{VERSION}] - 2026-11-23\n")
    change(tree, "pyproject.toml", r"(?s)(\[project\.urls\]\n).*?\n\n", r'\1Homepage = "https://example.org"\n\n')
    git(tree, "init", "--quiet")
    commit(tree)


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message=release: all of it")
