"""What a reload would do, and the reload itself: a new configuration beside the daemon that runs, and what it has lent.

`membrokerd --check-config` says the first, by asking the daemon's admin endpoint, if this user may; it changes nothing.
`membrokerd --reload` orders the second.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import resources_pb2 as rpb
from membroker.vmm import format_exact
from membroker.wire.names import MAX_PAGE_ROWS, parse_model, parse_tenant
from membroker.wire.paths import grpc_target

from .config import quotas
from .config.checks import OF_USERS, joined
from .config.config import QUOTA_KEYS, Config
from .core import policy
from .core.names import Location
from .device.plan import DeviceError, changed_rules, check_guarantees, directory_of

ANSWER_SECONDS = 5.0
RELOAD_SECONDS = 60.0
"""How long a reload may take: names of users may be looked up over a network."""
_LOCATIONS: dict[int, Location] = {rpb.LOCATION_DEVICE: "device", rpb.LOCATION_HOST: "host"}
_CAPACITY_KEYS: dict[Location, str] = {"device": "capacity", "host": "host_capacity"}


def reload_sentences(config: Config, device: str, capacities: dict[Location, int]) -> Iterator[str]:
    """Yield what a reload of the running daemon would not do, or would do to programs that have memory.

    `device` is the name of the device's directory, and `capacities` is what a start would lend. Without a daemon that
    answers there is nothing to say.
    """
    path = Path(config.runtime_directory, device, "admin", "grpc.sock")
    if not _is_served(path):
        return
    import grpc

    from membroker.v1 import admin_pb2_grpc

    try:
        with grpc.insecure_channel(grpc_target(path), options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            shown: rpb.Device = stub.GetDevice(bpb.GetDeviceRequest(), timeout=ANSWER_SECONDS)
            tenants = list(_rows(stub.ListTenants, apb.ListTenantsRequest(), "tenants"))
            models = list(_rows(stub.ListModels, bpb.ListModelsRequest(), "models"))
    except grpc.RpcError as error:
        yield f"the daemon that runs here could not be asked what a reload would do: {error.code().name}"
        return
    running = {_LOCATIONS[books.location]: books for books in shown.locations}
    kept = quotas.read_all(quotas.state_directory(config, device) / quotas.FILE)
    config = config.with_created(kept.tenants)
    yield from _fixed(config, path.parents[1] / "tenants", running, capacities)
    rules = policy.Rules(granularity=1, capacities={where: books.capacity_bytes for where, books in running.items()})
    rules = changed_rules(rules, config)
    try:
        check_guarantees(rules)
    except DeviceError as error:
        yield f"a reload of the running daemon would change nothing, because it lends less: {error}"
    for tenant in tenants:
        yield from _removed(config, tenant)
    for row in (*tenants, *models):
        yield from _above(row, kept.quotas, rules)


class ReloadFailed(Exception):
    """The daemon has refused the configuration, or could not be asked. The message says why."""


def admin_sockets(config: Config, *, of_all: bool) -> list[Path]:
    """Return the admin socket of the configured device, or of each device that has a daemon. No device is asked."""
    runtime, device = config.runtime_directory, config.device
    if of_all:
        found = sorted(runtime.glob("*/admin/grpc.sock"))
        return [path for path in found if not path.parents[1].is_symlink() and _is_served(path)]
    name = directory_of(device) if isinstance(device, str) else str(device)
    if config.driver == "host":
        name = f"host-{device}" if device else "host"
    return [runtime / name / "admin" / "grpc.sock"]


def reload_now(path: Path) -> str:
    """Have the daemon with this admin socket reload, and return a sentence; raises `ReloadFailed`."""
    if not _is_served(path):
        raise ReloadFailed("no daemon answers here")
    import grpc

    from membroker.v1 import admin_pb2_grpc

    try:
        with grpc.insecure_channel(grpc_target(path), options=[("grpc.enable_http_proxy", 0)]) as channel:
            done = admin_pb2_grpc.AdminServiceStub(channel).Reload(apb.ReloadRequest(), timeout=RELOAD_SECONDS)
    except grpc.RpcError as error:
        raise ReloadFailed(f"it could not be asked to reload: {error.code().name}: {error.details()}") from error
    if done.problems:
        raise ReloadFailed("; ".join(["the configuration stays as it is", *done.problems]))
    tenants = [key for key in done.pending_keys if re.fullmatch(r"tenants\.[^.]+", key)]
    keys = [key for key in done.pending_keys if key not in tenants]
    sentences = ["reloaded"]
    if keys:
        sentences.append(f"not in force before a restart: {', '.join(keys)}")
    if tenants:  # a restart would only take the sessions' endpoint away
        sentences.append(f"not in force before another reload, the log says why: {', '.join(tenants)}")
    return "; ".join(sentences)


def _is_served(path: Path) -> bool:
    """Return whether a daemon listens at this socket. gRPC would complain on stderr."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(ANSWER_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def _rows(method: Any, request: Any, field: str) -> Iterator[Any]:
    request.page_size = MAX_PAGE_ROWS
    while True:
        page = method(request, timeout=ANSWER_SECONDS)
        yield from getattr(page, field)
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _fixed(
    config: Config, endpoints: Path, running: dict[Location, Any], capacities: dict[Location, int]
) -> Iterator[str]:
    """Yield which keys a reload leaves as they are, of those that decide how much is lent, and to which tenants."""
    for where, books in running.items():
        if where in capacities and capacities[where] != books.capacity_bytes:
            lent = books.lent_bytes + books.releasing_bytes
            beyond = f"; {format_exact(lent)} are lent now" if lent > capacities[where] else ""
            yield (
                f"{_CAPACITY_KEYS[where]}: the running daemon lends {format_exact(books.capacity_bytes)}, and a reload "
                f"does not change that; restart it to lend {format_exact(capacities[where])}{beyond}"
            )
    others = set(os.listdir(endpoints)) - set(config.created)
    by_user = others == {OF_USERS} and OF_USERS not in config.tenants
    if by_user != config.uid_tenants:
        yield "tenants: a reload adds no first tenant and removes no last one; restart the running daemon"


def _removed(config: Config, tenant: apb.Tenant) -> Iterator[str]:
    """Yield what keeps a tenant that the file does not have any more."""
    name = parse_tenant(tenant.name)
    used = sum(books.used_bytes for books in tenant.books)
    if not config.uid_tenants and name not in config.tenants and (tenant.sessions or used):
        yield (
            f"tenants: {name} is not in the file any more, and has {format_exact(used)}, sessions: {tenant.sessions}; "
            "a reload keeps it without its guarantees; end them, and reload again"
        )


def _above(row: apb.Tenant | rpb.Model, kept: quotas.Quotas, rules: policy.Rules) -> Iterator[str]:
    """Yield which limits of a tenant or a model are less than what it has."""
    model = parse_model(row.name)
    names: tuple[str, str | None] = model or (parse_tenant(row.name) or "", None)
    for books in row.books:
        where = _LOCATIONS[books.location]
        limit = policy.limit_of(kept, rules, (*names, where))
        if limit is not None and books.used_bytes > limit:
            of_model = ("models", names[1]) if names[1] is not None else ()
            yield (
                f"{joined(('tenants', names[0], *of_model, QUOTA_KEYS[where][0]))}: {format_exact(limit)} is less than "
                f"the {format_exact(books.used_bytes)} that are used now: after a reload it borrows nothing more, and "
                "what is above is asked of the programs that answer recalls"
            )
