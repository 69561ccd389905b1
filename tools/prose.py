"""Check the English of the files listed under `tool.prose` in pyproject.toml: `python -m tools.prose [FILE ...]`.

In Python files it checks comments and strings, since `is None` is fine in code; in other files, every line.
Each banned pattern has the advice that is printed with it. Lines of pages have at most 120 characters, but for tables,
code, generated pages and the results. Spelling is left to codespell.
"""

from __future__ import annotations

import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ACTIONS = (
    r"ask|ha[sd]|have|hold|borrow|write|read|g[ia]ve|come|came|leave|lend|wait|want|die|take|took|know|hear|need|"
    r"attach|connect|call|send|sent|map|lose|lost|grow"
)
BANNED = {
    r"whoever|whomever|(?<!kill-)whom": "name the thing: the process, the caller, the session",
    rf"(?<!people )who (?:{ACTIONS})(?:s|es|d|ed)?": "name the process: 'the worker that holds …', not 'who holds …'",
    r"he|him|his|himself": "'it' for a process, 'they' for a person",
    r"(?-i:is|are) (?-i:none)(?! of)": "'is not a …', 'invalid', or 'there are none'",
    r"anew": "'again', or a verb: rewrite, recreate",
    r"cards?": "GPU",
    r"twins?": "host driver",
    r"g[ai]v(?:e|es|en|ing) back|give-backs?": "release, or return",
    r"for ever": "forever, or indefinitely",
    r"no (?:wall|sense)": "say what it is",
}
LONGEST = 120
GENERATED = "Written from the "
"""What a page says that `make` writes."""
_PATTERNS = [(re.compile(rf"\b(?:{banned})\b", re.IGNORECASE), advice) for banned, advice in BANNED.items()]


def files() -> list[Path]:
    """Return the files to check. A pattern that matches no file is an error: a file was moved and its line was not."""
    found: set[Path] = set()
    for pattern in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["prose"]["paths"]:
        matches = [path for path in ROOT.glob(pattern) if path.is_file()]
        if not matches:
            raise SystemExit(f"tool.prose in pyproject.toml: {pattern} matches no file")
        found.update(matches)
    return sorted(found)


def text(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that people read, each with its number."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in kinds:  # Python 3.11 gives an f-string whole: leave out what is code in it
                string = re.sub(r"\{[^{}]*\}", "", token.string) if token.string[:1] in "fF" else token.string
                yield from enumerate(string.splitlines(), token.start[0])


def complaints(path: Path) -> Iterator[str]:
    """Yield one line for each banned word, in the form that editors jump to."""
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for number, line in text(path):
        for pattern, advice in _PATTERNS:
            for match in pattern.finditer(line):
                yield f"{name}:{number}: '{match[0]}': {advice}"
    for number in long_lines(path) if path.suffix == ".md" and path.name != "RESULTS.md" else ():
        yield f"{name}:{number}: longer than {LONGEST} characters: wrap it"


def long_lines(page: Path) -> Iterator[int]:
    """Yield the numbers of the lines that are too long."""
    is_code, lines = False, page.read_text().splitlines()
    if any(line.startswith(GENERATED) for line in lines):
        return
    for number, line in enumerate(lines, 1):
        is_code ^= line.lstrip().startswith("```")
        if len(line) > LONGEST and not is_code and not line.startswith("|"):
            yield number


def main(arguments: list[str]) -> int:
    """Print what is wrong in the given files, or in all that are listed; 1 where anything is."""
    found = [line for path in [Path(name) for name in arguments] or files() for line in complaints(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
