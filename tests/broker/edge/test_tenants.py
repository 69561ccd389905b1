"""Tenants and quotas by command: what is refused changes nothing, what fails half-way is undone or goes on later."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest
from tests.broker.coroutines import played_by
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.loop_world import World, play
from tests.support.sizes import MIB

from membroker.v1 import admin_pb2 as pb
from membrokerd.config import quotas
from membrokerd.config.config import Config, CreatedTenant, TenantConfig
from membrokerd.core import events as ev
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.names import ModelName, QuotaKey
from membrokerd.core.rows import Quota
from membrokerd.device.plan import changed_rules
from membrokerd.edge.convert import Refused
from membrokerd.edge.rpc.admin_service import AdminService
from membrokerd.edge.tenants import Tenants
from membrokerd.system.device_directory import DirectoryError

CHAT = ModelName("t", "m")
KEY: QuotaKey = ("t", None, "device")
RED: QuotaKey = ("red", None, "device")


class Place:
    """The file, the endpoints and the rules of a daemon whose file has the tenant `red`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.config = Config(tenants={"red": TenantConfig()})
        self.kept: list[tuple[dict[QuotaKey, Quota], dict[str, CreatedTenant]]] = []
        self.open_now: dict[str, frozenset[int]] = {"red": frozenset()}
        self.closed: dict[str, Denied] = {}
        self.removed: list[str] = []
        self.disk: OSError | None = None
        self.go_on = threading.Event()
        """Until it is set, the disk is slow."""
        self.go_on.set()
        self.trouble: Exception | None = None
        self.tenants = Tenants(world.loop, lambda: self.config, self.apply, self.keep, self)
        unused = cast(Any, None)
        self.service = AdminService(world.loop, unused, self.tenants, unused, unused, unused)
        world.loop._on_audit = self.tenants.look

    def apply(self, config: Config) -> None:
        self.config = config
        broker = self.world.loop.broker
        broker.change_rules(changed_rules(broker.books.rules, config))

    def keep(self, rows: quotas.Quotas, created: Mapping[str, CreatedTenant]) -> None:
        if self.disk is not None:
            raise self.disk
        self.kept.append((dict(rows), dict(created)))
        assert self.go_on.wait(DEADLINE_SECONDS)

    # --- the endpoints ---

    def check(self, name: str) -> None:
        if len(name) > 40:
            raise DirectoryError("the path of a socket is too long")

    async def open(self, name: str, tenant: str | None, config: TenantConfig) -> None:
        assert tenant == name
        if self.trouble is not None:
            raise self.trouble
        self.open_now[name] = config.uids

    def admit(self, name: str, uids: frozenset[int]) -> None:
        self.open_now[name] = uids

    def close_to_new(self, name: str, why: Denied) -> None:
        self.closed[name] = why

    async def remove(self, name: str) -> None:
        self.open_now.pop(name, None)
        self.removed.append(name)

    # --- commands ---

    async def create(self, name: str = "t", *, dry: bool = False, **settings: Any) -> str:
        given = pb.TenantSettings(**settings)
        request = pb.CreateTenantRequest(name=f"tenants/{name}", settings=given, validate_only=dry)
        return await self.tenants.create(request)

    async def update(self, name: str = "t", *, mask: str = "", dry: bool = False, **settings: Any) -> str:
        given = pb.TenantSettings(**settings)
        request = pb.UpdateTenantRequest(name=f"tenants/{name}", settings=given, validate_only=dry)
        request.update_mask.paths.extend([*settings, *mask.split()])
        return await self.tenants.update(request)

    async def delete(self, name: str = "t") -> str:
        return await self.tenants.delete(pb.DeleteTenantRequest(name=f"tenants/{name}"))

    async def set_quota(self, limit: int) -> pb.Quota:
        return await self.service.SetQuota(pb.SetQuotaRequest(name="tenants/red", limit_bytes=limit), None)

    def quotas(self) -> dict[QuotaKey, Quota]:
        return {key: quota for key, quota in self.world.loop.broker.ledger.quotas.items() if quota != Quota()}

    async def is_gone(self, name: str = "t") -> None:
        await self.world.until(lambda: name not in self.config.tenants)


