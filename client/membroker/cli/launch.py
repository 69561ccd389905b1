"""The command `membroker run`: start a program with its endpoint, its model and its limit in the environment.

Owns what is checked before the program starts. The program replaces this process, so it has the same pid, descriptors
and terminal, and its exit status is the command's.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import sys

from ..ext import enter, names
from . import commands
from .commands import Commands

_NOTES = """
The program gets MEMBROKER_ENDPOINT, and with --model and --limit also MEMBROKER_MODEL and MEMBROKER_LIMIT. The model is
the name for `Client.register_model()` without a name, and the limit applies to that model if the program sets none.
vLLM and SGLang with membroker use both. A program that sets its own limit keeps it, and is refused (ModelConflict) if
the model is registered with another limit. To enforce a limit on every program, use `membroker quota set`.

The command becomes the program: the same process, terminal and exit status. If it cannot connect to a broker, it does
not start the program, and its exit status is 1. The exit status is 127 if the program is not found, and 126 if it
cannot be executed."""


def add_command(subparsers: Commands) -> None:
    """Add `run`."""
    parser = commands.add(
        subparsers,
        "run",
        run,
        "start a program with its endpoint, its model and its limit",
        "run -- python serve.py\n"
        "run --model llama-7b --limit 8GiB -- python serve.py --port 8001\n"
        "run --device 1 --model llama-7b -- python serve.py",
        _NOTES,
        lists=False,
    )
    parser.add_argument("--model", metavar="NAME", type=_model, help="the model for which the program borrows")
    parser.add_argument("--limit", metavar="SIZE", type=commands.size, help='the most that it borrows, as in "8GiB"')
    parser.add_argument("program", metavar="COMMAND", nargs=argparse.REMAINDER, help="the program and its arguments")


def _model(text: str) -> str:
    if not names.valid_model(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a model, as in llama-7b: {names.NAMES}")
    return text


def run(options: argparse.Namespace) -> int:
    """Check that the broker can be entered, and become the program."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        options.parser.error("the following arguments are required: COMMAND, as in `membroker run -- python serve.py`")
    if options.limit is not None and options.model is None:
        options.parser.error("--limit is the limit of a model: give --model, too")
    with enter(options.endpoint, observer=True, client="membroker run") as client:
        environment = {**os.environ, names.ENDPOINT_VARIABLE: str(client.endpoint)}
    for variable in (names.MODEL_VARIABLE, names.LIMIT_VARIABLE):  # those of a program around this one are not meant
        environment.pop(variable, None)
    if options.model is not None:
        environment[names.MODEL_VARIABLE] = options.model
    if options.limit is not None:
        environment[names.LIMIT_VARIABLE] = str(options.limit)
    return _become(program, environment)


def _become(program: list[str], environment: dict[str, str]) -> int:
    sys.stdout.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would inherit that
        signal.signal(number, signal.SIG_DFL)
    name, found = program[0], program[0]
    try:
        if "/" not in name:
            # Not by `os.execvpe`: it goes on to directories of PATH that this user cannot enter, and tells of those.
            found = shutil.which(name, path=environment.get("PATH", os.defpath)) or ""
        if not found:
            raise FileNotFoundError(errno.ENOENT, "there is no such program on PATH")
        os.execve(found, program, environment)
    except (OSError, ValueError) as error:  # a null byte in an argument
        what = error.strerror if isinstance(error, OSError) else str(error)
        missing = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
        if missing and os.access(found, os.X_OK):
            what, missing = "the interpreter that its first line names does not exist", False
        print(f"membroker: cannot start {name!r}: {what}", file=sys.stderr)
        return 127 if missing else 126
