"""docs/seeds.md keeps its word: what it says is here is here, and the tests that it names are tests."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import membroker
import membroker.managed
import membroker.vmm

ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"^\| ([^\n|]*) \| here \|[^\n]*\n\|[-|]+\|\n((?:\|[^\n]*\n?)+)", re.MULTILINE)


def rows(column: str) -> list[list[str]]:
    """Return the rows, as cells, of all tables whose first column is called something that `column` matches."""
    found = []
    for table in TABLE.finditer((ROOT / "docs" / "seeds.md").read_text()):
        if re.fullmatch(column, table[1]):
            found += [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2].strip().splitlines()]
    return found


def is_here(name: str) -> bool:
    """Say whether a name of the column "here" exists: in a module, of a class, or of its instances."""
    head, _, member = name.partition(".")
    modules: list[ModuleType] = [membroker, membroker.vmm, membroker.managed]
    for module in modules:
        if (owner := getattr(module, head, None)) is not None:
            return not member or hasattr(owner, member) or _is_set(owner, member)
    return False


def _is_set(owner: type, member: str) -> bool:
    """Say whether a class, or one that it is made from, gives its instances an attribute."""
    sources = (inspect.getsource(base) for base in owner.__mro__ if base.__module__.startswith("membroker"))
    return any(re.search(rf"\bself\.{member}\b[^\n=]* = ", source) for source in sources)


def test_every_name_is_here() -> None:
    """Somebody ports a program row by row, and finds each name; a name that is renamed takes its row along."""
    names = rows("there.*")
    assert len(names) > 140
    for there, here, *_ in names:
        assert there
        assert here == "—" or re.fullmatch(r"`[\w.]+`", here), (there, here)
    assert [here for _, here, *_ in names if here != "—" and not is_here(here.strip("`"))] == []


def test_a_name_that_is_not_here_is_found_out() -> None:
    """The check can fail: for a name, a method and an attribute that are made up, and only for those."""
    assert is_here("AddressRange.base")
    assert is_here("PrefetchEntry.location")
    assert not is_here("AddressRange.bottom")
    assert not is_here("VirtualMemoryPool.defragment")
    assert not is_here("VirtualMemory")


def test_every_test_that_it_names_exists() -> None:
    """A test that is renamed takes its row along, and each test of a crate stands there once."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    tests = set(re.findall(r"^ *def (test_\w+)\(", text, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "seeds.md").read_text()))
    assert named - tests == set()
    theirs = [there for there, *_ in rows("its test")]
    assert len(theirs) == len(set(theirs)) == 23 + 24
    assert all(re.fullmatch(r"`test_\w+`", here) for _, here in rows("its test"))
