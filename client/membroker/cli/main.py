"""The command `membroker`: what a person, or a script, asks about a broker.

Owns the command line. Errors are one sentence on stderr and exit status 1; a wrong command line is 2; there are
no tracebacks. Commands for operators are in `operate`, those about segments in `segments`.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from .. import Client, __version__
from ..admin import Admin
from ..errors import MembrokerError
from ..ext import build, names
from ..ext import endpoint as endpoints
from ..types import DeviceStatus, ModelStatus, SessionStatus
from ..vmm.driver import DriverError
from . import commands, dra, explain, launch, operate, replay, segments, sleeping, tables, tenant, top
from .books import open_admin, open_books, read_on
from .commands import Command, Commands, Parser, add, add_bare, listing
from .doctor import missing_packages, run_doctor
from .sleeping import find_model

_DOCTOR = """
Each check that fails says what to do. The exit status is 0 unless a check fails.

It is a warning if no daemon runs or answers, or if the daemon is drained. It is a failure if --endpoint, --device or
MEMBROKER_ENDPOINT names a daemon that does not answer, or if a daemon cannot write its journal. To check only whether a
daemon is alive, use `membroker status --device N`: its exit status is 1 if that daemon does not answer.

`configuration` warns if the file was refused at the last reload: the next start would fail with it.

`unaccounted` warns if more memory is in use outside the books than the headroom has room for: the device then has less
free memory than the books say.

`descriptors` is what a daemon could have if this user started it in this shell. A unit has limits of its own, and a
running daemon logs them (`limits descriptors=… max_sessions=…`)."""

_STATUS = """
With several brokers, a table with a row for each comes first. Then, for each:

