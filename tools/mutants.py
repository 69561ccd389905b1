"""Run a seeded sample of mutants against the tests of their part: `make mutants SAMPLE=200 SEED=1`.

A mutant is the source with one small change: a comparison, a constant, a condition, or a call that is left out. If the
tests of its part still pass, it survives: they do not test that place, or the change makes no difference. The survivors
are printed for a person to judge.

Each part gets an equal share of the sample. Mutants run in copies of the tracked files, so the working tree is never
changed. mutmut and cosmic-ray were not used: neither takes a seeded sample in which each part has its own tests.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEST_SECONDS = 60
"""A test that takes longer hangs, and has noticed the mutant. Without one none takes a tenth of that."""
COPIED = ("benchmarks", "broker", "client", "deploy", "docs", "examples", "proto", "tests", "tools", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class Part:
    """Sources, as globs, and the tests that are to notice a change in them, the fastest first."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]


PARTS = (
    Part(
        "core",
        ("broker/membrokerd/core/*.py",),
        (
            "tests/broker/core",
            "tests/broker/device/test_suspects.py",
            "tests/broker/edge/test_listings.py",
            "tests/broker/observe/test_metrics.py",
        ),
    ),
    Part(
        "journal",
        ("broker/membrokerd/restart/journal.py", "broker/membrokerd/restart/records.py"),
        (
            "tests/broker/restart/test_journal.py",
            "tests/broker/restart/test_journal_damage.py",
            "tests/broker/restart/test_journal_full_disk.py",
            "tests/broker/restart/test_takeover.py",
        ),
    ),
    Part(
        "handoff",
        ("broker/membrokerd/edge/handoff/*.py",),
        (
            "tests/broker/edge",
            "tests/system/test_handoff_calls.py",
            "tests/system/test_holds.py",
            "tests/system/test_bad_frames.py",
        ),
    ),
    Part("session", ("client/membroker/session/*.py",), ("tests/client/session",)),
    Part(
        "memory",
        ("client/membroker/memory/*.py",),
        (
            "tests/client/memory",
            "tests/client/test_recording.py",
            "tests/client/test_shared_pool.py",
            "tests/client/test_interrupts.py",
            "tests/client/pool",
            "tests/adapters/test_dlpack.py",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one span of a file, in bytes."""

    path: str
    line: int
    start: int
    end: int
    new: bytes

    def source(self, text: bytes) -> bytes:
        """Return the file with the change."""
        return text[: self.start] + self.new + text[self.end :]


_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "+",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}


class _Mutations(ast.NodeVisitor):
    """Collects the mutants of one file. Annotations, decorators, docstrings and assertions are left as they are."""

    def __init__(self, path: str, text: bytes) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._text = text
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _add(self, line: int, start: int, end: int, new: str | bytes) -> None:
        self.found.append(Mutant(self._path, line, start, end, new.encode() if isinstance(new, str) else new))

    def _between(self, left: ast.expr, right: ast.expr, new: str) -> None:
        """Replace what stands between two operands; what belongs to neither is the operator and parentheses."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._text[start:end]
        if not any(bracket in between for bracket in (b"(", b")", b"#", b"\\")):
            self._add(left.lineno, start, end, f" {new} ")

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self._between(left, right, _COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, "or" if isinstance(node.op, ast.And) else "and")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _OPERATORS:
            self._between(node.left, node.right, _OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, operand = self._span(node)[0], self._span(node.operand)[0]
            self._add(node.lineno, start, operand, self._text[start:operand].replace(b"not", b"", 1))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node.lineno, *self._span(node), str(not node.value))
        elif isinstance(node.value, int):
            self._add(node.lineno, *self._span(node), str(node.value + 1))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add(node.lineno, *self._span(node), "return None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(node.lineno, *self._span(node), "None")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node.lineno, *self._span(node), "None")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave raises: their messages are not this tool's business."""

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            start = self._span(node.test)[0]
            self._add(node.lineno, start, start, "not ")
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions: no test is to reach one."""

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for each in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(each)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in node.body:
            self.visit(each)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)


def mutants_of(path: str, text: bytes) -> list[Mutant]:
    """Return every mutant of a file, in the order of its lines."""
    collected = _Mutations(path, text)
    collected.visit(ast.parse(text))
    return sorted(collected.found, key=lambda mutant: (mutant.start, mutant.end, mutant.new))


def sampled(parts: Sequence[Part], size: int, seed: int) -> Iterator[tuple[Part, Mutant]]:
    """Yield about `size` mutants, as many of each part. The same seed over the same source is the same sample."""
    for number, part in enumerate(parts):
        paths = sorted(path for pattern in part.sources for path in ROOT.glob(pattern))
        found = [each for path in paths for each in mutants_of(str(path.relative_to(ROOT)), path.read_bytes())]
        share = size // len(parts) + (number < size % len(parts))
        for mutant in random.Random(f"{seed} {part.name}").sample(found, min(share, len(found))):
            yield part, mutant


class Copy:
    """A copy of the tracked files in which the tests of one mutant at a time run."""

    def __init__(self, parent: Path, number: int) -> None:
        self.root = parent / str(number)
        listed = subprocess.run(
            ["git", "ls-files", "-z", *COPIED], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)

    def tests_pass(self, part: Part, seconds: float) -> bool | None:
        """Run a part's tests until the first that fails; None when they take longer than that."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command.append(f"--timeout={TEST_SECONDS}")
        environment = {
            **os.environ,
            "TMPDIR": str(self.root.parent),  # what a test leaves that is killed goes with the copies
            "PYTHONPATH": f"{self.root / 'client'}{os.pathsep}{self.root / 'broker'}{os.pathsep}{self.root}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        process = subprocess.Popen(
            [*command, "-m", "not root and not gpu and not deep", *part.tests],
            cwd=self.root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a test left behind
            process.wait()

    def try_mutant(self, part: Part, mutant: Mutant, seconds: float) -> bool | None:
        """Run a part's tests with a mutant."""
        path = self.root / mutant.path
        whole = path.read_bytes()
        path.write_bytes(mutant.source(whole))
        try:
            return self.tests_pass(part, seconds)
        finally:
            path.write_bytes(whole)


def told(mutant: Mutant) -> str:
    """Say what a mutant changes: the line as it is and as it would be."""
    text = (ROOT / mutant.path).read_bytes()
    was = text.splitlines()[mutant.line - 1].decode().strip()
    mutated = mutant.source(text).splitlines()
    return f"{mutant.path}:{mutant.line}\n    - {was}\n    + {mutated[mutant.line - 1].decode().strip()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sample, and print what survived and the rates."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, default=200, help="how many mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the sample's seed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many run at a time (default: cores)")
    parser.add_argument("--part", choices=[part.name for part in PARTS], help="the mutants of one part alone")
    options = parser.parse_args(argv)
    parts = [part for part in PARTS if options.part in (None, part.name)]
    chosen = list(sampled(parts, options.sample, options.seed))
    results: dict[str, list[bool | None]] = {part.name: [] for part in parts}
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        Path(directory).chmod(0o755)  # as root, tests let other users run what is in it
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(options.jobs):
            copies.put(Copy(Path(directory), number))
        limits = _limits(parts, copies)

        def attempt(entry: tuple[Part, Mutant]) -> tuple[Part, Mutant, bool | None]:
            copy = copies.get()
            try:
                return (*entry, copy.try_mutant(*entry, limits[entry[0].name]))
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(options.jobs) as pool:
            for part, mutant, passed in pool.map(attempt, chosen):
                results[part.name].append(passed)
                if passed:
                    print(f"SURVIVED {part.name}: {told(mutant)}", flush=True)
    _print_rates(results, options.seed)
    return 0


def _limits(parts: Sequence[Part], copies: queue.SimpleQueue[Copy]) -> dict[str, float]:
    """Return how long each part's tests may take: eight times as long as without a mutant, and a minute."""
    limits = {}
    for part in parts:
        copy = copies.get()
        began = time.monotonic()
        if not copy.tests_pass(part, 900):
            sys.exit(f"the tests of {part.name} fail without a mutant: {' '.join(part.tests)}")
        taken = time.monotonic() - began
        copies.put(copy)
        limits[part.name] = 60 + 8 * taken
        print(f"{part.name}: {taken:.0f} s without a mutant", flush=True)
    return limits


def _print_rates(results: dict[str, list[bool | None]], seed: int) -> None:
    print("\n| part | mutants | found | of these by a timeout | survived |\n|---|---|---|---|---|")
    every = [passed for part in results.values() for passed in part]
    for name, part in {**results, "all": every}.items():
        survived = part.count(True)
        share = f" ({100 * (len(part) - survived) / len(part):.0f} %)" if part else ""
        print(f"| {name} | {len(part)} | {len(part) - survived}{share} | {part.count(None)} | {survived} |")
    print(f"seed {seed}")


if __name__ == "__main__":
    sys.exit(main())
