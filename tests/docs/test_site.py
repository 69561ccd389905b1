"""The site: its pages are assembled from the repository, say what the code says, and a broken link fails the build."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tools import site

import membroker
from membroker import errors, types
from membroker.cli.main import _parser as client_parser
from membrokerd.core.denied import Reason

DOCS = site.ROOT / "docs"
REFUSAL = re.compile(r"^\| `([A-Z_]+)` \| `(\w+)` \| ([^|]+) \| `([^`]+)` \| ([^|]+) \|$", re.MULTILINE)
SYMBOL = re.compile(r"^::: (\S+)$", re.MULTILINE)
OTHER_COMMANDS = ("journalctl -u membrokerd", "systemctl status membrokerd", "df -h /run/membroker")


def test_every_refusal_has_its_exception_and_a_first_command() -> None:
    """A reason that is added gets a row in docs/troubleshooting.md. The command is one that there is."""
    rows = REFUSAL.findall((DOCS / "troubleshooting.md").read_text())
    assert sorted((reason, exception) for reason, exception, *_ in rows) == sorted(
        (reason.value, errors._CLASSES[reason.value].__name__) for reason in Reason
    )
    known = {"COMMAND", "--version", *client_parser()._subparsers._group_actions[0].choices}  # type: ignore[union-attr]
    for reason, _, meaning, command, then in rows:
        program, _, rest = command.partition(" ")
        assert meaning.strip(), reason
        assert then.strip(), reason
        assert command in OTHER_COMMANDS or program.startswith("print(error") or program == "membroker", reason
        assert program != "membroker" or rest.split()[0] in known, reason


def test_the_reference_has_every_public_name_once() -> None:
    """A name that becomes public gets a line in docs/api."""
    listed = [name for page in (DOCS / "api").glob("*.md") for name in SYMBOL.findall(page.read_text())]
    public = {f"membroker.{name}" for name in membroker.__all__ if name != "__version__"}
    for module in ("vmm", "managed", "kv", "testing"):
        public |= {f"membroker.{module}.{name}" for name in importlib.import_module(f"membroker.{module}").__all__}
    values = [name for name, kind in vars(types).items() if getattr(kind, "__module__", "") == types.__name__]
    public |= {f"membroker.types.{name}" for name in values if name not in membroker.__all__}
    assert sorted(listed) == sorted(set(listed))
    assert sorted(public - set(listed)) == []


@pytest.mark.parametrize("path", site.sources())
def test_lists_are_written_for_both_dialects(path: str) -> None:
    """Git hosts take a list right after a paragraph and two spaces for a list within one; Python-Markdown does not."""
    text = site.FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), (site.ROOT / path).read_text())
    lines = ["", *text.splitlines()]
    item = re.compile(r" *(?:- |\d+\. )")
    wrong = [
        f"{path}:{number}: {line}"
        for number, (before, line) in enumerate(pairwise(lines), 1)
        if re.match(r" {2,3}(?:- |\d+\. |\|)", line)
        or (item.match(line) and before and not item.match(before) and not before.startswith("  "))
    ]
    assert wrong == []


MKDOCS = re.findall(r"\$\(BIN\)/(mkdocs [\w -]*\w)", (site.ROOT / "Makefile").read_text())[0]
PAGES = {"README.md", "ARCHITECTURE.md", "docs/pools.md", "docs/api/client.md", "deploy/README.md"}


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("docs/api/client.md", "[a](../../README.md#x)", "[a](../overview.md#x)"),
        ("deploy/README.md", "[a](../docs/pools.md)", "[a](../pools.md)"),
        ("docs/pools.md", "[a](#here) [b](https://example.org/x)", "[a](#here) [b](https://example.org/x)"),
        ("deploy/README.md", "[systemd](systemd)", "`deploy/systemd`"),
        ("docs/pools.md", "[an example](../examples/segments.py)", "an example (`examples/segments.py`)"),
        ("docs/pools.md", "```python run numpy\n[a](../x.py)\n```", "```python\n[a](../x.py)\n```"),
    ],
)
def test_a_link_leads_to_the_same_in_the_site(page: str, link: str, there: str) -> None:
    assert site.assembled(f"- {link}." if link[0] != "`" else link, page, PAGES, "") in (there, f"- {there}.")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("text", "fault"), [("[a](#a-heading)", ""), ("[a](gone.md)", "gone.md"), ("[a](#gone)", "#gone")]
)
def test_a_broken_link_fails_the_build(text: str, fault: str, tmp_path: Path) -> None:
    """By the settings of mkdocs.yml."""
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text(f"# A heading\n\n{text}\n")
    nav = "nav: [index.md]\nplugins: []\ndocs_dir: pages\nsite_dir: html\n"
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {site.ROOT}/mkdocs.yml\n{nav}")
    command = [sys.executable, "-m", *MKDOCS.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert (done.returncode != 0) == bool(fault), done.stderr
    assert fault in done.stderr
