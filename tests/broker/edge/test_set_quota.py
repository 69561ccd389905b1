"""Quotas by command: a slow disk delays the operator that set one, and nobody else."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Mapping
from typing import Any, cast

import pytest
from tests.broker.coroutines import played_by
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.loop_world import World, play
from tests.support.sizes import MIB

from membroker.v1 import admin_pb2 as pb
from membrokerd.config.config import Config, TenantConfig
from membrokerd.core.denied import Reason
from membrokerd.core.names import QuotaKey
from membrokerd.core.rows import Quota
from membrokerd.edge.convert import Refused
from membrokerd.edge.rpc.admin_service import AdminService
from membrokerd.edge.tenants import Tenants

KEY: QuotaKey = ("t", None, "device")


class Disk:
    """Where quotas are kept. It is slow until `go_on` is set."""

    def __init__(self, world: World) -> None:
        self.kept: list[dict[QuotaKey, Quota]] = []
        self.go_on = threading.Event()
        config, unused = Config(tenants={"t": TenantConfig()}), cast(Any, None)
        tenants = Tenants(world.loop, lambda: config, unused, self.keep, unused)
        self.service = AdminService(world.loop, unused, tenants, unused, unused, unused)

    def keep(self, quotas: Mapping[QuotaKey, Quota], _created: object) -> None:
        self.kept.append(dict(quotas))
        assert self.go_on.wait(DEADLINE_SECONDS)

    def set(self, limit: int) -> asyncio.Task[pb.Quota]:
        return asyncio.create_task(self.service.SetQuota(pb.SetQuotaRequest(name="tenants/t", limit_bytes=limit), None))


@played_by(play)
async def test_a_slow_disk_delays_nobody_else(world: World) -> None:
    """Others borrow meanwhile. The number is in force once it is on the disk, and the next command waits its turn."""
    disk = Disk(world)
    first, second = disk.set(8 * MIB), disk.set(4 * MIB)
    await world.until(lambda: bool(disk.kept))
    await world.open()
    assert world.loop.broker.ledger.quotas == {}
    disk.go_on.set()
    assert [(await one).limit_bytes for one in (first, second)] == [8 * MIB, 4 * MIB]
    assert disk.kept == [{KEY: Quota(8 * MIB)}, {KEY: Quota(4 * MIB)}]


@played_by(play)
async def test_an_operator_that_leaves_takes_nothing_back(world: World) -> None:
    """Ctrl-C while the disk is slow: what is in the file at the next start is in force now, too."""
    disk = Disk(world)
    command = disk.set(8 * MIB)
    await world.until(lambda: bool(disk.kept))
    command.cancel()
    disk.go_on.set()
    await world.until(lambda: world.loop.broker.ledger.quotas == {KEY: Quota(8 * MIB)})


@played_by(play)
async def test_a_reload_that_rules_it_out_meanwhile(world: World) -> None:
    """The file is reloaded with a guarantee above the new limit: what was in force stays in force, on the disk too."""
    disk, broker = Disk(world), world.loop.broker
    command = disk.set(8 * MIB)
    await world.until(lambda: bool(disk.kept))
    broker.change_rules(dataclasses.replace(broker.books.rules, guarantees={KEY: 16 * MIB}))
    disk.go_on.set()
    with pytest.raises(Refused) as refused:
        await command
    assert refused.value.denied.reason is Reason.QUOTA_CONFLICT
    assert disk.kept == [{KEY: Quota(8 * MIB)}, {}]
    assert broker.ledger.quotas == {}
