"""The command `membroker`: what a person, or a script, asks about a broker.

Owns the command line. Errors are one sentence on stderr and exit status 1, a wrong command line is 2; there are
no tracebacks. What only an operator may is in `operate`.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import MembrokerError
from ..session.endpoint import VARIABLE, find_device, living_devices
from ..types import ModelStatus
from ..vmm.driver import DriverError
from ..vmm.sizes import format_size, parse_size
from ..wire import names
from . import operate, segments, tables
from .admin import is_admin, open_books
from .doctor import missing_packages, run_doctor

_ENDPOINTS = """\
A tenant's endpoint shows that tenant's own books; the admin endpoint, which only the operator can enter, shows
everybody's. The endpoint is --endpoint DIR or that of --device, else MEMBROKER_ENDPOINT, else the only broker of this
machine; `membroker status` shows all of them."""

_PROCESSES = """\
What the driver sees each process use, beside what its sessions are charged and the size of the segments that they hold.
The rest is its excess: on a card a context that it has not declared (518 MiB on an H200), memory of its own
(cudaMalloc), or what it gave back by its word and kept. Nothing can take that away: ask it, or end it. Whom the driver
cannot see is left out: who holds memory by a descriptor alone, or lives in another pid namespace; on the host twin,
other users' processes too, unless the broker runs as root. When `unaccounted` rises, the daemon's log names those whose
excess is more than a context."""

_FORGET = """\
A session is detached when its process lives and has no connection: it stands still since an earlier daemon, or has
closed it. It is charged on, since it may come back to what it has mapped. Forgotten, it is charged nothing, and its
calls raise SessionLost. Nothing can unmap its memory, and the device may be too full to lend as much again while the
process has that: where it can be ended, end it instead."""

_DRAIN = """\
Borrowing, declaring more and attaching segments are refused (DRAINING), and every worker is told, now or when it
connects: Client.on_notice. What is lent stays until its worker gives it back; who holds something is listed. The
daemon that ends by --exit has status 0, so the systemd unit in deploy/ leaves it stopped (Restart=on-failure) until
`systemctl start membrokerd`. Where it is always started again, as in deploy/kubernetes, the next one lends: take it
away there instead. A second drain stands in the place of the first, its deadline and --exit too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if sys.stdout is None:  # closed by who started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it is standard output
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names, and a table's lines, may have what a terminal cannot show
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        if getattr(options, "device", None) is not None:
            options.endpoint = str(find_device(options.device))
        return command(options)
    except (MembrokerError, DriverError) as error:
        print(f"membroker: {tables.printable(str(error))}", file=sys.stderr)
    except BrokenPipeError:
        # The reader left (`membroker models | head`): nothing more can be said, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"membroker: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 1


# --- Commands ---


def _status(options: argparse.Namespace) -> int:
    """Show the device that was chosen, else every device that has a living broker."""
    chosen = options.endpoint or os.environ.get(VARIABLE)
    devices = [] if chosen else list(map(str, living_devices()))
    if len(devices) < 2:
        _show_status(options.endpoint, options)
        return 0
    failed = False
    for number, device in enumerate(devices):
        if number and not options.json:
            print()
        try:
            _show_status(device, options)
        except MembrokerError as error:  # the others are to be seen all the same
            print(f"membroker: {tables.printable(str(error))}", file=sys.stderr)
            failed = True
    return int(failed)


def _show_status(endpoint: str | None, options: argparse.Namespace) -> None:
    with open_books(endpoint, options.admin) as books:
        device = books.device()
    if options.json:
        tables.print_json(device, sys.stdout)
    else:
        shown = [tables.device_table(device), tables.locations_table(device.locations.values())]
        tables.print_tables(shown, sys.stdout)


def _models(options: argparse.Namespace) -> int:
    with open_books(options.endpoint, options.admin) as books:
        while True:
            _show_models(books.models(), options)
            if options.watch is None:
                return 0
            time.sleep(options.watch)


