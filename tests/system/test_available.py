"""What a worker asks of one model: how much it could borrow now (`available`), and its books (`GetModel`)."""

from __future__ import annotations

from tests.support.daemons import running, until
from tests.support.sizes import MIB
from tests.support.workers import workers

from membroker.v1 import admin_pb2 as apb


def test_each_level_is_told_when_it_is_the_tightest() -> None:
    """The model's limit, the tenant's, the capacity, the GPU: what was told is granted, and a granule more is not."""
    tenants = {"red": {"limit": "48MiB", "models": {"small": {"limit": "16MiB"}}}, "blue": {}}
    with running({"capacity": "64MiB", "tenants": tenants, "audit_seconds": 0.1}) as daemon, workers(2) as (red, blue):
        red.connect(daemon, "red")
        blue.connect(daemon, "blue")
        red.do("small, large = client.model('small', limit='12MiB'), client.model('large')")
        blue.do("other = client.model('other')")
        levels = "(lambda one: [one.now_bytes, one.limit_bytes, one.tenant_limit_bytes])({}.available())".format
        assert red.ask(levels("small")) == [12 * MIB, 12 * MIB, 48 * MIB]
        assert red.ask(levels("large")) == [48 * MIB, None, 48 * MIB]
        assert blue.ask(levels("other")) == [64 * MIB, None, None]

        red.do("held = large.allocate('40MiB')")
        assert red.ask("[small.available().now_bytes, large.available('device').now_bytes]") == [8 * MIB, 8 * MIB]
        assert blue.ask("other.available().now_bytes") == 24 * MIB
        assert blue.refused("other.allocate('26MiB')").reason == "CAPACITY"
        blue.do("other.allocate(other.available().now_bytes).close()")

        # The worker says that it is released, and still maps it: the books have it, the GPU does not.
        red.do("client._session.reconnecting.release(list(held._holding.extents.values()))")
        until(lambda: daemon.books().unaccounted_bytes == 40 * MIB)
        assert red.ask("large.available().now_bytes") == 24 * MIB
        assert blue.ask("other.available().now_bytes") == 24 * MIB
        assert blue.refused("other.allocate('26MiB')").reason == "DEVICE_FULL"


def test_what_was_released_since_the_last_audit_is_available() -> None:
    """An engine that starts again asks at once whether its cache fits: an old figure of the device must not deny it."""
    with running({"audit_seconds": 3600}) as daemon, workers(2) as (one, dying):
        one.connect(daemon)
        dying.connect(daemon, "blue")
        one.do("model = client.model('m'); held = model.allocate('40MiB')")
        dying.do("held = client.model('m').allocate('2MiB')")
        dying.kill()
        until(lambda: daemon.books().lent_bytes == 40 * MIB)
        assert one.ask("model.available().now_bytes") == 216 * MIB
        one.do("held.close()")
        assert one.ask("model.available().now_bytes") == 256 * MIB


def test_a_worker_looks_up_a_model_of_its_tenant() -> None:
    """An autoscaler reads one model's usage, by the name that it was registered under; it has not registered it.

    The host has its own figure, and while the device is drained nothing is available.
    """
    with running({"host_capacity": "32MiB"}) as daemon, workers(2) as (one, scaler), daemon.admin_stub() as admin:
        one.connect(daemon)
        one.do("model = client.model('Qwen/Qwen3-8B', limit='16MiB', host_limit='8MiB'); held = model.allocate('4MiB')")
        scaler.connect(daemon)
        for name in ("Qwen/Qwen3-8B", "tenants/red/models/Qwen/Qwen3-8B"):
            scaler.do(f"found = client.model_status({name!r})")
            assert scaler.ask("[found.name, found.sessions]") == ["tenants/red/models/Qwen/Qwen3-8B", 1]
            assert scaler.ask("found.books['device'].used_bytes") == 4 * MIB
        assert scaler.refused("client.model_status('absent')").error == "ModelNotFound"
        assert scaler.refused("client.model_status('no such name')").error == "InvalidRequest"
        available = "[model.available().now_bytes, model.available('host').now_bytes]"
        one.do("model.declare(5 * MIB)")  # a granule that is declared in part is not available
        assert one.ask(available) == [6 * MIB, 8 * MIB]
        admin.Drain(apb.DrainRequest())
        assert one.ask(available) == [0, 0]
