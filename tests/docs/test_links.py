"""Each link of the Markdown pages names a file of the repository that exists, and a heading in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts[:-1] if part != ".github")
)


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from a page's headings."""
    titles = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", LINK.sub("]", title).lower()).replace(" ", "-") for title in titles}


def broken(page: Path) -> Iterator[str]:
    """Yield the broken links of a page within the repository."""
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """A missing file and a missing heading are found. Links to other sites and in code blocks are ignored."""
    other = tmp_path / "other.md"
    other.write_text("# Other\n\n## One, two: [three](page.md)\n\n```\n# not a heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n[a](other.md) [b](other.md#one-two-three) [c](#page) [d](https://example.org/x)\n"
        "[e](gone.md) [f](other.md#not-a-heading)\n```\n[g](gone.md)\n```\n"
    )
    assert list(broken(page)) == ["gone.md", "other.md#not-a-heading"]
