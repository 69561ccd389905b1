"""Weights and waits with real daemons, as an operator sets them. What they decide: the transcripts `waiting_*`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.raw import Session, allocation, info
from tests.support.sizes import MIB
from tests.system.test_reload import reload

from membroker.admin import Admin, QuotaStatus
from membroker.v1 import handoff_pb2 as pb
from membroker.vmm import Location

DEVICE = Location.DEVICE
TENANTS: dict[str, Any] = {
    "red": {"weight": 2, "host_weight": 3, "models": {"chat": {"weight": 4}}},
    "blue": {},
    "green": {},
}
HOURS = 7_200.0


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running({"tenants": TENANTS}) as one:  # of 256 MiB
        yield one


def weights(admin: Admin) -> dict[str, int]:
    return {one.name.removeprefix("tenants/"): one.books["device"].weight for one in admin.tenants()}


def test_weights_are_configured_commanded_and_kept(daemon: Daemon, admin: Admin) -> None:
    """A command stands before the configuration, also after a restart, until `none` ends it. A reload changes that."""
    assert weights(admin) == {"red": 2, "blue": 1, "green": 1}
    assert {(one.name, one.location, one.weight) for one in admin.quotas(configured=True)} == {
        ("tenants/red", "device", 2),
        ("tenants/red", "host", 3),
        ("tenants/red/models/chat", "device", 4),
    }
    assert admin.set_quota("tenants/red", DEVICE, {"weight": 5}).weight == 5
    admin.set_quota("tenants/blue", DEVICE, {"weight": 0, "limit_bytes": 64 * MIB})
    admin.close()
    assert daemon.stop() == 0
    daemon.start_again()
    again = Admin(daemon.admin / "grpc.sock")
    assert weights(again) == {"red": 5, "blue": 0, "green": 1}
    assert {(one.name, one.weight) for one in again.quotas()} == {("tenants/red", 5), ("tenants/blue", 0)}
    for name in ("red", "blue"):
        again.set_quota(f"tenants/{name}", DEVICE, {"weight": None})
    assert again.quotas() == [QuotaStatus("tenants/blue", "device", 64 * MIB, 0)]
    assert weights(again) == {"red": 2, "blue": 1, "green": 1}
    reload(daemon, tenants={**TENANTS, "red": {"weight": 7}, "blue": {"weight": 0}})
    assert weights(again) == {"red": 7, "blue": 0, "green": 1}
    again.close()


def test_a_guaranteed_request_waits_as_configured(daemon: Daemon, admin: Admin) -> None:
    """Nothing is said about a wait by the worker: the operator decides, and a reload changes it."""
    with Session(daemon.endpoint("red")) as red, Session(daemon.endpoint("green")) as green:
        held, model = green.borrow(green.register("chat"), 250 * MIB), red.register("chat")

        def refused(size: int) -> dict[str, str]:
            return dict(info(red.call(allocate=allocation(model, size))).metadata)

        admin.set_quota("tenants/red/models/chat", DEVICE, {"guarantee_bytes": 64 * MIB})
        reload(daemon, guarantee_wait_seconds=0.02)
        assert int(refused(64 * MIB)["waited_ms"]) >= 20
        reload(daemon, guarantee_wait_seconds=0)
        assert "waited_ms" not in refused(64 * MIB)
        reload(daemon, guarantee_wait_seconds=HOURS)
        assert "waited_ms" not in refused(66 * MIB), "not guaranteed"
        red.send(pb.Frame(request_id=1_000, allocate=allocation(model, 64 * MIB)))
        until(lambda: (daemon.books().waiting_bytes, daemon.books().waiting_requests) == (64 * MIB, 1))
        green.release(held)
        assert len(red.answer(1_000)[1]) == 1