async def refusal(command: Awaitable[object]) -> Denied:
    with pytest.raises(Refused) as refused:
        await command
    return refused.value.denied


def tell(story: Callable[[Place], Awaitable[None]]) -> None:
    async def told(world: World) -> None:
        await story(Place(world))

    play(told)


@played_by(tell)
async def test_a_tenant_is_made_changed_and_deleted(place: Place) -> None:
    """Each is in the file, the books, the rules and at the endpoint; nothing of it is left."""
    await place.create(guarantee_bytes=8 * MIB, limit_bytes=16 * MIB, uids=[5], lend_unused=False, mode=0o600)
    made = CreatedTenant(uids=frozenset((5,)), lend_unused=False, mode=0o600)
    assert place.kept[-1] == ({KEY: Quota(16 * MIB, 8 * MIB)}, {"t": made})
    assert place.open_now["t"] == {5}
    assert place.world.loop.broker.books.rules.unlent == {"t"}
    assert place.world.loop.broker.books.rules.max_sessions_per_tenant == 96, "it has two tenants now"
    await place.update(weight=2, uids=[6, 7], mask="limit_bytes lend_unused")
    assert place.quotas() == place.kept[-1][0] == {KEY: Quota(None, 8 * MIB, 2)}
    assert place.open_now["t"] == {6, 7}
    assert place.world.loop.broker.books.rules.unlent == frozenset()
    assert place.kept[-1][1]["t"].mode == 0o600
    await place.delete()
    assert place.kept[-1][1]["t"].deleting
    await place.is_gone()
    await place.world.until(lambda: place.kept[-1] == ({}, {}))
    assert (place.quotas(), place.removed, set(place.open_now)) == ({}, ["t"], {"red"})
    assert await place.create() == "t"


@played_by(tell)
async def test_what_is_refused_changes_nothing(place: Place) -> None:
    await place.create("blue", guarantee_bytes=40 * MIB, limit_bytes=48 * MIB)
    before = place.config, place.quotas(), len(place.kept)

    async def refused(command: Awaitable[object]) -> Denied:
        denied = await refusal(command)
        assert (place.config, place.quotas(), len(place.kept)) == before
        return denied

    conflict = await refused(place.create(guarantee_bytes=32 * MIB))
    assert (conflict.reason, conflict.numbers["asked_bytes"], conflict.numbers["limit_bytes"]) == (
        Reason.QUOTA_CONFLICT,
        72 * MIB,
        64 * MIB,
    )
    assert (await refused(place.update("blue", limit_bytes=8 * MIB))).reason is Reason.QUOTA_CONFLICT
    assert (await refused(place.create("blue"))).reason is Reason.TENANT_EXISTS
    assert (await refused(place.create("red"))).numbers["hint"] == ", in the configuration file"
    assert (await refused(place.delete("red"))).reason is Reason.TENANT_CONFIGURED
    assert (await refused(place.update("red", uids=[1]))).reason is Reason.TENANT_CONFIGURED
    assert (await refused(place.update(weight=1))).reason is Reason.TENANT_NOT_FOUND
    assert (await refused(place.delete())).reason is Reason.TENANT_NOT_FOUND
    wrong = dict.fromkeys(("default", "uid-0", "a" * 41), (Reason.INVALID_ARGUMENT, "what"))
    wrong |= dict.fromkeys(("Acme", "a/b", "", "a" * 64, "x" * 60_000), (Reason.INVALID_NAME, "name"))
    for name, (reason, said) in wrong.items():
        denied = await refused(place.create(name))
        assert denied.reason is reason
        assert len(str(denied.numbers[said])) < 1_000
    for settings in ({"weight": 1_001}, {"mode": 0o1000}, {"limit_bytes": -1}, {"uids": range(65)}):
        denied = await refused(place.create(**settings))
        assert denied.reason is Reason.INVALID_ARGUMENT
        assert len(str(denied.numbers["what"])) < 1_000
    for command in (
        place.update("blue"),
        place.update("blue", mask="owner"),
        place.update("blue", mask="x" * 50_000),
    ):
        assert (await refused(command)).reason is Reason.INVALID_ARGUMENT
    assert await place.create(guarantee_bytes=24 * MIB, dry=True) == "t"
    assert await place.update("blue", uids=[1], weight=3, dry=True) == "blue"
    assert (place.config, place.quotas(), len(place.kept)) == before
    await place.update("red", limit_bytes=8 * MIB, weight=3)
    assert place.kept[-1][0][RED] == Quota(8 * MIB, None, 3), "a configured one's numbers can be set"


