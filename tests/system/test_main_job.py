"""The main job, end to end: borrow, map, grow, be refused at each limit, release, and the next one takes it."""

from __future__ import annotations

import pytest
from tests.support.daemons import Daemon, until
from tests.support.devices import Device
from tests.support.sizes import MIB
from tests.support.workers import descriptors_at_start, until_clean, worker, workers

EACH_WAY = pytest.mark.parametrize("transport", ["handoff", "grpc"])
"""Both ways to ask, in `make test` too: elsewhere the second is deep."""


def used(daemon: Daemon, name: str) -> int:
    return {model.name: model.books[0].used_bytes for model in daemon.models()}[name]


@EACH_WAY
def test_a_worker_borrows_writes_grows_and_gives_back(daemon: Daemon, transport: str) -> None:
    """The books, the device's own figure and the pool agree at every step; the pages that come back are fresh."""
    at_start = descriptors_at_start(daemon)
    with worker() as engine:
        engine.connect(daemon, transport=transport)
        engine.do("model = client.model('llama', virtual_capacity='64GiB', limit='64MiB')")
        engine.do("pool = model.pool(page_size='2MiB')")
        assert daemon.books().lent_bytes == 0
        assert engine.ask("pool.allocate(0, 8 * MIB) == pool.base_address")
        engine.do("view = pool.view(0, 8 * MIB); view[:5] = b'hello'; view[-5:] = b'world'")
        assert engine.ask("pool.grow(4 * MIB) == pool.base_address + 8 * MIB")
        engine.do("pool.view(6 * MIB, 4 * MIB)[2 * MIB - 1 : 2 * MIB + 1] = b'!?'")  # across the seam
        assert engine.ask("[bytes(view[:5]).decode(), bytes(view[-1:]).decode()]") == ["hello", "!"]
        assert used(daemon, "tenants/red/models/llama") == 12 * MIB == daemon.books().lent_bytes
        until(lambda: daemon.books().device_used_bytes == 14 * MIB)
        engine.do("view.release(); pool.free(0, 8 * MIB)")
        until(lambda: daemon.books().lent_bytes == 4 * MIB)
        assert engine.ask("[pool.is_mapped(0), pool.is_mapped(8 * MIB)]") == [False, True]
        engine.do("pool.allocate(0, 8 * MIB)")
        assert engine.ask("bytes(pool.view(0, 5)) == bytes(5)"), "lent again what somebody had written"
        engine.do("buffer = model.allocate('5MiB'); buffer.view()[:4] = b'last'")
        assert engine.ask("[buffer.size, buffer.extent_size]") == [5 * MIB, 6 * MIB]
        assert daemon.books().lent_bytes == 18 * MIB
        engine.do("stats = model.stats(); books = stats.books['device']")
        stats = engine.ask("[books.used_bytes, books.peak_bytes, stats.allocations_total]")
        assert stats == [18 * MIB, 18 * MIB, 4 + 2 + 4 + 1]
        engine.do("buffer.close(); pool.close(); client.close()")
        until_clean(daemon, at_start)
        assert engine.finish() == 0


