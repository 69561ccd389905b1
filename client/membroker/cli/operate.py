"""Commands for operators, at the admin endpoint: set a quota, forget or evict a session, drain the device.

Owns what they print. The command line is in `main`, the calls are in `admin`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta

from ..admin import Admin, QuotaStatus
from ..errors import BrokerUnavailable, NotFound
from ..ext import arguments
from ..types import SessionStatus
from ..vmm.sizes import format_exact
from . import holders, tables
from .books import open_admin, open_device
from .commands import did_you_mean


def quota_list(options: argparse.Namespace) -> int:
    """Show the quotas that were set."""
    with open_admin(options.endpoint) as admin:
        quotas = admin.quotas(configured=options.all)
    return tables.answer(options.json, quotas, tables.quotas_table(quotas))


def quota_set(options: argparse.Namespace) -> int:
    """Set a limit, a guarantee or a weight by command, or remove it."""
    given = {"limit_bytes": options.limit, "guarantee_bytes": options.guarantee, "weight": options.weight}
    numbers = {field: number[0] for field, number in given.items() if number is not None}
    if not numbers:
        options.parser.error("one of the arguments --limit --guarantee --weight is required")
    with open_admin(options.endpoint) as admin:
        known = _known(admin)  # a tenant that has a quota is known
        try:
            location = arguments.location_of(options.location)
            quota = admin.set_quota(options.name, location, numbers, dry_run=options.dry_run)
        except NotFound as error:
            tenant = arguments.parts_of(options.name)[0]
            tenants = {arguments.parts_of(name)[0] for name in known}
            meant = ": `membroker quota list` shows what is set for it" if tenant in tenants else ""
            raise NotFound(f"{error}{meant or did_you_mean(tenant, sorted(tenants))}", error.reason) from error
        notes = [] if options.json else list(_notes_on(quota, numbers, known, admin, dry_run=options.dry_run))
    line = (
        f"{tables.short_name(quota.name)}, {quota.location} memory: limit {_in_words(quota.limit_bytes)}, "
        f"guarantee {_in_words(quota.guarantee_bytes)}, "
        f"weight {'as configured' if quota.weight is None else quota.weight}, used {format_exact(quota.used_bytes)}"
    )
    return tables.answer(options.json, quota, "nothing is set; it would be:\n" * options.dry_run + line, *notes)


def _in_words(size: int | None) -> str:
    return "as configured" if size is None else format_exact(size)


def _notes_on(
    quota: QuotaStatus, numbers: Mapping[str, int | None], known: Collection[str], admin: Admin, *, dry_run: bool
) -> Iterator[str]:
    """Yield what may surprise an operator about numbers that are now in force, or would be."""
    limit, guarantee, weight = (numbers.get(field) for field in ("limit_bytes", "guarantee_bytes", "weight"))
    if limit is not None:
        if quota.used_bytes > limit:
            yield "it uses more than the limit: it borrows nothing more, and keeps what its programs do not release"
        capacity = admin.device().locations[quota.location].capacity_bytes
        if limit > capacity:
            yield f"the limit is more than the capacity, {format_exact(capacity)}, which applies as well"
    if guarantee is not None and quota.shortfall_bytes and not dry_run:
        yield (
            f"{format_exact(quota.shortfall_bytes)} of all guarantees cannot be kept yet: others have borrowed that "
            "memory, and it cannot be recalled or is late (`membroker models --admin`). Until they have released it, "
            "only programs that answer recalls borrow more"
        )
    if (limit or guarantee or weight is not None) and quota.name not in known:
        what = "model" if "/models/" in quota.name else "tenant"
        yield f"there is no {what} of that name now: the quota takes effect when there is (`membroker models --admin`)"
        if guarantee:
            yield "the guaranteed memory is reserved for it already"


def _known(admin: Admin) -> set[str]:
    """Return the names of the models, and of the tenants that are configured, have a session or are charged."""
    return {model.name for model in admin.models()} | {tenant.name for tenant in admin.tenants()}


def forget(options: argparse.Namespace) -> int:
    """Credit all that a detached session is charged, and end it."""
    with open_admin(options.endpoint) as admin:
        try:
            session = admin.forget(options.name)
        except NotFound as error:
            if not any(session.name == options.name and session.state == "open" for session in admin.sessions()):
                raise
            instead = f"to end its process: `membroker evict {options.name}`"
            raise NotFound(f"{error}; {instead}", error.reason) from error
    size = format_exact(sum(books.used_bytes for books in session.books.values()))
    process = f"process {session.pid}" if session.pid else "process"  # in another pid namespace it has no number
    return tables.answer(
        options.json,
        session,
        f"{session.name} of {tables.short_name(session.tenant)} is forgotten: {size} are no longer charged",
        f"memory that its {process} still has mapped counts as unaccounted until it ends; the rest can be lent again",
    )


def evict(options: argparse.Namespace) -> int:
    """End the process of a session, after a question unless --yes was given."""
    with open_admin(options.endpoint) as admin:
        sessions = _of_one_process(admin.sessions(), options.name)
        if sessions and not options.yes:
            if not _can_ask():
                options.parser.error("there is no terminal on which to ask before the process is ended: give --yes")
            if not _is_confirmed(sessions):
                print("nothing was ended", file=sys.stderr)
                return 1
        session = admin.evict(options.name)
    sessions = sessions or [session]
    return tables.answer(
        options.json,
        {"session": session, "sessions": sessions},
        f"{_process_of(sessions)} was sent SIGTERM, and gets SIGKILL 10 s later if it still lives",
        *([tables.sessions_table(sessions)] * options.yes),
        "its memory can be lent again once the device shows it free; its sealed segments stay",
    )


def _of_one_process(sessions: list[SessionStatus], name: str) -> list[SessionStatus]:
    """Return all sessions of the process that has the session `name`, that one first; none if it is unknown or dead.

    A dead process's pid may be another's by now. The broker gives pid 0 to processes that it cannot see: then only the
    session itself is known to be of the process.
    """
    living = [session for session in sessions if session.state != "releasing"]
    chosen = [session for session in living if session.name == name]
    pids = {session.pid for session in chosen if session.pid}
    return chosen + [session for session in living if session.pid in pids and session.name != name]


def _process_of(sessions: list[SessionStatus]) -> str:
    tenants = sorted({tables.short_name(session.tenant) for session in sessions})
    return f"{tables.process_of(sessions[0])} of {' and '.join(tenants)}"


def _can_ask() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _is_confirmed(sessions: list[SessionStatus]) -> bool:
    table = tables.render(tables.sessions_table(sessions), sys.stderr)
    print(f"{_process_of(sessions)} would be ended, with all its sessions:\n\n{table}", file=sys.stderr)
    print("end it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def drain(options: argparse.Namespace) -> int:
    """Stop lending, list the sessions and segments that still hold memory, and wait until none does."""
    waits = options.timeout if options.timeout is not None else options.deadline
    with open_device(options.endpoint) as admin:
        last = holders.of_device(admin)
        ends = math.inf if options.deadline is None else time.monotonic() + options.deadline
        deadline = None if options.deadline is None else datetime.now(UTC) + timedelta(seconds=options.deadline)
        device = admin.drain(deadline, exits=options.exit)

        def look() -> holders.Held:
            """Look. A daemon that has exited holds nothing, or after its deadline what it held when last seen."""
            nonlocal last
            try:
                last = holders.of_device(admin)
            except BrokerUnavailable:
                if not options.exit:
                    raise
                if time.monotonic() < ends:
                    last = holders.Held()
            return last

        held = look()
        if not options.json:
            tables.answer(
                False, None, "the device lends nothing more, and the workers are told", *_still(held, options)
            )
        if held and waits != 0:
            held = holders.wait(look, held, waits, holders.sayer(options.json))
        if not held:
            said = ["nothing is charged" + (": the daemon exits" if options.exit else "")]
        elif waits == 0:
            said = []
        else:
            said = [f"{format_exact(held.charged)} were still charged at the end of the wait: the drain goes on"]
    answer = {"device": device, "sessions": held.sessions, "segments": held.segments}
    tables.answer(options.json, answer, *said)
    return int(bool(held) and waits != 0)


def _still(held: holders.Held, options: argparse.Namespace) -> Iterator[str | tables.TextTable]:
    if not held:
        return
    yield from holders.still(held)
    if held.segments:
        yield "a segment is charged until it is deleted: `membroker segments delete TENANT/MODEL/SEGMENT --admin`"
    if options.exit:
        late = "" if options.deadline is None else f", or in {options.deadline:g} s, whatever is charged then"
        yield f"the daemon exits when nothing is charged any more{late}"


def undrain(options: argparse.Namespace) -> int:
    """Lend again."""
    with open_device(options.endpoint) as admin:
        device = admin.undrain()
    return tables.answer(options.json, device, "the device lends again")
