"""Completions for shells, manual pages and docs/cli.md, from the parsers of `membroker` and `membrokerd`.

`python -m tools.manual` writes them; `--check` fails when they are stale. deploy/share has completions and manual pages
as they are installed below PREFIX/share. shtab writes the completions, at the version that pyproject.toml pins, so that
they are the same on every machine.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import shtab

from membroker.cli.main import _parser as client_parser
from membroker.wire import help_text
from membrokerd.cli import _parser as daemon_parser

ROOT = Path(__file__).parents[1]
SHARE = ROOT / "deploy" / "share"
PAGE = ROOT / "docs" / "cli.md"
PLACES = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/site-functions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}
CLI_HEAD = """# Commands

Written from the parsers by `make manual`, as the manual pages are (`man membroker`, `man membrokerd`).
[Operating a broker](operating.md) says which command is for what.
"""


def files() -> dict[Path, str]:
    """Return what each file must have."""
    parsers = client_parser(), daemon_parser()
    found = {PAGE: CLI_HEAD + "".join(f"{line}\n" for one in parsers for line in _chapter(one))}
    for parser, section, other in zip(parsers, (1, 8), ("membrokerd(8)", "membroker(1)"), strict=True):
        for shell, place in PLACES.items():
            text = shtab.complete(parser, shell)
            found[SHARE / place.format(parser.prog)] = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        found[SHARE / f"man/man{section}/{parser.prog}.{section}"] = page(parser, section, other)
    return found


def page(parser: argparse.ArgumentParser, section: int, other: str) -> str:
    """Return the manual page of a command in roff."""
    lines = [
        f'.TH {parser.prog.upper()} {section} "" membroker',
        *(".SH NAME", f"{parser.prog} \\- {_text(_first(parser))}"),
        *(".SH SYNOPSIS", f".B {parser.prog}", "[options]" if section == 8 else "COMMAND [options]"),
        *(".SH DESCRIPTION", _text(parser.description or "")),
        *(".SH OPTIONS", *_options(parser), *_epilog(parser)),
    ]
    below = list(commands(parser, parser.prog))
    if below:
        lines.append(".SH COMMANDS")
    for words, command in below:
        lines += [f".SS {_text(' '.join((words, *_arguments(command))))}", _text(command.description or "")]
        lines += [*_options(command), *_epilog(command)]
    lines += [".SH SEE ALSO", other, ""]
    return "\n".join(lines)


def _first(parser: argparse.ArgumentParser) -> str:
    """Return the first sentence of a description, as a phrase."""
    sentence = re.split(r"[.;:]", parser.description or "")[0].strip()
    return sentence[:1].lower() + sentence[1:]


def commands(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command that does something, and those below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield f"{words} {name}", inner
                yield from commands(inner, f"{words} {name}")


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            yield str(action.metavar or action.dest)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield each option and argument with its help, in roff."""
    for name, about in _named(parser):
        yield from (".TP", f".B {_text(name)}", _text(about) or "\\&")


def _named(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield each option and argument, and its help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        if action.option_strings and action.nargs != 0:
            choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
            name += f" {action.metavar or choices}"
        yield name, action.help or ""


def _chapter(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of a command and of all below it in docs/cli.md. What several notes say is said once."""
    said: set[str] = set()
    yield from ("", f"## {parser.prog}", *_described(parser, said))
    for words, command in commands(parser, parser.prog):
        yield from ("", f"### {words}", "", f"`{' '.join((words, *_arguments(command)))}`", *_described(command, said))


def _described(parser: argparse.ArgumentParser, said: set[str]) -> Iterator[str]:
    if parser.description:
        yield from ("", parser.description.replace("%%", "%"))
    if options := list(_named(parser)):
        yield from ("", *(f"- `{name}`: {about}".removesuffix(": ").replace("%%", "%") for name, about in options))
    for note in (parser.epilog or "").replace("%%", "%").strip("\n").split("\n\n"):
        title, _, indented = note.partition("\n  ")
        if indented:  # examples, or a table
            yield from ("", f"{title[:1].upper()}{title[1:]}", "", "```", textwrap.dedent(f"  {indented}"), "```")
            continue
        for other in said:
            note = note.removesuffix(other).rstrip("\n")
        if note:
            said.add(note)
            yield from ("", note)


def _epilog(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the examples with their line breaks, and the notes without: `man` fills them."""
    for is_kept, lines in itertools.groupby(
        filter(None, help_text.units(parser.epilog or "")), lambda line: line.startswith(" ")
    ):
        if is_kept:
            yield from (".nf", *map(_text, lines), ".fi")
        else:
            yield from (part for line in lines for part in (".PP", _text(line)))


def _text(text: str) -> str:
    """Return text that roff takes as it is."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("%%", "%")
    return "\\&" + escaped if escaped.startswith((".", "'")) else escaped


def main() -> int:
    """Write the files, or compare them."""
    stale = {path: text for path, text in files().items() if not path.is_file() or path.read_text() != text}
    if "--check" not in sys.argv[1:]:
        for path, text in stale.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return 0
    for path in stale:
        print(f"{path} is stale: make manual", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
