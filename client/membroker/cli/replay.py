"""The command `membroker replay`: what was recorded, once more, with another capacity, limits, guarantees or weights.

Owns the options and what is printed. The core belongs to the daemon, which the library never imports: a process of the
daemon's package replays, and answers with figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..ext import names
from ..vmm.sizes import format_size
from . import commands, tables
from .commands import Commands
from .doctor import missing_packages

_NOTES = """
FILE is a trace. With `record = true` in its configuration, membrokerd writes trace.jsonl in the device's
state_directory, and renames it to trace-old.jsonl when it is full. Give both, the old one first, to replay all of it.
Each start of the daemon begins a new part of a trace, and each part is replayed from what was lent at its beginning.

The command shows two lines for each model: what happened, and what would have happened with the numbers of the options.
Without options both lines should agree. The replay uses the daemon's own core. Programs do what they did: they ask at
the same times, keep each loan for the same time, and answer recalls as they did. A program that was refused may have
asked many times: if the replay grants these requests, each counts, and is kept for as long as other loans of its model
(the median). So a replay says which requests fit, not what programs would have done with the memory.

The limit that a program asked for stays in force: --limit changes only the operator's limit.

FILE may also be a daemon's journal (<runtime>/<device>/state/journal), with --capacity. A journal has no times and no
refused requests, so it only shows which loans since its beginning would not have fit."""
_NAMED: Mapping[str, tuple[str, Callable[[str], tuple[int | None]], str]] = {
    "limit": ("NAME=SIZE", commands.limit, "the limit of a tenant, or of TENANT/MODEL; none: no limit"),
    "guarantee": ("NAME=SIZE", commands.limit, "the guarantee of a tenant, or of TENANT/MODEL; none: no guarantee"),
    "weight": ("NAME=NUMBER", commands.weight, "the weight of a tenant, or of TENANT/MODEL; none: 1"),
}


def add_command(subparsers: Commands) -> None:
    """Add `replay`."""
    parser = commands.add_bare(
        subparsers,
        "replay",
        "re-run a recorded trace with another capacity or other limits",
        "replay trace.jsonl                                  the same numbers: both lines should agree\n"
        "replay trace.jsonl --capacity 48GiB                 would a smaller GPU do?\n"
        "replay trace-old.jsonl trace.jsonl --limit red=32GiB --guarantee red/chat=8GiB --weight blue=2\n"
        "replay trace.jsonl --capacity 48GiB --json | jq '.models[] | {name, refused: .replayed.refused}'",
        _NOTES,
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="a trace, or a journal")
    parser.add_argument("--capacity", metavar="SIZE", type=commands.size, help='how much is lent, as in "48GiB"')
    for option, (metavar, kind, words) in _NAMED.items():
        parser.add_argument(
            f"--{option}",
            metavar=metavar,
            type=_named(metavar, kind),
            action="append",
            default=[],
            help=f"{words}; repeatable",
        )
    commands.add_location(parser)
    parser.add_argument("--json", action="store_true", help="JSON, sizes in bytes")
    parser.set_defaults(command=run)


def _named(
    metavar: str, kind: Callable[[str], tuple[int | None]]
) -> Callable[[str], tuple[str, str | None, int | None]]:
    """Return the type of an argument NAME=SIZE or NAME=NUMBER: a tenant, a model or None, and the number."""

    def read(text: str) -> tuple[str, str | None, int | None]:
        name, equals, number = text.partition("=")
        tenant, slash, model = name.partition("/")
        if not equals or not names.valid_tenant(tenant) or (slash and not names.valid_model(model)):
            like = "8GiB" if metavar == "NAME=SIZE" else "2"
            raise argparse.ArgumentTypeError(f"{text!r} is not {metavar}, as in acme={like} or acme/llama-7b={like}")
        return tenant, model or None, kind(number)[0]

    return read


def run(options: argparse.Namespace) -> int:
    """Let the daemon's package replay, and show the figures."""
    if missing := missing_packages():
        print(
            f"membroker: a replay runs the daemon's core, which needs {', '.join(missing)}: "
            "pip install 'membroker[broker]'",
            file=sys.stderr,
        )
        return 1
    quotas: dict[tuple[str, str | None], dict[str, int | None]] = {}
    for option in _NAMED:
        for tenant, model, number in getattr(options, option):
            quotas.setdefault((tenant, model), {})[option] = number
    asked = {
        "files": options.files,
        "location": options.location,
        "capacity": options.capacity,
        "quotas": [[*key, numbers] for key, numbers in quotas.items()],
    }
    command = [sys.executable, "-m", "membrokerd.replay"]
    # The process that replays ends with this one, and without a word: in a group of its own no Ctrl-C reaches it, and
    # at a KeyboardInterrupt `subprocess` would first close its input and wait.
    commands.leave_at_signals(signal.SIGINT)
    done = subprocess.run(
        command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=False, process_group=0
    )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        hint = ": was the memory full? `dmesg` says so" if name == "SIGKILL" else ""
        print(f"membroker: the replay was ended by {name}{hint}", file=sys.stderr)
        return 1
    if done.returncode:
        return done.returncode
    found = json.loads(done.stdout)
    for sentence in _absent(quotas, found["models"], options.location):
        print(f"membroker: {sentence}", file=sys.stderr)
    return tables.answer(options.json, found, _table(found["models"]), *_sentences(found))