The first part is from the books, with a column for each location (`device` is the GPU's memory):

`lent`, `releasing` and `free` add up to `capacity`. `lent` is what workers and segments have. `releasing` is memory of
dead workers: it is charged until the device shows it free. `free` can be lent. `reserved` is guaranteed to tenants or
models that do not use it now: only programs that answer recalls can borrow it. `missing` is the part of `reserved` that
is neither free nor recallable, so that the guarantees cannot be kept now. `waiting` is what requests wait for.
`headroom` is never lent.

The second part is what the device itself reports: `in use` counts all processes. `unaccounted` is the part of it that
is not in the books: CUDA contexts that are not declared, and processes that do not use the broker.

In Kubernetes a third part has the pods, if the broker can see them, with what their sessions are charged.

A line `lending` says why the broker lends nothing more: it is drained, or its journal cannot be written.

Without --endpoint or --device the command shows every broker that is alive. The exit status is 1 if none is alive, or
if one that is alive or was named does not answer."""

_MODELS = """
`used` is what the model is charged. `recallable` is the part of it that the broker can recall; `late` is what the
broker has recalled and did not get in time, or got nothing of. `refused` counts refused requests since the model or the
daemon began: `membroker explain MODEL` says why.

With MODEL the command shows all figures of that model: also its addresses (virtual), its segments, what it declared,
what its dead workers still hold (releasing), its peak, extents, weight and sessions, and its share: what it gets, by
weight, while requests wait.

With --watch the command outlives the broker: it says why there are no numbers, and goes on when there are some."""

_PROCESSES = """
For each process that uses the device, the command shows what the driver sees it use, what its sessions are charged, and
the size of the segments that it holds. The rest is its excess: on a GPU a context that it has not declared (518 MiB on
an H200), memory of its own (cudaMalloc), or memory that it reported as released and kept. The broker cannot reclaim
that memory: let the process release it, or end the process.

Processes that the driver cannot see are not listed: those that only hold a descriptor of memory, those in another pid
namespace, and on the host driver those of other users, unless the broker runs as root. When `unaccounted` rises, the
daemon's log names the processes whose excess is larger than a context."""

_QUOTA = """
A number takes effect at once, and is kept on disk across restarts; `none` removes it.

A limit is the most that a model, or all models of a tenant together, may borrow. If you lower a limit, the broker
recalls what is above it. A guarantee is memory that a model or tenant can have at any time: while it is unused, it is
lent only to programs that answer recalls. A guarantee of 0 replaces a configured one. A model's guarantee must fit
into its limit, those of a tenant's models into the tenant's guarantee and limit, and all of them into the capacity;
otherwise the command is refused with the numbers. Programs that do not answer recalls keep their memory: if a guarantee
cannot be kept because of that, the answer says how much is missing (shortfall), and until that is released, only
programs that answer recalls borrow more.

A weight, 0 to 1000, by default 1, says how the memory above the guarantees is divided while requests wait for it: first
among the tenants, then among the models of each tenant, in proportion to their weights. What each has borrowed already
counts as part of its share. A waiting request within its model's share goes before those that are not, and the broker
recalls memory for it. Weight 0 is for work that can wait for all others: it gets what they leave."""

_FORGET = """
A session is detached when its process is alive but has no connection: the process has been stopped since before the
last restart of the daemon, or has closed its connection. The session stays charged, because the process may reconnect
and still has the memory mapped. A forgotten session is charged nothing, and its calls raise SessionLost. Nothing can
unmap its memory: while the process has it mapped, the device may be too full to lend it again. If you can end the
process, do that instead."""

_EVICT = """
The daemon sends the session's process SIGTERM, and SIGKILL 10 s later if it still lives. All sessions of that process
end with it, also those of other tenants and models. The command shows them and asks first, unless --yes is given. It
returns when SIGTERM is sent; `membroker sessions --admin` shows when the sessions are gone. Use it for a worker that is
late for a recall (the log names it) or hangs, so that its memory can be lent again.

Sealed segments and the models' quotas stay; a segment that the process was writing ends. Children of the process live
on, and a child that shares its memory keeps it. An orchestrator may start the process again: to prevent that, end it
there. If the daemon stops within the 10 s, it sends no SIGKILL.

The command is refused (status 1) if the daemon cannot signal the process, because it belongs to another user and the
daemon has no CAP_KILL, or because it is in another pid namespace, as in most Kubernetes pods. End such a process where
it runs; docs/systemd.md says how to let the daemon end other users' processes."""

_DRAIN = """
The daemon refuses to lend memory, to accept larger declarations and to attach segments (DRAINING). It tells every
worker, now or when it connects (Client.on_notice). Memory stays lent until its worker releases it; the command lists
the sessions that hold some, and waits, with a line for each that has released all. It waits until nothing is charged,
or until the deadline, or for --timeout seconds; its exit status is then 1, and the drain goes on. --timeout 0 does not
wait. With --exit the daemon exits with status 0, so the systemd unit in deploy/ leaves it
stopped (Restart=on-failure) until `systemctl start membrokerd`. Where the daemon is always restarted, as in
deploy/kubernetes, the next daemon lends again: remove it there. A second drain replaces the first, with its deadline
and --exit."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        if sys.stdout is None:  # this process was started with it closed
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it is standard output
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # names may have characters that the terminal cannot show
        parser, words = _parser(), sys.argv[1:] if arguments is None else arguments
        parser.refuse_early_option(words)
        options, unknown = parser.parse_known_args(words)
        if unknown:
            options.parser.refuse(unknown)
        if getattr(options, "device", None) is not None:
            options.endpoint = str(endpoints.find_device(options.device))
        command: Command = options.command
        return command(options)
    except (MembrokerError, DriverError) as error:
        print(f"membroker: {tables.printable(str(error))}", file=sys.stderr)
    except BrokenPipeError:  # the reader has left (`membroker models | head`)
        _print_no_more()
    except OSError as error:
        is_output = error.errno == errno.ENOSPC and error.filename is None  # files that are read have names
        print(f"membroker: {f'cannot write the output: {error.strerror}' if is_output else error}", file=sys.stderr)
        if is_output:
            _print_no_more()
    except KeyboardInterrupt:
        return 130
    return 1


def _print_no_more() -> None:
    """Drop what is still buffered for standard output. Python would try to write it at exit, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- Commands ---


def _status(options: argparse.Namespace) -> int:
    """Show the chosen device, else every device that has a living broker, and before them a row for each."""
    chosen = options.endpoint or os.environ.get(names.ENDPOINT_VARIABLE)
    devices = [] if chosen else list(map(str, endpoints.living_devices()))
    if len(devices) < 2:
        return _show_status(_ask_status(options.endpoint, options), options)
    answers: dict[str, _Status | None] = {}
    for device in devices:
        try:
            answers[device] = _ask_status(device, options)
        except MembrokerError as error:  # go on: the other devices are shown all the same
            print(f"membroker: {tables.printable(str(error))}", file=sys.stderr)
            answers[device] = None
    if not options.json:
        rows = {Path(device).name: answer and answer.device for device, answer in answers.items()}
        tables.answer(False, None, tables.devices_table(rows))
    for answer in filter(None, answers.values()):
        if not options.json:
            print()
        _show_status(answer, options)
    return int(None in answers.values())


class _Status(NamedTuple):
    """The books of a device, where it was entered, and its sessions."""

    device: DeviceStatus
    entered: str
    sessions: list[SessionStatus]


def _ask_status(endpoint: str | None, options: argparse.Namespace) -> _Status:
    with open_books(endpoint, options.admin) as books:
        return _Status(books.device(), str(books.endpoint), [] if options.json else books.sessions())


def _show_status(status: _Status, options: argparse.Namespace) -> int:
    shown = [tables.device_table(status.device, status.entered)]
    shown.append(tables.locations_table(status.device.locations.values()))
    pods = tables.pods_table(status.sessions)
    return tables.answer(options.json, status.device, *shown, *([pods] if pods.rows else []))


def _models(options: argparse.Namespace) -> int:
    def read(books: Client | Admin) -> tuple[list[ModelStatus], tables.TextTable]:
        models, sessions = books.models(), [] if options.json else books.sessions()
        if options.name is None:
            return models, tables.models_table(models, sessions)
        name = find_model([row.name for row in models], options.name, admin=isinstance(books, Admin))
        models = [row for row in models if row.name == name]
        return models, tables.model_table(models[0], sessions)

    def enter() -> AbstractContextManager[Client | Admin]:
        return open_books(options.endpoint, options.admin)

    if options.watch is None:
        with enter() as books:
            return tables.answer(options.json, *read(books))
    clear = "\x1b[H\x1b[J" if sys.stdout.isatty() and not options.json else ""
    trouble: str | None = None
    for found in read_on(enter, read, options.watch):
        if isinstance(found, tuple):
            sys.stdout.write(clear)
            tables.answer(options.json, *found)
            trouble = ""
        elif trouble is None:
            raise found
        elif trouble != str(found):
            trouble = str(found)
            sys.stdout.write(clear)
            sys.stdout.flush()
            print(f"membroker: {tables.printable(trouble)}", file=sys.stderr)
    raise AssertionError("read_on has no end")


def _tenants(options: argparse.Namespace) -> int:
    with open_admin(options.endpoint) as books:
        tenants = books.tenants()
        table = tables.tenants_table(tenants, [] if options.json else books.sessions())
    return tables.answer(options.json, tenants, table)


def _demo(options: argparse.Namespace) -> int:
    if missing := missing_packages():
        print(
            f"membroker: the demo starts a daemon, which needs {', '.join(missing)}: pip install 'membroker[broker]'",
            file=sys.stderr,
        )
        return 1
    # Imported late: the demo starts a daemon, and imports all that this takes.
    from .demo.scenes import main as demo

    commands.leave_at_signals()  # the processes that it starts are in sessions of their own, and would outlive it
    return demo()


# --- The command line ---


def _parser() -> Parser:
    parser = Parser(
        prog="membroker",
        description="Ask a GPU memory broker what it lends; start programs with it; change limits.",
        epilog="examples:\n  membroker demo\n  membroker doctor\n  membroker status\n  membroker models --watch 1\n"
        "  membroker top\n  membroker explain llama-7b\n"
        "  membroker run --model llama-7b --limit 8GiB -- python serve.py\n"
        "  membroker segments load model.safetensors llama-7b/weights\n"
        "  membroker quota set acme/llama-7b --limit 8GiB\n"
        f"{commands.ENDPOINTS}\n\n`membroker COMMAND --help` has more. The daemon is another command, `membrokerd`.",
    )
    parser.add_argument("--version", action="version", version=f"membroker {build.version_text(__version__)}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_first(subparsers)
    launch.add_command(subparsers)
    _add_books(subparsers)
    segments.add_commands(subparsers)
    top.add_command(subparsers)
    explain.add_command(subparsers)
    _add_quota(subparsers)
    tenant.add_command(subparsers)
    dra.add_command(subparsers)
    sleeping.add_commands(subparsers)
    _add_ends(subparsers)
    replay.add_command(subparsers)
    return parser


def _add_first(subparsers: Commands) -> None:
    add_bare(
        subparsers,
        "demo",
        "show what the broker does, in about 15 seconds: no GPU, no root, no daemon",
        "demo",
        "\nIt starts a daemon and workers of its own, and touches no others.",
    ).set_defaults(command=_demo)
    add(
        subparsers,
        "doctor",
        run_doctor,
        "check whether this machine can run a broker",
        "doctor\ndoctor --json\ndoctor --endpoint /run/membroker/gpu-12345678/tenants/acme    may this user connect?",
        _DOCTOR,
    )


def _add_books(subparsers: Commands) -> None:
    add(
        subparsers,
        "status",
        _status,
        "the device and its memory, of every broker of this machine",
        "status\nstatus --device 1\nstatus --json | jq '{uuid, draining}'",
        _STATUS,
        admin=True,
    )
    models = add(
        subparsers,
        "models",
        _models,
        "what each model uses, may use and waits for",
        "models\nmodels --admin --watch 1\nmodels llama-7b                           all figures of one model\n"
        "models --json | jq '.[].books.device'",
        _MODELS,
        admin=True,
    )
    models.add_argument("name", metavar="MODEL", nargs="?", help="MODEL or TENANT/MODEL: show all its figures")
    models.add_argument("--watch", metavar="SECONDS", type=commands.seconds, help="repeat every SECONDS, until Ctrl-C")
    add(
        subparsers,
        "sessions",
        listing(lambda books: books.sessions(), tables.sessions_table),
        "the processes that are connected, and what they hold",
        "sessions\nsessions --admin --json | jq '.[] | select(.state == \"detached\")'",
        admin=True,
    )
    add(
        subparsers,
        "tenants",
        _tenants,
        "what each tenant uses, may use and waits for",
        "tenants\ntenants --json | jq '.[] | {name, used: .books.device.used_bytes}'",
        commands.OPERATOR,
    )
    add(
        subparsers,
        "processes",
        listing(lambda books: books.processes(), tables.processes_table),
        "device memory per process, and how much exceeds its charge",
        "processes\nprocesses --json | jq '.[] | select(.excess_bytes > 1e9)'",
        _PROCESSES + commands.OPERATOR,
    ).set_defaults(admin=True)


def _add_ends(subparsers: Commands) -> None:
    forget = add(
        subparsers,
        "forget",
        operate.forget,
        "end a detached session whose process will not come back",
        "forget sessions/1c0000000001      a session that `membroker sessions --admin` shows as detached",
        _FORGET + commands.OPERATOR,
    )
    commands.add_session(forget)
    evict = add(
        subparsers,
        "evict",
        operate.evict,
        "end the process of a session, to free its memory",
        "evict sessions/1c0000000001           show the process and its sessions, and ask\n"
        "evict sessions/1c0000000001 --yes     do not ask, as in a script",
        _EVICT + commands.OPERATOR,
    )
    commands.add_session(evict)
    evict.add_argument("--yes", action="store_true", help="do not ask")
    drain = add(
        subparsers,
        "drain",
        operate.drain,
        "stop lending, and tell the workers",
        "drain                          until `membroker undrain`, or a restart of the daemon\n"
        "drain --timeout 600            wait for ten minutes at most\n"
        "drain --deadline 60 --exit     the daemon exits once nothing is charged, or after a minute",
        _DRAIN + commands.OPERATOR,
    )
    drain.add_argument(
        "--deadline",
        metavar="SECONDS",
        type=commands.seconds,
        help="when all memory should be released; workers are told",
    )
    drain.add_argument(
        "--timeout", metavar="SECONDS", type=commands.timeout, help="how long this command waits; 0: not at all"
    )
    drain.add_argument("--exit", action="store_true", help="exit when nothing is charged, or at the deadline")
    add(subparsers, "undrain", operate.undrain, "lend again", "undrain", commands.OPERATOR)


def _add_quota(subparsers: Commands) -> None:
    summary = "show and set limits, guarantees and weights"
    quota = add_bare(subparsers, "quota", summary, "quota list --all\nquota set acme --limit 32GiB --guarantee 8GiB")
    actions = quota.add_subparsers(metavar="ACTION", required=True)
    add(
        actions,
        "list",
        operate.quota_list,
        "the limits, guarantees and weights that were set by command",
        "quota list\nquota list --all",
        commands.OPERATOR,
    ).add_argument("--all", action="store_true", help="also those of the configuration: all numbers that are in force")
    change = add(
        actions,
        "set",
        operate.quota_set,
        "set a limit, a guarantee or a weight, until it is removed",
        "quota set acme --limit 32GiB                a tenant\n"
        "quota set acme/llama-7b --guarantee 8GiB    one of its models can have 8 GiB at any time\n"
        "quota set acme --weight 2                   twice the share of a tenant with weight 1\n"
        "quota set acme --limit none                 use the configured limit again\n"
        "quota set acme --guarantee 8GiB --dry-run   would it be refused?",
        _QUOTA + commands.OPERATOR,
    )
    change.add_argument("name", metavar="NAME", type=_name, help="TENANT or TENANT/MODEL")
    change.add_argument(
        "--limit", metavar="SIZE|none", type=commands.limit, help='the most it may borrow, as in "8GiB"'
    )
    change.add_argument(
        "--guarantee", metavar="SIZE|none", type=commands.limit, help="memory that it can have at any time"
    )
    change.add_argument(
        "--weight", metavar="N|none", type=commands.weight, help="its part of the rest while requests wait: 0 to 1000"
    )
    change.add_argument("--dry-run", action="store_true", help="only say whether it would be refused")
    commands.add_location(change)


def _name(text: str) -> str:
    owner, slash, model = text.removeprefix("tenants/").partition("/")
    model = model.removeprefix("models/")
    if not names.valid_tenant(owner) or (slash and not names.valid_model(model)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not TENANT or TENANT/MODEL, as in acme or acme/llama-7b: "
            + names.grammar("MODEL" if names.valid_tenant(owner) else "TENANT")
        )
    return f"tenants/{owner}/models/{model}" if model else f"tenants/{owner}"


if __name__ == "__main__":
    sys.exit(main())