def _show_models(models: list[ModelStatus], options: argparse.Namespace) -> None:
    if options.json:
        tables.print_json(models, sys.stdout)
        return
    if options.watch is not None and sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[J")
    tables.print_tables([tables.models_table(models)], sys.stdout)


def _sessions(options: argparse.Namespace) -> int:
    with open_books(options.endpoint, options.admin) as books:
        sessions = books.sessions()
    if options.json:
        tables.print_json(sessions, sys.stdout)
    else:
        tables.print_tables([tables.sessions_table(sessions)], sys.stdout)
    return 0


def _segments(options: argparse.Namespace) -> int:
    with open_books(options.endpoint, options.admin) as books:
        found = books.segments()
    if options.json:
        tables.print_json(found, sys.stdout)
    else:
        tables.print_tables([tables.segments_table(found)], sys.stdout)
    return 0


def _segments_load(options: argparse.Namespace) -> int:
    if is_admin(options.endpoint, options.admin):
        options.complain("a segment is loaded at its tenant's endpoint, not at the admin endpoint")
    name: segments.Name = options.name
    if bool(options.model) == bool(name.model):
        options.complain("name the segment and its model once: as MODEL/SEGMENT, or as SEGMENT with --model MODEL")
    if options.model:
        name = segments.Name("", options.model, name.segment)
    wanted = segments.Wanted(name, options.location, options.virtual_capacity, options.limit)
    try:
        loaded = segments.load(options.endpoint, options.file, wanted, sys.stderr)
    except KeyboardInterrupt:
        print("membroker: interrupted: no segment was made", file=sys.stderr)
        raise
    if options.json:
        tables.print_json(loaded, sys.stdout)
        return 0
    shown = tables.short_name(loaded.name)
    print(
        f"{shown}: {format_size(loaded.size)} at the {loaded.location}, "
        f"{_count(loaded.tensors, 'tensor')}, in {loaded.seconds:.1f} s ({format_size(int(loaded.rate))}/s)\n"
        "it stays until it is deleted; any process of this tenant attaches it:\n"
        f'  with membroker.connect() as client, client.attach("{shown.partition("/")[2]}") as segment:\n'
        "      print(segment.index())"
    )
    return 0


def _segments_show(options: argparse.Namespace) -> int:
    if is_admin(options.endpoint, options.admin):
        options.complain("what is in a segment is read at its tenant's endpoint, not at the admin endpoint")
    contents = segments.contents(options.endpoint, options.name)
    if options.json:
        tables.print_json(contents, sys.stdout)
        return 0
    print(
        f"{tables.short_name(contents.name)}: {format_size(contents.size)} at the {contents.location}, "
        f"{_count(len(contents.tensors), 'tensor')}\n"
    )
    shown = [tables.metadata_table(contents.metadata)] if contents.metadata else []
    tables.print_tables([*shown, tables.tensors_table(contents.tensors)], sys.stdout)
    return 0


def _segments_delete(options: argparse.Namespace) -> int:
    admin = is_admin(options.endpoint, options.admin)
    if admin and not options.name.tenant:
        options.complain("at the admin endpoint a segment is TENANT/MODEL/SEGMENT")
    deleted = segments.delete(options.endpoint, options.name, admin=admin)
    if options.json:
        tables.print_json(deleted, sys.stdout)
        return 0
    print(f"{tables.short_name(deleted.name)} is deleted: nobody can attach it any more")
    if deleted.sessions:
        sessions = _count(deleted.sessions, "session")
        print(f"its {format_size(deleted.size)} come back when the last has left it that holds it: {sessions} now")
    return 0


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _doctor(options: argparse.Namespace) -> int:
    return run_doctor(options.endpoint, as_json=options.json)


def _demo(options: argparse.Namespace) -> int:
    if missing := missing_packages():
        print(
            f"membroker: the demo starts a daemon, and {', '.join(missing)} are missing for that: "
            "pip install 'membroker[broker]'",
            file=sys.stderr,
        )
        return 1
    # Imported when it is asked for: the demo starts a daemon, and brings what that takes.
    from .demo.scenes import main as demo

    # What it starts is in sessions of its own, and would go on without it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit)
    return demo()


def _exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


# --- The command line ---


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="membroker",
        description="Ask a GPU memory broker what it lends, to whom, and change a limit.",
        epilog="examples:\n  membroker demo\n  membroker doctor\n  membroker status\n  membroker models --watch 1\n"
        "  membroker segments load model.safetensors llama-7b/weights\n"
        "  membroker quota set acme/llama-7b --limit 8GiB\n\n"
        f"{_ENDPOINTS}\n`membroker COMMAND --help` has more. The daemon is another command, `membrokerd`.",
    )
    parser.add_argument("--version", action="version", version=f"membroker {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_books(commands)
    _add_segments(commands)
    _add_quota(commands)
    _add(
        commands,
        "tenants",
        operate.tenants,
        "what each tenant is charged, against which limit, at the admin endpoint",
        "  membroker tenants\n  membroker tenants --json | jq '.[] | {name, used: .books.device.used_bytes}'\n",
    )
    processes = _add(
        commands,
        "processes",
        operate.processes,
        "who uses the device beyond what is charged, at the admin endpoint",
        "  membroker processes\n  membroker processes --json | jq '.[] | select(.excess_bytes > 1e9)'\n",
    )
    processes.epilog = f"{processes.epilog}\n{_PROCESSES}"
    _add_ends(commands)
    doctor = _add(commands, "doctor", _doctor, "whether this machine can run a broker, and what to do about it", "")
    doctor.epilog = (
        "Exit status 0 unless something fails.\n\nexamples:\n  membroker doctor\n  membroker doctor --json\n"
        "  membroker doctor --endpoint /run/membroker/gpu-12345678/tenants/acme    can I enter this one?"
    )
    summary = "two tenants trade a card's memory, and outlive its broker, in a minute, without a GPU"
    demo = commands.add_parser("demo", help=summary, description=f"{summary[:1].upper()}{summary[1:]}.")
    demo.epilog = "It starts a daemon and workers of its own, and touches no other.\n\nexample:\n  membroker demo"
    demo.set_defaults(command=_demo)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose help keeps its lines, and that takes no shortened options."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings, allow_abbrev=False)  # type: ignore[arg-type]


if TYPE_CHECKING:
    # argparse has no public name for what add_subparsers returns.
    _Commands = argparse._SubParsersAction[_Parser]


def _add(
    commands: _Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    examples: str,
    *,
    inherits: bool = False,
) -> _Parser:
    """Add a command with what all have: its endpoint, --json, and examples in its help.

    `inherits`: it stands behind a command that has these too, and what was given there holds.
    """
    left_out = argparse.SUPPRESS if inherits else None
    parser = commands.add_parser(
        name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}.", epilog=f"examples:\n{examples}"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--endpoint", metavar="DIR", default=left_out, help="an endpoint's directory, or a device's")
    where.add_argument(
        "--device", metavar="INDEX|UUID", default=left_out, help="the broker of this device, as `nvidia-smi -L` has it"
    )
    parser.add_argument("--json", action="store_true", default=left_out or False, help="JSON, sizes in bytes")
    parser.set_defaults(command=run)
    return parser


