"""Guarantees with real daemons and workers: memory that is kept for a tenant or a model, used or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.raw import Session, allocation, info
from tests.support.sizes import MIB
from tests.system.test_reload import reload

from membroker import Client, MembrokerError, OutOfMemory
from membroker.admin import Admin, QuotaStatus
from membroker.types import Available
from membroker.v1 import handoff_pb2 as pb
from membroker.vmm import Location

DEVICE = Location.DEVICE
TENANTS: dict[str, Any] = {
    "red": {"guarantee": "96MiB", "models": {"chat": {"guarantee": "64MiB", "limit": "128MiB"}}},
    "blue": {},
}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running({"tenants": TENANTS}) as one:  # of 256 MiB
        yield one


def test_the_rest_is_for_everybody_and_the_guarantee_for_its_owner(daemon: Daemon, red: Client, blue: Client) -> None:
    """Blue gets all but what is kept, and is told why; red gets its guarantee although the rest is lent."""
    batch, chat, other = blue.model("batch"), red.model("chat", limit="128MiB"), red.model("other")
    assert batch.available().now_bytes == 160 * MIB
    with pytest.raises(OutOfMemory) as caught:
        batch.allocate("162MiB")
    assert (caught.value.level, caught.value.available_bytes) == ("capacity", 160 * MIB)
    assert caught.value.metadata["reserved_bytes"] == str(96 * MIB)
    with batch.allocate("160MiB"):
        assert chat.available() == Available(96 * MIB, 128 * MIB, 64 * MIB, 96 * MIB, 96 * MIB)
        assert daemon.figure("membroker_device_reserved_bytes", location="device") == 96 * MIB
        assert other.available().now_bytes == 32 * MIB, "the model's own 64 are kept for it in its tenant, too"
        with other.allocate("32MiB"), chat.allocate("64MiB"):
            assert batch.available().now_bytes == 0
    until(lambda: batch.available().now_bytes == 160 * MIB)


def test_a_command_outlives_the_daemon_and_takes_nothing_back(daemon: Daemon, blue: Client, admin: Admin) -> None:
    """The answer says how much of the guarantee is still missing. That memory is reserved as it is released."""
    batch = blue.model("batch")
    first, second = batch.allocate("100MiB"), batch.allocate("60MiB")
    quota = admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": 128 * MIB, "weight": 5})
    assert (quota.guarantee_bytes, quota.limit_bytes, quota.shortfall_bytes) == (128 * MIB, None, 32 * MIB)
    assert batch.available().now_bytes == 0
    second.close()
    until(lambda: admin.device().locations["device"].guarantee_shortfall_bytes == 0)
    assert batch.available().now_bytes == 28 * MIB
    admin.close()
    assert daemon.stop() == 0
    daemon.start_again()
    again = Admin(daemon.admin / "grpc.sock")
    assert again.quotas() == [QuotaStatus("tenants/red", "device", None, 0, 128 * MIB, weight=5)]
    until(lambda: batch.available().now_bytes == 28 * MIB)
    again.set_quota("tenants/red", DEVICE, {"guarantee_bytes": None, "weight": None})
    assert again.quotas() == []
    assert batch.available().now_bytes == 60 * MIB, "the configured 96 are in force again"
    again.close()
    first.close()


def test_a_guaranteed_request_waits_as_configured(daemon: Daemon, admin: Admin) -> None:
    """Nothing is said about a wait by the worker: the operator decides, and a reload changes it."""
    with Session(daemon.endpoint("red")) as red, Session(daemon.endpoint("blue")) as blue:
        held, chat, other = blue.borrow(blue.register("batch"), 160 * MIB), red.register("chat"), red.register("other")

        def refused(model: str, size: int) -> dict[str, str]:
            return dict(info(red.call(allocate=allocation(model, size))).metadata)

        admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": 128 * MIB})
        reload(daemon, guarantee_wait_seconds=0.02)
        assert int(refused(chat, 128 * MIB)["waited_ms"]) >= 20
        reload(daemon, guarantee_wait_seconds=0)
        assert "waited_ms" not in refused(chat, 128 * MIB)
        reload(daemon, guarantee_wait_seconds=7_200.0)
        assert "waited_ms" not in refused(other, 98 * MIB), "not guaranteed"
        red.send(pb.Frame(request_id=1_000, allocate=allocation(chat, 128 * MIB)))
        until(lambda: (daemon.books().waiting_bytes, daemon.books().waiting_requests) == (128 * MIB, 1))
        blue.release(held)
        assert len(red.answer(1_000)[1]) == 1


def test_nothing_is_lent_under_a_number_that_cannot_be_written(daemon: Daemon, admin: Admin) -> None:
    """The disk that outlives a reboot has a fault: the operator learns where, and the numbers stay what they were.

    A request waits that would be granted by the command.
    """
    kept = daemon.directory / "kept" / "host" / "quotas.toml"
    admin.set_quota("tenants/blue", DEVICE, {"limit_bytes": 200 * MIB})
    kept.with_name("quotas.toml.new").mkdir(parents=True)
    with Session(daemon.endpoint("blue")) as blue:
        request = allocation(blue.register("m"), 16 * MIB, 11)
        request.wait.seconds = 3_600
        blue.send(pb.Frame(request_id=100, allocate=request))
        until(lambda: daemon.books().waiting_requests == 1)
        for name, numbers in (("red", {"guarantee_bytes": 0}), ("blue", {"limit_bytes": None})):
            with pytest.raises(MembrokerError, match=f"cannot be kept in {kept}: Is a directory") as caught:
                admin.set_quota(f"tenants/{name}", DEVICE, numbers)
            assert caught.value.reason == "INTERNAL"
        books = daemon.books()
        assert (books.waiting_requests, books.lent_bytes, books.reserved_bytes) == (1, 0, 96 * MIB)
        assert [(quota.name, quota.limit_bytes) for quota in admin.quotas()] == [("tenants/blue", 200 * MIB)]
        kept.with_name("quotas.toml.new").rmdir()
        admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": 0})
        assert len(blue.answer(100)[1]) == 11


def test_memory_that_is_kept_for_nobody_is_told_and_can_be_freed(daemon: Daemon, red: Client, admin: Admin) -> None:
    """A tenant with guarantees, by the file and by command, is no longer configured. What it holds stays."""
    with red.model("other").allocate("2MiB"):
        reload(daemon, tenants={"blue": {"guarantee": "192MiB"}})
        books = admin.device().locations["device"]
        assert (books.reserved_bytes, books.guarantee_shortfall_bytes) == (192 * MIB, 0)
        reload(daemon)
    red.close()
    until(lambda: not daemon.sessions())
    admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": 128 * MIB})
    said = reload(daemon, tenants={"blue": {}})
    assert "memory is kept for a tenant that is not configured" in said
    assert "`membroker quota set red --guarantee none` ends that" in said
    assert admin.device().locations["device"].reserved_bytes == 128 * MIB
    admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": None})
    assert admin.device().locations["device"].reserved_bytes == 0
    with pytest.raises(MembrokerError) as caught:
        admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": MIB})
    assert caught.value.reason == "TENANT_NOT_FOUND"
