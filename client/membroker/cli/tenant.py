"""The commands `membroker tenant`: make, change, delete and list tenants while the daemon runs.

Owns their command lines and what they print. The calls are in `admin`.
"""

from __future__ import annotations

import argparse
import grp
import pwd
import re
from collections.abc import Callable
from typing import Any

from ..admin import TenantStatus
from ..ext import names
from ..vmm.sizes import format_exact
from . import commands, holders, tables
from .books import open_admin
from .commands import Commands, Parser, add, add_bare

_SETTINGS = """
The settings are those of a tenant in membrokerd.toml, and take effect at once. `none` ends one, so that its default
applies. The daemon keeps them on disk beside the quotas; `membroker quota set` changes the same limits, guarantees and
weights. All guarantees together must fit into the capacity, otherwise the command is refused with the numbers."""

_CREATE = """
Programs enter the tenant at the directory that the command shows, which has the tenant's sockets. A tenant of
membrokerd.toml stays as it is; if one of the same name is added there later, the file's settings apply. At most 64
tenants can be made by command."""

_SET = """
Of a tenant of membrokerd.toml, only limits, guarantees and weights can be set by command: change the rest in the file,
and reload the daemon. --owner, --group and --mode are those of sockets that are open: delete the tenant, and create it
again."""

_DELETE = """
At once, the tenant takes no new sessions and borrows nothing more, and its guarantees are free for others. The daemon
deletes its segments, asks its programs for all that can be recalled, and tells them that the tenant is drained
(Client.on_notice). When nothing of it is lent any more, the daemon closes the endpoint and forgets the tenant, with its
quotas. There is no way back.

The command shows which sessions still have memory, and waits, with a line for each that has released all. --timeout
bounds the wait: the exit status is then 1, and the deletion goes on, also after a restart of the daemon. --timeout 0
does not wait. `membroker evict SESSION` ends a process that does not release."""


def add_command(subparsers: Commands) -> None:
    """Add `membroker tenant`."""
    tenant = add_bare(
        subparsers,
        "tenant",
        "make, change and delete tenants while the daemon runs",
        "tenant create pod-7f9c --guarantee 8GiB --limit 16GiB --owner 1000 --mode 0600\ntenant delete pod-7f9c",
    )
    actions = tenant.add_subparsers(metavar="ACTION", required=True)
    add(actions, "list", _list, "the tenants that were made by command", "tenant list", commands.OPERATOR)
    create = add(
        actions,
        "create",
        _create,
        "make a tenant, until it is deleted",
        "tenant create acme                                   as `[tenants.acme]` in membrokerd.toml\n"
        "tenant create acme --guarantee 8GiB --limit 16GiB\n"
        "tenant create acme --owner alice --mode 0600         only alice may open its sockets\n"
        "tenant create acme --guarantee 8GiB --dry-run        would it be refused?",
        _SETTINGS + "\n" + _CREATE + commands.OPERATOR,
    )
    _add_settings(create)
    create.add_argument("--owner", metavar="USER", type=_user, help="the user that the sockets belong to")
    create.add_argument("--group", metavar="GROUP", type=_group, help="their group")
    create.add_argument("--mode", metavar="MODE", type=_mode, help="their permissions (0660)")
    change = add(
        actions,
        "set",
        _set,
        "change settings of a tenant",
        "tenant set acme --limit 32GiB --weight 2\ntenant set acme --uids 1000,1001\ntenant set acme --uids none",
        _SETTINGS + "\n" + _SET + commands.OPERATOR,
    )
    _add_settings(change)
    delete = add(
        actions,
        "delete",
        _delete,
        "delete a tenant when nothing of it is lent any more",
        "tenant delete acme                  wait until it is gone\n"
        "tenant delete acme --timeout 60     wait for a minute at most",
        _DELETE + commands.OPERATOR,
    )
    _add_name(delete)
    delete.add_argument(
        "--timeout", metavar="SECONDS", type=commands.timeout, help="how long this command waits; 0: not at all"
    )


def _add_name(parser: Parser) -> None:
    parser.add_argument("name", metavar="TENANT", type=_name, help="lower case letters, digits and -, at most 63")


