"""`HelpFormatter`: the help of a command at the width of its terminal.

argparse joins the lines of examples, too; or it keeps those of paragraphs, too, which a narrower terminal breaks again.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator

MOST_COLUMNS = 120
"""A paragraph is not wider, however wide the terminal is."""
_LEAST_COLUMNS = 24
"""An explanation with less room beside its example begins below it."""
_EXAMPLE = re.compile(r"( +\S.*?  +)(\S.*)")
"""An indented line with an explanation after at least two spaces."""


def units(text: str) -> Iterator[str]:
    """Yield each paragraph on one line, each indented line as it is, and the empty lines between them."""
    paragraph: list[str] = []
    for line in text.splitlines():
        if line and not line.startswith(" "):
            paragraph.append(line)
            continue
        if paragraph:
            yield " ".join(paragraph)
            paragraph = []
        yield line
    if paragraph:
        yield " ".join(paragraph)


def filled(text: str, width: int) -> str:
    """Return text with its paragraphs and the explanations of its examples in lines of so many characters at most.

    The example itself stays on one line, so that it can be copied.
    """
    lines: list[str] = []
    for unit in units(text):
        match = _EXAMPLE.fullmatch(unit)
        if match is None and (not unit or unit.startswith(" ")):
            lines.append(unit)
            continue
        first, explanation = match.groups() if match else ("", unit)
        indent = " " * len(first)
        if width - len(first) < _LEAST_COLUMNS:
            lines.append(first.rstrip())
            first = indent = " " * 6
        found = textwrap.wrap(explanation, width - len(indent), break_long_words=False, break_on_hyphens=False)
        lines += [(indent if number else first) + line for number, line in enumerate(found)]
    return "\n".join(lines)


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of examples and tables, and fills everything else."""

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option, or all commands: argparse measures their names without the indent that they have."""
        super().add_argument(action)
        if action.nargs == argparse.PARSER:
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(filled(text, min(width, MOST_COLUMNS) - len(indent)), indent)
