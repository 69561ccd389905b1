"""How every command is made: its parser, the options that all have, and the types of arguments.

A command gets its parsed options and returns its exit status. It prints by `tables.answer`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from ..vmm.sizes import parse_size
from ..wire import names
from . import tables
from .admin import open_books

Command = Callable[[argparse.Namespace], int]

ENDPOINTS = """
A tenant's endpoint shows that tenant's own books. The admin endpoint, which only the operator can enter, shows the
books of all tenants. The endpoint is --endpoint DIR or that of --device, else MEMBROKER_ENDPOINT, else that of the only
broker on this machine; `membroker status` shows all brokers."""


class Parser(argparse.ArgumentParser):
    """A parser whose help keeps its lines, and that takes no shortened options."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings, allow_abbrev=False)  # type: ignore[arg-type]


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""What add_subparsers returns; argparse has no public name for it."""


def add_bare(commands: Commands, name: str, summary: str, examples: str, notes: str = "") -> Parser:
    """Add a command with nothing but its help. `examples` are command lines without the leading `membroker`."""
    shown = "".join(f"  membroker {line}\n" for line in examples.splitlines())
    description = f"{summary[:1].upper()}{summary[1:]}."
    return commands.add_parser(name, help=summary, description=description, epilog=f"examples:\n{shown}{notes}")


def add(
    commands: Commands,
    name: str,
    run: Command,
    summary: str,
    examples: str,
    notes: str = "",
    *,
    admin: bool = False,
    inherits: bool = False,
) -> Parser:
    """Add a command that talks to a broker: it takes --endpoint or --device, and --json.

    `admin`: it takes --admin too. `inherits`: it follows a command with the same options, whose values it keeps.
    """
    left_out = argparse.SUPPRESS if inherits else None
    parser = add_bare(commands, name, summary, examples, notes + ENDPOINTS * admin)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--endpoint", metavar="DIR", default=left_out, help="the directory of an endpoint or a device")
    where.add_argument(
        "--device", metavar="INDEX|UUID", default=left_out, help="this device's broker; `nvidia-smi -L` lists devices"
    )
    parser.add_argument("--json", action="store_true", default=left_out or False, help="JSON, sizes in bytes")
    if admin:
        parser.add_argument("--admin", action="store_true", help="the books of all tenants, at the admin endpoint")
    parser.set_defaults(command=run)
    return parser


def listing(read: Callable[[Any], list[Any]], table: Callable[[Iterable[Any]], tables.Table]) -> Command:
    """Return a command that reads a list from the books, and shows it."""

    def run(options: argparse.Namespace) -> int:
        with open_books(options.endpoint, options.admin) as books:
            found = read(books)
        return tables.answer(options.json, found, table(found))

    return run


def add_location(parser: Parser) -> None:
    """Add --location."""
    parser.add_argument("--location", choices=("device", "host"), default="device")


def add_session(parser: Parser) -> None:
    """Add the name of a session."""
    parser.add_argument("name", metavar="SESSION", type=session, help="as `membroker sessions --admin` shows it")


# --- Types of arguments ---


def session(text: str) -> str:
    """Return the resource name of a session."""
    name = f"sessions/{text.removeprefix('sessions/')}"
    if names.parse_session(name) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a session, as in sessions/1c0000000001")
    return name


def size(text: str) -> int:
    """Return a size in bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def limit(text: str) -> tuple[int | None]:
    """Return a size, or None for `none`, in a tuple: argparse takes a bare None for an option that was not given."""
    if text == "none":
        return (None,)
    try:
        return (parse_size(text),)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, or none") from error


def weight(text: str) -> tuple[int | None]:
    """Return a weight, or None for `none`, in a tuple as `limit`."""
    if text == "none":
        return (None,)
    if not text.isdecimal() or not text.isascii() or len(text) > 4 or int(text) > 1_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 1000, or none")
    return (int(text),)


def seconds(text: str) -> float:
    """Return a number of seconds, at most a day."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 86400")
    return value
