"""Each link of the Markdown pages names a file of the repository that exists, and a heading in it.

The tables of CONTRIBUTING.md and ARCHITECTURE.md lead to modules, and to names in them, that exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"`([\w./-]+/[\w.-]*)(?:::([\w.]+))?`")
"""A path in code, and with `::` what it defines: `path/module.py::Class.method`."""
WHERE = ("", "broker/membrokerd/", "client/membroker/")
"""Where a path of ARCHITECTURE.md may begin. CONTRIBUTING.md has whole paths."""
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


def stale(text: str, *roots: str) -> Iterator[str]:
    """Yield the paths in code that lead to no file below any of the roots, and the names that are not defined there."""
    for found in MODULE.finditer(text):
        path, name = found.groups()
        files = [file for root in roots if (file := ROOT / root / path).exists()]
        defined = r"^\s*(?:async def|def|class) {0}\b|^\s*{0}\b.* = |^\s*{0}: "
        if not files or any(
            not re.search(defined.format(part), files[0].read_text(), re.MULTILINE)
            for part in (name.split(".") if name else ())
        ):
            yield found[0].strip("`")


def test_the_tables_for_contributors_lead_to_the_code() -> None:
    """A newcomer follows each pointer: a module that has moved, or a method that has another name, is found out."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tables = text[text.index("## Where it is decided") : text.index("## Code")]
    assert list(stale(tables, "")) == []
    assert tables.count("::") > 20
    assert list(stale((ROOT / "ARCHITECTURE.md").read_text(), *WHERE)) == []
