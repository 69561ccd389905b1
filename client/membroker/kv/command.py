"""The command that starts an engine: which options it has.

Owns how a command line is read. What an engine needs is in its own package. It imports no engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_KEY: Final = re.compile(r"^([\w-]+)[ \t]*:(.*(?:\n[ \t#].*|\n)*)", re.MULTILINE)
"""A key of a YAML file that is not in another, and all that is behind it."""


class Options:
    """The options in a command, and in the file that `--config` names. Of `--a.b c`, the option is `a`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._texts: dict[str, str] = {}
        for word, after in zip(command, [*command[1:], ""], strict=True):
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                self._add(name.partition(".")[0], value if equals or after.startswith("--") else after)
        if file := self._texts.get("config"):
            try:
                text = Path(file).read_text(errors="replace")
            except (OSError, ValueError):
                return  # the engine says what is wrong with it
            for name, value in _KEY.findall(text):
                self._add(name, value)

    def text_of(self, name: str) -> str | None:
        """Return what was given for the option of this name, which may be abbreviated; None if it was not given."""
        found = [text for given, text in self._texts.items() if given and name.startswith(given)]
        return " ".join(found) if found else None

    def _add(self, name: str, value: str) -> None:
        name = name.replace("_", "-")
        self._texts[name] = " ".join([self._texts[name], value] if name in self._texts else [value])