def _add_settings(parser: Parser) -> None:
    _add_name(parser)
    for field, prefix, where in (("", "--", ""), ("host_", "--host-", "host ")):
        parser.add_argument(
            f"{prefix}limit",
            dest=f"{field}limit_bytes",
            metavar="SIZE|none",
            type=commands.limit,
            help=f"the most {where}memory that it may borrow",
        )
        parser.add_argument(
            f"{prefix}guarantee",
            dest=f"{field}guarantee_bytes",
            metavar="SIZE|none",
            type=commands.limit,
            help=f"{where}memory that it can have at any time",
        )
        parser.add_argument(
            f"{prefix}weight",
            dest=f"{field}weight",
            metavar="N|none",
            type=commands.weight,
            help=f"its part of the rest of the {where}memory while requests wait: 0 to 1000",
        )
    parser.add_argument(
        "--uids", metavar="UID,UID|none", type=_uids, help="only these users may open sessions, at most 64"
    )
    parser.add_argument(
        "--lend-unused",
        metavar="yes|no|none",
        type=_yes_or_no,
        help="lend its unused guarantee to programs that answer recalls (yes)",
    )
    parser.add_argument(
        "--idle-sleep",
        dest="idle_sleep_seconds",
        metavar="SECONDS|none",
        type=_idle,
        help="its engines sleep after so long without a request; 0: never",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say whether it would be refused")


_FIELDS = (
    *("limit_bytes", "guarantee_bytes", "weight", "host_limit_bytes", "host_guarantee_bytes", "host_weight"),
    *("uids", "lend_unused", "idle_sleep_seconds", "owner", "group", "mode"),
)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given, by field; None for `none`."""
    found = {field: getattr(options, field, None) for field in _FIELDS}
    return {field: value[0] for field, value in found.items() if value is not None}


# --- Commands ---


def _list(options: argparse.Namespace) -> int:
    with open_admin(options.endpoint) as admin:
        made = [tenant for tenant in admin.tenants() if tenant.settings is not None]
        table = tables.made_tenants_table(made, [] if options.json else admin.sessions())
    return tables.answer(options.json, made, table)


def _create(options: argparse.Namespace) -> int:
    settings = {field: value for field, value in _given(options).items() if value is not None}
    with open_admin(options.endpoint) as admin:
        tenant = admin.create_tenant(options.name, settings, dry_run=options.dry_run)
        endpoint = admin.endpoint_of(options.name)
    if options.dry_run:
        return tables.answer(options.json, tenant, "nothing is made; it would be possible")
    return tables.answer(
        options.json, tenant, f"{_numbers(tenant)}", f"programs enter it at {names.ENDPOINT_VARIABLE}={endpoint}"
    )


def _set(options: argparse.Namespace) -> int:
    settings = _given(options)
    if not settings:
        options.parser.error("name at least one setting to change")
    with open_admin(options.endpoint) as admin:
        tenant = admin.update_tenant(options.name, settings, dry_run=options.dry_run)
    line = "nothing is set; it would be possible" if options.dry_run else _numbers(tenant)
    return tables.answer(options.json, tenant, line)


def _numbers(tenant: TenantStatus) -> str:
    parts = [
        f"{books.location} memory: limit {'none' if books.limit_bytes is None else format_exact(books.limit_bytes)}, "
        f"guarantee {format_exact(books.guarantee_bytes)}, weight {books.weight}"
        for books in tenant.books.values()
    ]
    return f"{tables.short_name(tenant.name)}, " + "; ".join(parts)


def _delete(options: argparse.Namespace) -> int:
    with open_admin(options.endpoint) as admin:
        tenant = admin.delete_tenant(options.name)
        held = holders.of_tenant(admin, options.name)
        if not options.json:
            sentence = f"{tables.short_name(options.name)} takes no new sessions and borrows nothing more"
            tables.answer(False, None, sentence, *holders.still(held))
        if held and options.timeout != 0:
            say = holders.sayer(options.json)
            held = holders.wait(lambda: holders.of_tenant(admin, options.name), held, options.timeout, say)
    said = []
    if not held:
        said = [f"{tables.short_name(options.name)} is deleted"]
    elif options.timeout != 0:
        said = [f"{format_exact(held.charged)} were still charged at the end of the wait: the deletion goes on"]
    answer = {"tenant": tenant, "deleted": not held, "sessions": held.sessions, "segments": held.segments}
    tables.answer(options.json, answer, *said)
    return int(bool(held) and options.timeout != 0)


# --- Types of arguments; in a tuple, since argparse takes a bare None for an option that was not given ---


def _name(text: str) -> str:
    tenant = text.removeprefix("tenants/")
    if not names.valid_tenant(tenant):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a tenant, as in acme: {names.grammar('TENANT')}")
    return f"tenants/{tenant}"


def _uids(text: str) -> tuple[list[int] | None]:
    if text == "none":
        return (None,)
    return ([_user(user)[0] for user in text.split(",")],)


def _user(text: str) -> tuple[int]:
    return (_id(text, "user", lambda name: pwd.getpwnam(name).pw_uid),)


def _group(text: str) -> tuple[int]:
    return (_id(text, "group", lambda name: grp.getgrnam(name).gr_gid),)


def _id(text: str, kind: str, find: Callable[[str], int]) -> int:
    if re.fullmatch("[0-9]{1,10}", text) and int(text) < 2**32 - 1:
        return int(text)
    try:
        return find(text)
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"this machine has no {kind} {text!r}: write an id, as in 1000") from None


def _mode(text: str) -> tuple[int]:
    if not re.fullmatch("0?[0-7]{3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mode, as in 0660")
    return (int(text, 8),)


def _yes_or_no(text: str) -> tuple[bool | None]:
    if text not in ("yes", "no", "none"):
        raise argparse.ArgumentTypeError(f"{text!r} is not yes, no or none")
    return ({"yes": True, "no": False}.get(text),)


def _idle(text: str) -> tuple[float | None]:
    return (None,) if text == "none" else (commands.timeout(text),)
