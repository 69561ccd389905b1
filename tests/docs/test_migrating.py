"""Each name in docs/migrating.md exists, and migrating_tests.md has a test for each of its rows."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import membroker
import membroker.managed.hints
import membroker.types
import membroker.vmm

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrating.md"
TESTS = Path(__file__).with_name("migrating_tests.md")
TABLE = re.compile(r"^\| ([^\n|]*) \| (?:here|shown by) \|[^\n]*\n\|[-|]+\|\n((?:\|[^\n]*\n?)+)", re.MULTILINE)


def rows(page: Path, column: str) -> list[list[str]]:
    """Return the rows, as cells, of all tables whose first column is called something that `column` matches."""
    found = []
    for table in TABLE.finditer(page.read_text()):
        if re.fullmatch(column, table[1]):
            found += [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2].strip().splitlines()]
    return found


def is_here(name: str) -> bool:
    """Return whether a name of the column "here" exists in a module, a class, or its instances."""
    head, _, member = name.partition(".")
    modules: list[ModuleType] = [membroker, membroker.types, membroker.vmm, membroker.managed.hints]
    for module in modules:
        if (owner := getattr(module, head, None)) is not None:
            return not member or hasattr(owner, member) or _is_set(owner, member)
    return False


def _is_set(owner: type, member: str) -> bool:
    """Return whether instances of a class have an attribute, its base classes included."""
    sources = (inspect.getsource(base) for base in owner.__mro__ if base.__module__.startswith("membroker"))
    return any(re.search(rf"\bself\.{member}\b[^\n=]* = ", source) for source in sources)


def test_every_name_is_here() -> None:
    """A user ports a program row by row and finds each name; renaming one means editing its row."""
    names = rows(PAGE, "there.*")
    assert len(names) > 140
    for there, here, *_ in names:
        assert there
        assert here == "—" or re.fullmatch(r"`[\w.]+`", here), (there, here)
    assert [here for _, here, *_ in names if here != "—" and not is_here(here.strip("`"))] == []


def test_every_row_has_its_test() -> None:
    """When a row is added, renamed or moved, the table of tests must follow. Only rows without behaviour need no
    test.
    """
    shown = rows(TESTS, "there")
    assert [there for there, _ in shown] == [there for there, *_ in rows(PAGE, "there")]
    assert [there for there, tests in shown if not tests] == [
        "`from_raw`, `into_raw`",
        "`cuda_ffi`",
        "`is_vmm_supported()`",
        "`VERSION`",
    ]


def test_every_test_that_is_named_exists() -> None:
    """Renaming a test means editing its row, and each test of a crate is listed once."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    tests = set(re.findall(r"^ *def (test_\w+)\(", text, re.MULTILINE))
    assert set(re.findall(r"`(test_\w+)`", TESTS.read_text())) - tests == set()
    theirs = [there for there, *_ in rows(TESTS, "its test")]
    assert len(theirs) == len(set(theirs)) == 23 + 24
    assert all(re.fullmatch(r"`test_\w+`", here) for _, here in rows(TESTS, "its test"))