@played_by(tell)
async def test_there_are_64_by_command(place: Place) -> None:
    """Those of the file do not count."""
    for number in range(quotas.MAX_CREATED):
        await place.create(f"t{number}")
    denied = await refusal(place.create("more"))
    assert (denied.reason, denied.numbers) == (Reason.TOO_MANY_TENANTS, {"limit": 64})


@played_by(tell)
async def test_an_endpoint_that_cannot_be_opened_leaves_no_tenant(place: Place) -> None:
    """The daemon may not give its sockets to another user."""
    place.trouble = DirectoryError("tenants.t = 7: this daemon cannot change a socket's owner")
    denied = await refusal(place.create(owner=7, guarantee_bytes=8 * MIB))
    assert (denied.reason, "cannot change a socket's owner" in str(denied.numbers["what"])) == (
        Reason.INVALID_ARGUMENT,
        True,
    )
    assert (place.kept[-1], place.quotas(), set(place.config.tenants)) == (({}, {}), {}, {"red"})


@played_by(tell)
async def test_a_full_disk_refuses_a_command_and_delays_a_deletion(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(28, "No space left on device", "/var/lib/x/quotas.toml")
    place.disk = full
    assert (await refusal(place.create())).reason is Reason.INTERNAL
    assert "t" not in place.config.tenants
    place.disk = None
    await place.create()
    session = await place.world.open(CHAT)
    assert await place.world.allocate(session)
    await place.delete()
    place.disk = full
    await place.world.give_back(session)
    await place.world.until(lambda: bool(place.removed) and place.tenants._finishing is None)
    assert place.config.created["t"].deleting, "its name is not free before the file says so"
    place.disk, place.tenants._next_look = None, 0.0
    await place.is_gone()
    assert place.kept[-1] == ({}, {})


@played_by(tell)
async def test_a_deletion_waits_for_what_is_lent(place: Place) -> None:
    """Its sessions borrow nothing more, its segments end with their last holder; then it is gone, sessions and all."""
    world = place.world
    await place.create(guarantee_bytes=8 * MIB)
    world.loop.broker.ledger.quotas["t", "m", "device"] = Quota(guarantee=4 * MIB)
    session, idle = await world.open(CHAT), await world.open(CHAT)
    detached = await world.open(CHAT)
    await world.allocate(session)
    segment = (await world.create(session, 4 * MIB)).segment
    await world.seal(session, segment)
    world.lose(detached)
    await place.delete()
    assert await place.delete() == "t", "a second command changes nothing"
    assert place.closed["t"].reason is Reason.TENANT_DELETED
    assert (await refusal(place.update(weight=1))).reason is Reason.TENANT_DELETED
    assert (await refusal(place.create())).reason is Reason.TENANT_DELETED
    assert world.loop.broker.books.admission.reserved("device") == 0
    assert set(place.quotas().values()) == {Quota(limit=0)}
    assert (await world.allocate(idle)).reason is Reason.TENANT_LIMIT
    assert (await world.attach(idle)).reason is Reason.SEGMENT_NOT_FOUND
    assert place.config.created["t"].deleting
    await world.give_back(session)
    await world.audit()
    assert place.removed == [], "the segment is still held"
    await world.detach(session, segment)
    await place.is_gone()
    assert place.removed == ["t"]
    assert not world.loop.broker.ledger.sessions
    assert not place.quotas()


@played_by(tell)
async def test_a_request_without_an_end_keeps_no_tenant(place: Place) -> None:
    """A session has released all, and never acknowledges a packet of the request 0."""
    world = place.world
    await place.create()
    session = await world.open(CHAT)
    await world.ask(lambda call: ev.Allocate(call, session, 0, CHAT, "device", 2 * MIB, 1))
    ids = tuple(world.loop.broker.ledger.sessions[session].extents)
    await world.ask(lambda call: ev.Release(call, session, world.request(), ids))
    assert world.loop.broker.lending.in_flight(session, 0)
    await place.delete()
    await place.is_gone()


def test_a_tenant_that_was_being_deleted_is_in_the_file_at_the_next_start() -> None:
    """It is the file's, and its limit is not the 0 of the deletion. Others are still deleted."""
    deleting, nothing = CreatedTenant(deleting=True), Quota(limit=0)
    kept = quotas.Kept({KEY: nothing, ("a", None, "device"): nothing}, {"t": deleting, "a": deleting})
    assert kept.beside(Config(tenants={"t": TenantConfig()})) == (
        {("a", None, "device"): nothing},
        {"a": deleting},
    )
    assert kept.beside(Config()) == kept


@pytest.mark.parametrize("command", ["create", "set a quota"])
@played_by(tell)
async def test_an_operator_that_leaves_ends_no_command(place: Place, command: str) -> None:
    """Ctrl-C while the disk is slow: what is in the file at the next start is so now, too."""
    place.go_on.clear()
    asked = asyncio.ensure_future(place.create(weight=2) if command == "create" else place.set_quota(8 * MIB))
    await place.world.until(lambda: bool(place.kept))
    asked.cancel()
    place.go_on.set()
    expected = {KEY: Quota(weight=2)} if command == "create" else {RED: Quota(8 * MIB)}
    await place.world.until(lambda: place.quotas() == expected)
    await place.world.until(lambda: "t" in place.open_now or command != "create")


# --- quotas ---


@played_by(tell)
async def test_a_slow_disk_delays_nobody_else(place: Place) -> None:
    """Others borrow meanwhile. The number is in force once it is on the disk, and the next command waits its turn."""
    place.go_on.clear()
    first, second = (asyncio.ensure_future(place.set_quota(size)) for size in (8 * MIB, 4 * MIB))
    await place.world.until(lambda: bool(place.kept))
    await place.world.open()
    assert place.quotas() == {}
    place.go_on.set()
    assert [(await one).limit_bytes for one in (first, second)] == [8 * MIB, 4 * MIB]
    assert [rows for rows, _ in place.kept] == [{RED: Quota(8 * MIB)}, {RED: Quota(4 * MIB)}]


@played_by(tell)
async def test_a_reload_that_rules_it_out_meanwhile(place: Place) -> None:
    """The file is reloaded with a guarantee above the new limit: what was in force stays in force, on the disk too."""
    place.go_on.clear()
    command, broker = asyncio.ensure_future(place.set_quota(8 * MIB)), place.world.loop.broker
    await place.world.until(lambda: bool(place.kept))
    broker.change_rules(dataclasses.replace(broker.books.rules, guarantees={RED: 16 * MIB}))
    place.go_on.set()
    assert (await refusal(command)).reason is Reason.QUOTA_CONFLICT
    assert [rows for rows, _ in place.kept] == [{RED: Quota(8 * MIB)}, {}]
    assert place.quotas() == {}
