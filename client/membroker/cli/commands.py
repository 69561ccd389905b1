"""How every command is made: its parser, the options that all have, and the types of arguments.

A command gets its parsed options and returns its exit status. It prints by `tables.answer`.
"""

from __future__ import annotations

import argparse
import difflib
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

from ..ext import help_text, names
from ..vmm.sizes import parse_size
from . import tables
from .books import open_books

Command = Callable[[argparse.Namespace], int]

ENDPOINTS = """

A tenant's endpoint shows only that tenant's books. The admin endpoint, which only the operator can use, shows the
books of all tenants. The command uses the endpoint of --endpoint or --device, else MEMBROKER_ENDPOINT, else the only
broker on this machine; `membroker status` shows all brokers. If a broker of your own runs
($XDG_RUNTIME_DIR/membroker), those in /run/membroker are left out."""


OPERATOR = """

The command uses the admin endpoint, which only the daemon's user and root can use."""


class Parser(argparse.ArgumentParser):
    """A parser whose help fits the terminal, that takes no shortened options, and that says what was meant."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", help_text.HelpFormatter)
        super().__init__(**settings, allow_abbrev=False)  # type: ignore[arg-type]
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """End with what is wrong; where no command was given, say where they are listed."""
        if message.startswith("the following arguments are required") and self._subparsers is not None:
            message = f"{message}: `{self.prog} --help` lists all"
        super().error(message)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with what is wrong about arguments that no parser knows; this one is the chosen command's."""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown[0])}")

    def refuse_early_option(self, arguments: Sequence[str]) -> None:
        """End if the first argument is an option of a command, which comes after it."""
        first = arguments[0] if arguments else ""
        if first.startswith("-") and first not in self._option_string_actions:
            if first.partition("=")[0] not in self._options_of_commands() and self._meant(first):
                self.refuse([first])
            self.error(f"options come after the command, as in `{self.prog} COMMAND {first} …`")

    def _options_of_commands(self) -> set[str]:
        groups = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {
            option for group in groups for parser in group.choices.values() for option in parser._option_string_actions
        }

    def _meant(self, option: str) -> str:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        return did_you_mean(option.partition("=")[0], known)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Say which command was meant, instead of listing all."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            instead = did_you_mean(value, action.choices) or f": `{self.prog} --help` lists all"
            raise argparse.ArgumentError(None, f"there is no command `{self.prog} {value}`{instead}")
        super()._check_value(action, value)


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return the end of a sentence: the name that is most like `text`, if one is."""
    near = difflib.get_close_matches(text, known, n=1)
    return f", did you mean {near[0]}?" if near else ""


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
    lists: bool = True,
) -> Parser:
    """Add a command that talks to a broker: it takes --endpoint or --device, and --json if it `lists` something.

    `admin`: it takes --admin too. `inherits`: it follows a command with the same options, whose values it keeps.
    """
    left_out = argparse.SUPPRESS if inherits else None
    parser = add_bare(commands, name, summary, examples, notes + ENDPOINTS * admin)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--endpoint", metavar="DIR", default=left_out, help="the directory of an endpoint or a device")
    where.add_argument(
        "--device", metavar="INDEX|UUID", default=left_out, help="this device's broker; `nvidia-smi -L` lists devices"
    )
    if lists:
        parser.add_argument("--json", action="store_true", default=left_out or False, help="JSON, sizes in bytes")
    if admin:
        parser.add_argument("--admin", action="store_true", help="the books of all tenants, at the admin endpoint")
    parser.set_defaults(command=run)
    return parser


def listing(read: Callable[[Any], list[Any]], table: Callable[[Iterable[Any]], tables.TextTable]) -> Command:
    """Return a command that reads a list from the books, and shows it."""

    def run(options: argparse.Namespace) -> int:
        with open_books(options.endpoint, options.admin) as books:
            found = read(books)
        return tables.answer(options.json, found, table(found))

    return run


def leave_at_signals(*others: signal.Signals) -> None:
    """Let SIGTERM, SIGHUP and others end this process by SystemExit, so that what it has begun is put back."""
    for number in (signal.SIGTERM, signal.SIGHUP, *others):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # and not ignored, as by `nohup`
            signal.signal(number, _leave)


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def add_location(parser: Parser) -> None:
    """Add --location."""
    parser.add_argument("--location", choices=("device", "host"), default="device", help="which memory (device)")


def add_session(parser: Parser) -> None:
    """Add the name of a session."""
    parser.add_argument("name", metavar="SESSION", type=session, help="as `membroker sessions --admin` shows it")


# --- Types of arguments ---


def session(text: str) -> str:
    """Return the resource name of a session."""
    name = f"sessions/{text.removeprefix('sessions/')}"
    if names.parse_session(name) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a session, as in sessions/1c0000000001: `membroker sessions --admin` lists them"
        )
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


def timeout(text: str) -> float:
    """Return a number of seconds, or 0."""
    try:
        return 0.0 if text == "0" else seconds(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or 0") from None


def seconds(text: str) -> float:
    """Return a number of seconds, at most a day."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 86400")
    return value
