"""The mutation sample: every mutant is Python and a change, and a seed always gives the same sample."""

from __future__ import annotations

import ast

import pytest
from tools.mutants import PARTS, ROOT, Mutant, Part, mutants_of, sampled


def lines(source: str) -> list[str]:
    """Return what the mutants of a source make of it."""
    text = source.encode()
    return [mutant.source(text).decode() for mutant in mutants_of("a.py", text)]


@pytest.mark.parametrize(
    ("source", "mutated"),
    [
        ("a < b", ["a <= b"]),
        ("a < b < c", ["a <= b < c", "a < b <= c"]),
        ("x = a not in b and c", ["x = a in b and c", "x = a not in b or c"]),
        ("x = not a", ["x =  a"]),
        ("x = 1 << 3", ["x = 2 << 3", "x = 1 << 4"]),
        ("x = True", ["x = False"]),
        ("x = a + b", ["x = a - b"]),
        ("left += 1", ["None", "left += 2"]),
        ("close(a)", ["None"]),
        ("if a: pass", ["if not a: pass"]),
        ("é = a == b", ["é = a != b"]),
        (
            "def f(a: int = 3) -> int: return a",
            ["def f(a: int = 4) -> int: return a", "def f(a: int = 3) -> int: return None"],
        ),
        ('"""A text: 1 < 2."""', []),
        ("assert a < b, 3", []),
        ("raise Error(3)", []),
        ("x = (a) == (b)", []),
    ],
)
def test_what_becomes_of_a_source(source: str, mutated: list[str]) -> None:
    assert lines(source) == mutated


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_mutant_is_python_and_differs(part: Part) -> None:
    """The parts' files and tests exist, too: a file that was moved is missed here, and not by an hour's run."""
    assert all((ROOT / path).exists() for path in part.tests)
    paths = [path for pattern in part.sources for path in ROOT.glob(pattern)]
    assert len(paths) >= len(part.sources)
    for path in paths:
        text = path.read_bytes()
        whole = ast.dump(ast.parse(text))
        for mutant in mutants_of(str(path.relative_to(ROOT)), text)[::20]:
            assert ast.dump(ast.parse(mutant.source(text))) != whole, mutant


def test_a_seed_is_a_sample() -> None:
    first, again, other = (list(sampled(PARTS, 20, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert [sum(part is each for part, _ in first) for each in PARTS] == [4] * len(PARTS)
    assert all(isinstance(mutant, Mutant) for _, mutant in first)
