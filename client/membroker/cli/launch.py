"""The command `membroker run`: start a program with its endpoint, its model and its limit in the environment.

Owns what is checked before the program starts. The program replaces this process, so it has the same pid, descriptors
and terminal, and its exit status is the command's. With --guest this process stays its parent: `guest.command`.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable

from ..errors import InvalidRequest, MembrokerError
from ..ext import enter, names
from ..guest.settings import Ports, Settings, parse_ports
from . import commands, engines
from .commands import Commands

_NOTES = """
The program gets MEMBROKER_ENDPOINT, and with --model and --limit also MEMBROKER_MODEL and MEMBROKER_LIMIT. The model is
the name for `Client.model()` without a name, and the limit applies to that model if the program sets none.
A program that sets its own limit keeps it, and is refused (ModelConflict) if the model is registered with another
limit. To enforce a limit on every program, use `membroker quota set`.

vLLM (`vllm serve`) and SGLang (`sglang serve`, `python -m sglang.launch_server`) also get the options that make their
KV cache elastic, with addresses for all that the broker lends, or for --limit. A line on standard error says which
options. Those that you give yourself stay. For a command that is not recognized, name the engine: the options are added
at the end. membroker must be installed in the engine's environment (`pip install membroker`, without an extra). An
engine on several GPUs needs an endpoint for each: docs/vllm.md says how.

The command becomes the program: the same process, terminal and exit status. If it cannot connect to a broker, it does
not start the program, and its exit status is 1. The exit status is 127 if the program is not found, and 126 if it
cannot be executed.

With --guest the program need not know membroker: all the GPU memory that its processes use is declared for the model,
and when others want the memory, NVIDIA's driver takes all of the program off the GPU, and puts it back at its turn.
The program waits then as soon as it uses the GPU. The command stays its parent, and ends as it ends. A program that
uses membroker itself must not be a guest: it sleeps by its own way. docs/guests.md says more."""


AUTO = "auto"
GUEST_OPTIONS = ("memory", "timeout", "on_excess", "door", "sleep_after", "no_sleep")


def add_command(subparsers: Commands) -> None:
    """Add `run`."""
    parser = commands.add(
        subparsers,
        "run",
        run,
        "start a program with its endpoint, its model and its limit",
        "run --model chat -- vllm serve Qwen/Qwen3-8B --port 8001\n"
        "run --model llama-7b --limit 8GiB -- python serve.py --port 8001\n"
        "run --device 1 -- python serve.py",
        _NOTES,
        lists=False,
    )
    parser.add_argument("--model", metavar="NAME", type=_model, help="the model for which the program borrows")
    parser.add_argument("--limit", metavar="SIZE", type=commands.size, help='the most that it borrows, as in "8GiB"')
    parser.add_argument(
        "--engine", choices=(*engines.ENGINES, "none"), help="what the command starts, if it does not say so"
    )
    _add_guest(parser)
    parser.add_argument("program", metavar="COMMAND", nargs=argparse.REMAINDER, help="the program and its arguments")


def _add_guest(parser: commands.Parser) -> None:
    guest = parser.add_argument_group("a program that does not know membroker")
    guest.add_argument("--guest", action="store_true", help="borrow for all of the program, and put it to sleep")
    guest.add_argument(
        "--memory",
        metavar="SIZE|auto",
        type=_memory,
        help="what it uses at most, with its CUDA context; auto: what it used the last time, and what it uses now",
    )
    guest.add_argument("--timeout", metavar="SECONDS", type=commands.seconds, help="how long it may wait to start")
    guest.add_argument(
        "--on-excess",
        choices=("sleep", "kill"),
        default="sleep",
        help="what happens when it uses more, and the broker does not lend it (sleep)",
    )
    guest.add_argument(
        "--door",
        metavar="[ADDRESS:]PORT:PORT",
        type=_ports,
        help="listen at the first port, forward to the program's own, the second one, and wake it for a connection",
    )
    guest.add_argument(
        "--sleep-after", metavar="SECONDS", type=commands.seconds, help="sleep after so long without a connection"
    )
    guest.add_argument("--no-sleep", action="store_true", help="charge the program, and never put it to sleep")


def _memory(text: str) -> int | str:
    return text if text == AUTO else commands.size(text)


def _ports(text: str) -> Ports:
    try:
        return parse_ports(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not [ADDRESS:]PORT:PORT with two different ports, as in 8188:18188 or 0.0.0.0:8188:18188"
        ) from None


def _model(text: str) -> str:
    if not names.valid_model(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the name of a model, as in llama-7b: {names.grammar('MODEL')}"
        )
    return text


def run(options: argparse.Namespace) -> int:
    """Check that the broker can be entered, and become the program."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        options.parser.error("the following arguments are required: COMMAND, as in `membroker run -- python serve.py`")
    if options.limit is not None and options.model is None:
        options.parser.error("--limit is the limit of a model: give --model, too")
    if options.guest:
        return _run_guest(options, program)
    if given := [name for name in GUEST_OPTIONS if getattr(options, name) not in (None, False, "sleep")]:
        options.parser.error(f"--{given[0].replace('_', '-')} is for a guest: give --guest, too")
    with enter(options.endpoint, observer=True, client="membroker run") as client:
        environment = {**os.environ, names.ENDPOINT_VARIABLE: str(client.endpoint)}
        capacity = min(client.capacities["device"], options.limit or names.MAX_BYTES)
    for variable in (names.MODEL_VARIABLE, names.LIMIT_VARIABLE):  # those of a program around this one are not meant
        environment.pop(variable, None)
    if options.model is not None:
        environment[names.MODEL_VARIABLE] = options.model
    if options.limit is not None:
        environment[names.LIMIT_VARIABLE] = str(options.limit)
    if (engine := options.engine or engines.engine_of(program)) in engines.ENGINES:
        try:
            program, environment = engines.add(engine, program, environment, capacity)
        except InvalidRequest as error:
            options.parser.error(str(error))
    return _execute(program, lambda found: _become(found, program, environment))


