"""The tenants that commands make, change and delete while the daemon runs, beside those of the configuration.

Owns the order of each command: what is refused comes first, then the file, then the books and the endpoint. So a daemon
that dies at any point has either done nothing, or its successor finds the command in the file and completes it. A
tenant that is deleted has `deleting` in the file until nothing of it is lent, and each look at it takes the next step.
It must never decide about memory: the core does, by the quotas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from membroker.v1 import admin_pb2 as pb

from ..config import quotas
from ..config.checks import of_user
from ..config.config import QUOTA_KEYS, Config, CreatedTenant, TenantConfig
from ..core import events as ev
from ..core.denied import Denied, Reason, deny
from ..core.names import LOCATIONS, QuotaKey
from ..core.rows import Quota
from ..runtime.loop import Loop, MakeEvent
from ..system import logs
from ..system.device_directory import DirectoryError
from ..system.failpoints import reach
from . import convert
from .convert import Refused

RETRY_SECONDS = 10.0
"""When a deletion goes on whose last step has failed, for want of room on a disk."""
_AT_ONCE = 64
"""Segments that are deleted in one turn of the event loop."""
_NO_CLIENTS = -1
"""A request id that no client can have in flight: it would refuse the end of its session."""


class TenantEndpoints(Protocol):
    """What is asked of the endpoints: `endpoints.Endpoints`, which stands above the service that uses this module."""

    def check(self, name: str) -> None:
        """Raise `DirectoryError` if there cannot be an endpoint of that name."""

    async def open(self, name: str, tenant: str | None, config: TenantConfig) -> None:
        """Open the endpoint of a tenant. Raises `DirectoryError`, `OSError`, and `RuntimeError` for gRPC."""

    def admit(self, name: str, uids: frozenset[int]) -> None:
        """Let only these users open sessions from now on."""

    def close_to_new(self, name: str, why: Denied) -> None:
        """Open no session from now on, and tell those that are open to release all."""

    async def remove(self, name: str) -> None:
        """Close the endpoint, with its directory. It may be closed already."""


class Tenants:
    """The tenants of one daemon. `config` returns the configuration in force, and `apply` puts another into force."""

    def __init__(
        self,
        loop: Loop,
        config: Callable[[], Config],
        apply: Callable[[Config], None],
        keep: Callable[[quotas.Quotas, Mapping[str, CreatedTenant]], None],
        endpoints: TenantEndpoints,
    ) -> None:
        self.lock = asyncio.Lock()
        """One command at a time, and no reload meanwhile: each writes all that was set by command."""
        self._loop = loop
        self._config = config
        self._apply = apply
        self._keep = keep
        self._endpoints = endpoints
        self._next_look = 0.0
        self._finishing: asyncio.Task[None] | None = None

    @property
    def config(self) -> Config:
        """Return the configuration in force, with the tenants that were made by command."""
        return self._config()

    def check(self, tenant: str) -> None:
        """Refuse a name that cannot be a tenant, or that is being deleted. Raises `Refused`."""
        self.check_not_deleting(tenant)
        if tenant in self.config.tenants or (self.config.uid_tenants and of_user(tenant)):
            return
        if self.config.uid_tenants:
            raise Refused(
                deny(Reason.TENANT_NOT_FOUND, tenant=tenant, hint=", and each user is one here, such as 'uid-1000'")
            )
        raise Refused(deny(Reason.TENANT_NOT_FOUND, tenant=tenant))

    def check_not_deleting(self, tenant: str) -> None:
        """Refuse a tenant that is being deleted. Raises `Refused`."""
        found = self.config.tenants.get(tenant)
        if isinstance(found, CreatedTenant) and found.deleting:
            raise Refused(deny(Reason.TENANT_DELETED, tenant=tenant))

    # --- commands; a caller that goes away ends none of them ---

    async def create(self, request: pb.CreateTenantRequest) -> str:
        """Make a tenant, and return its name. Raises `Refused`."""
        return await asyncio.shield(self._create(request))

    async def _create(self, request: pb.CreateTenantRequest) -> str:
        name = convert.parse_tenant(request.name)
        async with self.lock:
            config = self.config
            self.check_not_deleting(name)
            if name in config.tenants:
                hint = "" if name in config.created else ", in the configuration file"
                raise Refused(deny(Reason.TENANT_EXISTS, tenant=name, hint=hint))
            if len(config.created) >= quotas.MAX_CREATED:
                raise Refused(deny(Reason.TOO_MANY_TENANTS, limit=quotas.MAX_CREATED))
            made = await _made(name, convert.tenant_settings(request.settings))
            self._check_place(name)
            self._refuse_misfit(made.quotas)
            if request.validate_only:
                return name
            before = {key: self._loop.broker.ledger.quotas.get(key, Quota()) for key in made.quotas}
            await self._write(made.quotas, {**config.created, **made.tenants})
            reach("tenant kept")
            await self._set(made.quotas)
            self._apply(config.with_created({**config.created, **made.tenants}))
            try:
                await self._endpoints.open(name, name, made.tenants[name])
            except (DirectoryError, OSError, RuntimeError) as error:  # gRPC raises RuntimeError
                await self._write(before, config.created)
                await self._set(before)
                self._apply(config)
                raise Refused(_cannot_open(error)) from error
            reach("tenant open")
        return name

    async def update(self, request: pb.UpdateTenantRequest) -> str:
        """Change settings of a tenant, and return its name. Raises `Refused`."""
        return await asyncio.shield(self._update(request))

    async def _update(self, request: pb.UpdateTenantRequest) -> str:
        name = convert.parse_tenant(request.name)
        changed = convert.changed_settings(request)
        numbers = {key for key in changed if key in convert.NUMBERS_OF_TENANT}
        async with self.lock:
            config = self.config
            self.check(name)
            tenant = config.tenants.get(name)
            if not isinstance(tenant, CreatedTenant) and changed.keys() - numbers:
                raise Refused(deny(Reason.TENANT_CONFIGURED, tenant=name))
            made = await _made(name, {key: value for key, value in changed.items() if value is not None})
            changes = self._merged(name, made.quotas, changed)
            self._refuse_misfit(changes)
            created = config.created
            if isinstance(tenant, CreatedTenant):
                after = made.tenants[name]
                created[name] = replace(tenant, **{key: getattr(after, key) for key in changed.keys() - numbers})
            if not request.validate_only:
                await self._write(changes, created)
                await self._set(changes)
                self._apply(config.with_created(created))
                if name in created:
                    self._endpoints.admit(name, created[name].uids)
        return name

    async def delete(self, request: pb.DeleteTenantRequest) -> str:
        """Begin to delete a tenant, unless that has begun, and return its name. Raises `Refused`."""
        return await asyncio.shield(self._delete(request))

    async def _delete(self, request: pb.DeleteTenantRequest) -> str:
        name = convert.parse_tenant(request.name)
        async with self.lock:
            config = self.config
            tenant = config.tenants.get(name)
            if tenant is None:
                raise Refused(deny(Reason.TENANT_NOT_FOUND, tenant=name))
            if not isinstance(tenant, CreatedTenant):
                raise Refused(deny(Reason.TENANT_CONFIGURED, tenant=name))
            if not tenant.deleting:
                created = {**config.created, name: replace(tenant, deleting=True)}
                changes = {**self._without_quotas(name), **_nothing(name)}
                await self._write(changes, created)
                reach("deletion kept")
                self._apply(config.with_created(created))
                await self._set(changes)
                await self._empty(name)
                reach("deletion begun")
                logs.log("a tenant is being deleted", tenant=name, **self.holdings(name))
        return name

    # --- quotas, for the commands that set them, too; the caller has the lock ---

    async def keep_quotas(self, changes: Mapping[QuotaKey, Quota]) -> None:
        """Write what was set by command, with these changes. Raises `Refused`."""
        await self._write(changes, self.config.created)

    async def _write(self, changes: Mapping[QuotaKey, Quota], created: Mapping[str, CreatedTenant]) -> None:
        """Write it on another thread, since a disk can be slow."""
        rows = {**self._loop.broker.ledger.quotas, **changes}
        rows = {key: quota for key, quota in rows.items() if quota != Quota()}
        try:
            await asyncio.to_thread(self._keep, rows, created)
        except OSError as error:
            raise Refused(deny(Reason.INTERNAL, fault=convert.unkept(error))) from error

    async def _set(self, changes: Mapping[QuotaKey, Quota]) -> None:
        """Put quotas into force that are in the file: they are not refused any more."""
        for key, quota in changes.items():
            if quota != self._loop.broker.ledger.quotas.get(key, Quota()):
                await self._try(partial(convert.quota_event, key=key, quota=quota, undo=True))
                await asyncio.sleep(0)  # each looks at all quotas that there are

    def _refuse_misfit(self, changes: Mapping[QuotaKey, Quota]) -> None:
        """Refuse numbers that do not fit, each location by itself. Raises `Refused`."""
        for key, quota in changes.items():
            if denied := self._loop.broker.models.refuse_quota(convert.quota_event(0, key, quota)):
                raise Refused(denied)

    def _without_quotas(self, tenant: str) -> dict[QuotaKey, Quota]:
        """Return the changes that end all quotas of a tenant."""
        found = [key for key in self._loop.broker.ledger.quotas if key[0] == tenant]
        return dict.fromkeys(sorted(found, key=lambda key: key[1] is None), Quota())

    def _merged(
        self, name: str, made: Mapping[QuotaKey, Quota], changed: Mapping[str, object]
    ) -> dict[QuotaKey, Quota]:
        """Return the tenant's quotas with the numbers that were changed, at the locations where one was."""
        changes: dict[QuotaKey, Quota] = {}
        for where, keys in QUOTA_KEYS.items():
            key: QuotaKey = (name, None, where)
            before, after = self._loop.broker.ledger.quotas.get(key, Quota()), made.get(key, Quota())
            if any(each in changed for each in keys):
                numbers = zip(keys, before, after, strict=True)
                changes[key] = Quota(*[new if each in changed else old for each, old, new in numbers])
        return changes

    # --- deletion ---

    def holdings(self, tenant: str) -> dict[str, int]:
        """Return how many sessions a tenant has, and what it is charged, of both kinds of memory together."""
        ledger = self._loop.broker.ledger
        sessions = sum(row.tenant == tenant for row in ledger.sessions.values())
        return {"sessions": sessions, "charged_bytes": sum(ledger.tenant_charged(tenant, at) for at in ledger.totals)}

    async def resume(self) -> None:
        """Go on with the deletions that an earlier daemon began. The endpoints are open."""
        for name, tenant in self.config.created.items():
            if tenant.deleting:
                await self._set({**self._without_quotas(name), **_nothing(name)})
                await self._empty(name)

    def look(self) -> None:
        """Delete the tenants that are being deleted and of which nothing is lent any more. Called with each audit."""
        now = asyncio.get_running_loop().time()
        if self._finishing is None and now >= self._next_look and self._emptied():
            self._finishing = asyncio.get_running_loop().create_task(self._finish(now))

    def close(self) -> None:
        """Go on with no deletion: the next daemon does."""
        if self._finishing is not None:
            self._finishing.cancel()

    def _emptied(self) -> list[str]:
        created = self.config.created
        return [
            name for name, tenant in created.items() if tenant.deleting and not self.holdings(name)["charged_bytes"]
        ]

    async def _empty(self, name: str) -> None:
        """Have a tenant borrow nothing, and release what it has."""
        self._endpoints.close_to_new(name, deny(Reason.TENANT_DELETED, tenant=name))
        broker = self._loop.broker
        segments = [row for row in broker.ledger.segments.values() if row.name.tenant == name]
        for number, row in enumerate(segments, 1):
            name_of = row.full_name()
            await self._try(partial(ev.DeleteSegment, session=None, request_id=0, name=name_of, generation=row.segment))
            if not number % _AT_ONCE:
                await asyncio.sleep(0)

    async def _finish(self, now: float) -> None:
        try:
            async with self.lock:
                for name in self._emptied():
                    await self._end_sessions(name)
                    if not self.holdings(name)["sessions"]:
                        await self._endpoints.remove(name)
                        reach("tenant closed")
                        await self._forget(name)
                        reach("tenant forgotten")
                        logs.log("a tenant is deleted", tenant=name)
        except Refused as refused:
            self._next_look = now + RETRY_SECONDS
            logs.warn("the deletion of a tenant goes on later", why=str(refused.denied.numbers.get("fault", "")))
        except Exception as error:  # noqa: BLE001 - the daemon goes on
            self._next_look = now + RETRY_SECONDS
            logs.fault(error, doing="the deletion of a tenant")
        finally:
            self._finishing = None

    async def _end_sessions(self, name: str) -> None:
        """End the sessions of a tenant, which hold nothing."""
        rows = [row for row in self._loop.broker.ledger.sessions.values() if row.tenant == name]
        for row in rows:
            if row.state == "open":
                await self._try(partial(ev.Goodbye, session=row.session, request_id=_NO_CLIENTS))
            elif row.state == "detached":
                await self._try(partial(ev.ForgetSession, session=row.session))

    async def _forget(self, name: str) -> None:
        """Keep nothing of a tenant, on the disk and in the books."""
        created = self.config.created
        del created[name]
        changes = self._without_quotas(name)
        await self._write(changes, created)
        await self._set(changes)
        self._apply(self.config.with_created(created))

    # --- the core ---

    async def _try(self, make_event: MakeEvent) -> None:
        """Ask the core for something that it may refuse, because it has happened already."""
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._loop.ask(make_event, answer.set_result)
        await answer

    def _check_place(self, name: str) -> None:
        try:
            self._endpoints.check(name)
        except DirectoryError as error:
            raise Refused(_cannot_open(error)) from error


async def _made(name: str, settings: Mapping[str, object]) -> quotas.Kept:
    """Return the tenant and the quotas that these settings make. Raises `Refused`.

    They are checked on another thread, since a user may be looked up over a network.
    """
    kept, problems = await asyncio.to_thread(quotas.made_tenant, name, settings)
    if problems:
        what = "; ".join(f"{key.rpartition('.')[2]}: {sentence}"[:200] for key, sentence in list(problems.items())[:4])
        raise Refused(deny(Reason.INVALID_ARGUMENT, what=what))
    return kept


def _nothing(tenant: str) -> dict[QuotaKey, Quota]:
    """Return quotas with which a tenant borrows nothing and has all recalled, and that keep nothing for it."""
    locations: Iterable[QuotaKey] = [(tenant, None, where) for where in LOCATIONS]
    return dict.fromkeys(locations, Quota(limit=0))


def _cannot_open(error: Exception) -> Denied:
    return deny(Reason.INVALID_ARGUMENT, what=f"the tenant's endpoint cannot be opened: {error}")