def _add_books(commands: _Commands) -> None:
    status = _add(
        commands,
        "status",
        _status,
        "the device, its books, and what it shows itself; of every broker, where there are several",
        "  membroker status\n  membroker status --device 1\n  membroker status --json | jq '{uuid, draining}'\n",
    )
    models = _add(
        commands,
        "models",
        _models,
        "who is charged how much, against which limit",
        "  membroker models\n  membroker models --admin --watch 1\n  membroker models --json | jq '.[].books.device'\n",
    )
    models.add_argument("--watch", metavar="SECONDS", type=_seconds, help="show it again and again, until Ctrl-C")
    sessions = _add(
        commands,
        "sessions",
        _sessions,
        "the processes that are connected, and what they hold",
        "  membroker sessions\n",
    )
    for parser in (status, models, sessions):
        _add_admin(parser)


def _add_admin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--admin", action="store_true", help="everybody's books, at the device's admin endpoint")
    parser.epilog = f"{parser.epilog}\n{_ENDPOINTS}"


def _add_segments(commands: _Commands) -> None:
    listing = _add(
        commands,
        "segments",
        _segments,
        "the memory that has a name: list it, load a file into it, look into it, delete it",
        "  membroker segments\n  membroker segments --admin\n"
        "  membroker segments load model.safetensors llama-7b/weights\n"
        "  membroker segments show llama-7b/weights\n  membroker segments delete llama-7b/weights\n",
    )
    _add_admin(listing)
    actions = listing.add_subparsers(metavar="[ACTION]")
    load = _add(
        actions,
        "load",
        _segments_load,
        "make a segment of a safetensors file",
        "  membroker segments load model.safetensors llama-7b/weights\n"
        "  membroker segments load model.safetensors weights --model llama-7b --limit 8GiB\n",
        inherits=True,
    )
    load.add_argument("file", metavar="FILE", help="a safetensors file")
    show = _add(
        actions,
        "show",
        _segments_show,
        "the tensors of a segment: names, dtypes, shapes, offsets; and what else it says of itself",
        "  membroker segments show llama-7b/weights\n"
        "  membroker segments show llama-7b/weights --json | jq '.tensors[].name'\n",
        inherits=True,
    )
    delete = _add(
        actions,
        "delete",
        _segments_delete,
        "end a segment: its bytes come back when the last session has left it",
        "  membroker segments delete llama-7b/weights\n"
        "  membroker segments delete acme/llama-7b/weights --admin     whosever it is\n",
        inherits=True,
    )
    anywhere = "SEGMENT, MODEL/SEGMENT or TENANT/MODEL/SEGMENT"
    own = "MODEL/SEGMENT, or SEGMENT with --model"
    for parser, named in ((load, own), (show, anywhere), (delete, anywhere)):
        parser.add_argument("name", metavar="NAME", type=_segment, help=named)
        parser.set_defaults(complain=parser.error)
    load.add_argument("--model", metavar="MODEL", help="whose it is, and who is charged; or write it before the name")
    load.add_argument("--location", choices=("device", "host"), default="device")
    for option, what in (("limit", "limit"), ("virtual-capacity", "virtual capacity")):
        help_ = f"the model's {what}, as its workers register it"
        load.add_argument(f"--{option}", metavar="SIZE", type=_size, help=help_)
    delete.add_argument("--admin", action="store_true", default=argparse.SUPPRESS, help="any tenant's")