def _run_guest(options: argparse.Namespace, program: list[str]) -> int:
    """Check the options of a guest, and run it."""
    from ..guest.command import run as run_guest  # a door needs asyncio

    error = options.parser.error
    if options.model is None or options.memory is None:
        error("--guest needs --model and --memory, as in `membroker run --guest --model comfy --memory 12GiB -- …`")
    if options.limit is not None:
        error("--limit is for programs that use membroker: a guest has --memory")
    if options.engine in engines.ENGINES:
        error("--engine is for programs that use membroker: leave --guest or --engine out")
    if options.sleep_after is not None and (options.door is None or options.no_sleep):
        error("--sleep-after counts from the last connection: give --door, and leave out --no-sleep")
    settings = Settings(
        memory=0 if options.memory == AUTO else options.memory,
        is_auto=options.memory == AUTO,
        on_excess=options.on_excess,
        sleep_after=options.sleep_after,
        can_sleep=not options.no_sleep,
        has_door=options.door is not None,
    )
    return _execute(
        program,
        lambda found: run_guest(
            found,
            program,
            options.endpoint,
            options.model,
            settings,
            ports=options.door,
            timeout=options.timeout,
        ),
    )


def _become(found: str, program: list[str], environment: dict[str, str]) -> int:
    sys.stdout.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would inherit that
        signal.signal(number, signal.SIG_DFL)
    os.execve(found, program, environment)


def _execute(program: list[str], execute: Callable[[str], int]) -> int:
    """Find the program and execute it; say why that cannot be done."""
    name, found = program[0], program[0]
    try:
        if "/" not in name:
            # Not by `os.execvpe`: it goes on to directories of PATH that this user cannot enter, and tells of those.
            found = shutil.which(name, path=os.environ.get("PATH", os.defpath)) or ""
        if not found:
            raise FileNotFoundError(errno.ENOENT, "there is no such program on PATH")
        return execute(found)
    except MembrokerError:  # some are OSErrors, too
        raise
    except (OSError, ValueError) as error:  # a null byte in an argument
        what = error.strerror if isinstance(error, OSError) else str(error)
        missing = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
        if missing and os.access(found, os.X_OK):
            what, missing = "the interpreter that its first line names does not exist", False
        print(f"membroker: cannot start {name!r}: {what}", file=sys.stderr)
        return 127 if missing else 126
