"""Assemble the pages of the documentation site in .site/pages: `python -m tools.site`.

docs/ is the top of the site, and the pages of EXTRA keep their path in the repository. A link to a page is rewritten to
its place in the site. A link to any other file leads to the repository, if pyproject.toml has its URL, else it becomes
the file's path in code. What comes out is plain Markdown, so that no generator needs a plugin for it: mkdocs.yml makes
the site. A link that leads nowhere stays as it is, and fails the strict build.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
PAGES = ROOT / ".site" / "pages"
EXTRA = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/RESULTS.md",
    "deploy/README.md",
    "examples/c/README.md",
    "tests/README.md",
)
STYLE = "docs/site.css"
FENCE = re.compile(r"^([ ]*)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
RUN = re.compile(r"^(```python) run\b.*$", re.MULTILINE)
"""How a block is marked that tests/docs runs: Python-Markdown takes one word there."""


def sources() -> list[str]:
    """Return the pages of the site, by their paths in the repository."""
    return [*sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")), *EXTRA]


def place(path: str) -> str:
    """Return where a file of the repository is in the site."""
    return "overview.md" if path == "README.md" else path.removeprefix("docs/")


def repository() -> str:
    """Return the URL below which the repository's host shows files, or nothing if there is no such host."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    url = str(project.get("urls", {}).get("Repository", ""))
    return f"{url.removesuffix('.git').removesuffix('/')}/blob/main/" if url else ""


def assembled(text: str, path: str, pages: set[str], host: str) -> str:
    """Return the text of a page as the site needs it."""
    parts = []
    end = 0
    for fence in FENCE.finditer(text):
        parts += [_linked(text[end : fence.start()], path, pages, host), RUN.sub(r"\1", fence[0])]
        end = fence.end()
    return "".join([*parts, _linked(text[end:], path, pages, host)])


def _linked(text: str, path: str, pages: set[str], host: str) -> str:
    return LINK.sub(lambda link: _link(link, path, pages, host), text)


def _link(link: re.Match[str], path: str, pages: set[str], host: str) -> str:
    image, words, whole = link.groups()
    target, anchor = re.fullmatch(r"([^#]*)(#.*)?", whole).groups()  # type: ignore[union-attr]
    if not target or re.match(r"[a-z]+:", target):
        return link[0]
    found = os.path.normpath(PurePosixPath(path).parent / target)
    if found in pages or (image and (ROOT / found).is_file()):
        to = os.path.relpath(place(found), PurePosixPath(place(path)).parent)
        return f"{image}[{words}]({to}{anchor or ''})"
    if not (ROOT / found).exists():
        return link[0]
    if host:
        return f"[{words}]({host}{found}{anchor or ''})"
    bare = words.strip("`")
    return f"`{found}`" if found.endswith(bare.removesuffix("/")) else f"{words} (`{found}`)"


def images(text: str, path: str) -> Iterator[str]:
    """Yield the images of a page, by their paths in the repository."""
    for image, _, target in LINK.findall(FENCE.sub("", text)):
        if image and not re.match(r"[a-z]+:", target):
            yield os.path.normpath(PurePosixPath(path).parent / target)


def main() -> int:
    """Write all pages, their images and their style, into an empty directory."""
    shutil.rmtree(PAGES, ignore_errors=True)
    pages, host = set(sources()), repository()
    for path in sorted(pages):
        text = (ROOT / path).read_text()
        target = PAGES / place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(assembled(text, path, pages, host))
        for image in images(text, path):
            (PAGES / place(image)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / image, PAGES / place(image))
    shutil.copyfile(ROOT / STYLE, PAGES / place(STYLE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