@EACH_WAY
def test_each_level_refuses_with_its_numbers(device: Device, transport: str) -> None:
    """A model's limit, its tenant's, the GPU's. What the numbers call available is granted right afterwards."""
    tenants = {"red": {"limit": "48MiB", "models": {"small": {"limit": "16MiB"}}}, "blue": {}}
    with device.running({"capacity": "64MiB", "tenants": tenants}) as daemon, workers(2) as (red, blue):
        red.connect(daemon, "red", transport)
        blue.connect(daemon, "blue", transport)
        red.do("small = client.model('small', virtual_capacity='1GiB', limit='12MiB').pool(page_size='2MiB')")
        red.do("large = client.model('large', virtual_capacity='1GiB').pool(page_size='2MiB')")
        blue.do("other = client.model('other', virtual_capacity='1GiB').pool(page_size='2MiB')")
        red.do("small.allocate(0, 8 * MIB)")

        model = red.refused("small.grow(6 * MIB)")
        assert (model.error, model.reason) == ("OutOfMemory", "MODEL_LIMIT")
        assert model.numbers == ("model", 6 * MIB, 4 * MIB, 12 * MIB)
        assert "small" in model.message
        assert "12.0 MiB" in model.message

        tenant = red.refused("large.allocate(0, 42 * MIB)")
        assert (tenant.reason, tenant.numbers) == ("TENANT_LIMIT", ("tenant", 42 * MIB, 40 * MIB, 48 * MIB))
        red.do("large.allocate(0, 40 * MIB)")

        device = blue.refused("other.allocate(0, 18 * MIB)")
        assert (device.reason, device.numbers) == ("CAPACITY", ("capacity", 18 * MIB, 16 * MIB, 64 * MIB))
        assert blue.ask("[other.is_mapped(0), other.physical_usage_bytes]") == [False, 0]
        blue.do("other.allocate(0, 16 * MIB)")
        assert daemon.books().free_bytes == 0

        denials = {model.name: dict(model.denials_total) for model in daemon.models()}
        assert denials == {
            "tenants/red/models/small": {"MODEL_LIMIT": 1},
            "tenants/red/models/large": {"TENANT_LIMIT": 1},
            "tenants/blue/models/other": {"CAPACITY": 1},
        }


def test_what_one_tenant_gives_back_the_other_takes(device: Device) -> None:
    """By day one tenant has all of the GPU, by night the other; neither sees the other's books, models or bytes."""
    size, page = device.capacity, device.page
    spots = f"range(0, {size}, {size // 128})"
    with device.running({"stock": "128MiB"}) as daemon, workers(2) as (red, blue):
        for tenant, each in (("red", red), ("blue", blue)):
            each.connect(daemon, tenant)
            each.do("model = client.model('m', virtual_capacity='8GiB'); driver = model.driver")
            each.do(f"pool = model.pool(page_size={page}); base = pool.base_address")
        for day, night in [(red, blue), (blue, red), (red, blue)]:
            day.do(f"pool.allocate(0, {size}); [driver.write(base + at + 100, b'secret') for at in {spots}]")
            assert day.ask(f"all(driver.read(base + at + 100, 6) == b'secret' for at in {spots})")
            assert night.refused(f"pool.allocate(0, {page})").numbers == ("capacity", page, 0, size)
            day.do(f"pool.free(0, {size})")
            until(lambda: daemon.books().lent_bytes == 0)
            night.do(f"pool.allocate(0, {size})")
            fresh = f"all(driver.read(base + at, 4096) == bytes(4096) for at in {spots})"
            assert night.ask(fresh), "one tenant read what another wrote"
            night.do(f"pool.free(0, {size})")
            until(lambda: daemon.books().lent_bytes == 0)
        assert red.ask("[m.name for m in client.models()]") == ["tenants/red/models/m"]
        assert blue.ask("[s.tenant for s in client.sessions()]") == ["tenants/blue"]
        for each in (red, blue):
            each.do("client.close()")


def test_declared_memory_is_charged_and_credited(daemon: Daemon) -> None:
    """A CUDA context counts like everything else. It ends with a smaller declaration, or with the process."""
    at_start = descriptors_at_start(daemon)
    with worker() as engine:
        engine.connect(daemon).do("model = client.model('m', limit='64MiB'); model.declare(50_000_001)")
        assert engine.ask("model.stats().books['device'].declared_bytes") == daemon.books().lent_bytes == 50_000_001
        assert engine.refused("model.declare('65MiB')").numbers[::3] == ("model", 64 * MIB)
        assert used(daemon, "tenants/red/models/m") == 50_000_001, "a refused declaration changed the one before"
        left = 64 * MIB - 50_000_001
        assert engine.refused("model.allocate('18MiB')").numbers == ("model", 18 * MIB, left, 64 * MIB)
        engine.do("model.declare('48MiB'); buffer = model.allocate('16MiB')")
        engine.do("model.declare(0)")
        assert daemon.books().lent_bytes == 16 * MIB
        engine.do("model.declare('20MiB')")
        assert daemon.books().lent_bytes == 36 * MIB
        engine.kill()
    until_clean(daemon, at_start)
