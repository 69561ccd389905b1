"""What only an operator may, at the admin endpoint: limits, processes, forgotten sessions, the drain.

Owns what these commands print. The command line is `main`, the calls are `admin`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from ..arguments import location_of
from ..errors import BrokerUnavailable
from ..types import DeviceStatus, SegmentStatus, SessionStatus
from ..vmm.sizes import format_size
from . import tables
from .admin import Admin, Quota, open_admin, open_device


def quota_set(options: argparse.Namespace) -> int:
    """Command a limit, or end a command."""
    with open_admin(options.endpoint) as admin:
        quota = admin.set_quota(options.name, location_of(options.location), options.limit[0])
        notes = [] if options.json or quota.limit_bytes is None else list(_notes_on(quota, quota.limit_bytes, admin))
    if options.json:
        tables.print_json(quota, sys.stdout)
        return 0
    limit = "as configured" if quota.limit_bytes is None else format_size(quota.limit_bytes)
    print(
        f"{tables.short_name(quota.name)} at the {quota.location}: limit {limit}, used {format_size(quota.used_bytes)}"
    )
    for note in notes:
        print(note)
    return 0


def _notes_on(quota: Quota, limit: int, admin: Admin) -> Iterator[str]:
    """Yield what an operator may not expect of a limit: it is in force all the same."""
    if quota.used_bytes > limit:
        yield "it uses more than that: nothing is taken away, and nothing more is lent until it gives some back"
    capacity = admin.device().locations[quota.location].capacity_bytes
    if limit > capacity:
        yield f"that is more than the capacity, {format_size(capacity)}, which holds before it"
    if quota.name not in _known(admin):
        what = "model" if "/models/" in quota.name else "tenant"
        yield f"no {what} of that name is there now: the limit waits for its first session (`membroker models --admin`)"


def _known(admin: Admin) -> set[str]:
    """Return the names of the models, and of the tenants that have one or have a session."""
    models = {model.name for model in admin.models()}
    return models | {name.partition("/models/")[0] for name in models} | {one.tenant for one in admin.sessions()}


def quota_list(options: argparse.Namespace) -> int:
    """Show what is commanded."""
    with open_admin(options.endpoint) as admin:
        quotas = admin.quotas()
    if options.json:
        tables.print_json(quotas, sys.stdout)
    else:
        tables.print_tables([tables.quotas_table(quotas)], sys.stdout)
    return 0


def tenants(options: argparse.Namespace) -> int:
    """Show the tenants."""
    with open_admin(options.endpoint) as admin:
        found = admin.tenants()
    if options.json:
        tables.print_json(found, sys.stdout)
    else:
        tables.print_tables([tables.tenants_table(found)], sys.stdout)
    return 0


def processes(options: argparse.Namespace) -> int:
    """Show who uses the device."""
    with open_admin(options.endpoint) as admin:
        found = admin.processes()
    if options.json:
        tables.print_json(found, sys.stdout)
    else:
        tables.print_tables([tables.processes_table(found)], sys.stdout)
    return 0


def forget(options: argparse.Namespace) -> int:
    """Credit what a detached session is charged, and end it."""
    with open_admin(options.endpoint) as admin:
        session = admin.forget(options.name)
    if options.json:
        tables.print_json(session, sys.stdout)
        return 0
    size = sum(books.used_bytes for books in session.books.values())
    print(
        f"{session.name} of {tables.short_name(session.tenant)} is forgotten: {format_size(size)} are charged no more"
    )
    process = f"process {session.pid}" if session.pid else "process"  # of another pid namespace: no number
    print(f"what its {process} still has mapped counts as unaccounted until it ends; the rest can be lent again")
    return 0


def drain(options: argparse.Namespace) -> int:
    """Lend nothing more, and say who holds what."""
    deadline = None if options.deadline is None else datetime.now(UTC) + timedelta(seconds=options.deadline)
    with open_device(options.endpoint) as admin:
        device = admin.drain(deadline, exits=options.exit)
        sessions, segments = _who_holds(admin, device, exits=options.exit)
    if options.json:
        tables.print_json({"device": device, "sessions": sessions, "segments": segments}, sys.stdout)
        return 0
    print("nothing more is lent, and the workers are told")
    if not sessions and not segments:
        print("nothing is charged" + (": the daemon exits" if options.exit else ""))
        return 0
    print("these hold out:\n")
    shown = [tables.sessions_table(sessions)] if sessions else []
    tables.print_tables([*shown, *([tables.segments_table(segments)] if segments else [])], sys.stdout)
    print()
    if segments:
        print("a segment is charged until it is deleted: `membroker segments delete TENANT/MODEL/SEGMENT --admin`")
    if options.exit:
        late = "" if options.deadline is None else f", or in {options.deadline:g} s, whatever is charged then"
        print(f"the daemon exits when nothing is charged any more{late}")
    return 0


def _who_holds(admin: Admin, device: DeviceStatus, *, exits: bool) -> tuple[list[SessionStatus], list[SegmentStatus]]:
    """Return the sessions that hold something, and the segments; a daemon that is to exit may do so meanwhile."""
    if not any(books.lent_bytes or books.releasing_bytes for books in device.locations.values()):
        return [], []
    try:
        sessions, segments = admin.sessions(), admin.segments()
    except BrokerUnavailable:
        if not exits:
            raise
        return [], []
    return [one for one in sessions if one.segments or any(books.used_bytes for books in one.books.values())], segments


def undrain(options: argparse.Namespace) -> int:
    """Lend again."""
    with open_device(options.endpoint) as admin:
        device = admin.undrain()
    if options.json:
        tables.print_json(device, sys.stdout)
        return 0
    print("it lends again")
    return 0