def _add_quota(commands: _Commands) -> None:
    quota = commands.add_parser(
        "quota",
        help="see and command limits, at the admin endpoint",
        description="See and command limits, at the admin endpoint.",
        epilog="examples:\n  membroker quota list\n  membroker quota set acme --limit 32GiB",
    )
    actions = quota.add_subparsers(metavar="ACTION", required=True)
    _add(actions, "list", operate.quota_list, "the limits in force by command", "  membroker quota list\n")
    change = _add(
        actions,
        "set",
        operate.quota_set,
        "command a limit, from now on; it is kept on disk until it is ended",
        "  membroker quota set acme --limit 32GiB                a tenant\n"
        "  membroker quota set acme/llama-7b --limit 8GiB        one of its models\n"
        "  membroker quota set acme --limit none                 what is configured holds again\n",
    )
    change.add_argument("name", metavar="NAME", type=_name, help="TENANT or TENANT/MODEL")
    change.add_argument("--limit", metavar="SIZE|none", type=_limit, required=True, help='as in "8GiB"')
    change.add_argument("--location", choices=("device", "host"), default="device")


def _add_ends(commands: _Commands) -> None:
    forget = _add(
        commands,
        "forget",
        operate.forget,
        "end a detached session whose process does not come back, at the admin endpoint",
        "  membroker forget sessions/1c0000000001      one that `membroker sessions --admin` shows as detached\n",
    )
    forget.epilog = f"{forget.epilog}\n{_FORGET}"
    forget.add_argument("name", metavar="SESSION", type=_session, help="as `membroker sessions --admin` shows it")
    drain = _add(
        commands,
        "drain",
        operate.drain,
        "lend nothing more and tell the workers, at the admin endpoint",
        "  membroker drain                          until `membroker undrain`, or a restart of the daemon\n"
        "  membroker drain --deadline 60 --exit     exit once nothing is charged, or after a minute\n",
    )
    drain.epilog = f"{drain.epilog}\n{_DRAIN}"
    drain.add_argument("--deadline", metavar="SECONDS", type=_seconds, help="when everything should be back; told them")
    drain.add_argument(
        "--exit", action="store_true", help="the daemon exits when nothing is charged, or at the deadline"
    )
    _add(commands, "undrain", operate.undrain, "lend again, at the admin endpoint", "  membroker undrain\n")


def _session(text: str) -> str:
    name = f"sessions/{text.removeprefix('sessions/')}"
    if names.parse_session(name) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a session, as in sessions/1c0000000001")
    return name


def _name(text: str) -> str:
    tenant, slash, model = text.removeprefix("tenants/").partition("/")
    model = model.removeprefix("models/")
    if not names.valid_tenant(tenant) or (slash and not names.valid_model(model)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not TENANT or TENANT/MODEL, as in acme or acme/llama-7b: {names.NAMES}"
        )
    return f"tenants/{tenant}/models/{model}" if model else f"tenants/{tenant}"


def _segment(text: str) -> segments.Name:
    try:
        return segments.Name.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _limit(text: str) -> tuple[int | None]:
    # In a tuple: argparse takes a bare None for an option that was not given.
    if text == "none":
        return (None,)
    try:
        return (parse_size(text),)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, or none") from error


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.05 to 86400")
    return value


if __name__ == "__main__":
    sys.exit(main())