def _absent(quotas: Iterable[tuple[str, str | None]], models: list[dict[str, Any]], location: str) -> Iterator[str]:
    """Yield a sentence for each name that asked for nothing: most often it is misspelled, and changes no figure."""
    known = [tables.short_name(model["name"]) for model in models if model["location"] == location]
    tenants = {name.partition("/")[0] for name in known}
    for tenant, model in quotas:
        name = f"{tenant}/{model}" if model else tenant
        if name not in (known if model else tenants):
            yield (
                f"{name} asked for no {location} memory in this recording: check the name "
                f"({', '.join(known) or 'nothing did'})"
            )


def _table(models: list[dict[str, Any]]) -> tables.TextTable:
    rows = [
        row
        for model in models
        for row in (_row(_name(model), model["happened"]), _row("  replayed", model["replayed"]))
    ]
    columns = ("model", ">requests", ">granted", "refused", ">waited", ">in all", ">p99", ">recalled", ">late")
    return tables.TextTable(columns, rows, "nothing was asked for")


def _name(model: dict[str, Any]) -> str:
    name = tables.short_name(model["name"])
    return name if model["location"] == "device" else f"{name} ({model['location']})"


def _row(name: str, found: dict[str, Any]) -> list[str]:
    refused = ", ".join(f"{count} {reason}" for reason, count in found["refused"].items())
    given_up = f"{found['given_up']} given up" if found["given_up"] else ""
    waited = bool(found["waited"])
    return [
        *(name, str(found["requests"]), str(found["granted"])),
        ", ".join(filter(None, (refused, given_up))) or tables.NONE,
        str(found["waited"]) if waited else tables.NONE,
        f"{found['waited_ms'] / 1000:.1f} s" if waited else tables.NONE,
        f"{found['waited_p99_ms'] / 1000:.2f} s" if waited else tables.NONE,
        f"{format_size(found['recalled_bytes'])} in {found['recalls']}" if found["recalls"] else tables.NONE,
        str(found["late_recalls"] or tables.NONE),
    ]


def _sentences(found: dict[str, Any]) -> Iterator[str]:
    """Yield what the numbers of the table cannot say."""
    if found["journal"]:
        yield "a journal has no times and no refused requests: each loan in it is taken for a request that was granted"
    else:
        parts = f"{found['parts']} part{'s' * (found['parts'] != 1)}"
        yield f"recorded: {found['seconds']} s from {found['begin']} on, in {parts}"
    if found["unfit_bytes"]:
        yield f"{format_size(found['unfit_bytes'])} that were lent when a part began do not fit, and are left out"
    if found["granted_now"]:
        yield (
            f"granted now and refused then: {found['granted_now']} requests. How long they would have kept the memory "
            "is a guess: as long as other loans of their model did, in the middle (median)"
        )
