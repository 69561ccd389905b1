"""`make check` counts the accesses to private attributes of other objects, and this tree has none."""

from __future__ import annotations

import ast

import pytest
from tools.private_access import accesses, main


def found(source: str) -> list[str]:
    return [name for _, name, _ in accesses(ast.parse(source))]


@pytest.mark.parametrize(
    "source",
    [
        "pool._lender",
        "self.pool._lender.driver",
        "getattr(source, '_lender', source)",
        "setattr(pool, '_lender', None)",
        "from membroker.pool import _lender",
        "del client.session()._lender",
        "pool._lender += 1",
    ],
)
def test_what_is_an_access(source: str) -> None:
    assert found(source) == ["_lender"]


@pytest.mark.parametrize(
    "source",
    [
        "self._lender",
        "cls._lender",
        "super()._lender()",
        "getattr(self, '_lender')",
        "pool.__class__",
        "pool.lender_",
        "class Pool:\n    def __init__(self): self._lender = 1\ndef of(pool): return pool._lender",
        "class Pool:\n    def _lender(self): ...\nTABLE = {1: Pool._lender}",
        "class Pool:\n    _lender: int = 0\ndef of(pool): return pool._lender",
    ],
)
def test_what_is_none(source: str) -> None:
    assert found(source) == []


def test_this_tree_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out
