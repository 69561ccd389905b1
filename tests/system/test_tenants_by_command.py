"""Tenants that a platform makes while the daemon runs: they outlive it, whenever it dies, and are gone when deleted."""

from __future__ import annotations

import os
from typing import Any

import grpc
import pytest
from tests.support import faulty_daemon, raw
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.sizes import MIB
from tests.support.workers import Worker, worker
from tests.system.test_reload import reload

import membroker
from membroker.v1 import admin_pb2 as pb
from membrokerd.system.failpoints import TENANT_POINTS

NAME = "tenants/pod-7f9c"


def ask(daemon: Daemon, method: str, request: Any) -> Any:
    return raw.admin_call(daemon.admin, method, request)


def create(daemon: Daemon, name: str = NAME, **settings: Any) -> Any:
    return ask(daemon, "CreateTenant", pb.CreateTenantRequest(name=name, settings=pb.TenantSettings(**settings)))


def delete(daemon: Daemon, name: str = NAME) -> Any:
    return ask(daemon, "DeleteTenant", pb.DeleteTenantRequest(name=name))


def tenant(daemon: Daemon, name: str = NAME) -> pb.Tenant | None:
    rows = ask(daemon, "ListTenants", pb.ListTenantsRequest()).tenants
    return next((row for row in rows if row.name == name), None)


def is_gone(daemon: Daemon) -> bool:
    row = tenant(daemon)
    return (row is None or not row.HasField("settings")) and not daemon.endpoint("pod-7f9c").exists()


def enter(one: Worker, daemon: Daemon) -> None:
    one.connect(daemon, "pod-7f9c")
    one.do("model = client.model('chat'); kept = model.allocate('32MiB'); kept.view()[:4] = b'kept'")


def kept_file(daemon: Daemon) -> str:
    return (daemon.directory / "kept" / "host" / "quotas.toml").read_text()


def test_a_pod_gets_a_tenant_and_loses_it(daemon: Daemon) -> None:
    """It is in the metrics before its first session; its guarantee holds; its programs release, and it is gone."""
    made = create(daemon, guarantee_bytes=64 * MIB, limit_bytes=128 * MIB, uids=[os.geteuid()], mode=0o600)
    assert (made.books[0].guarantee_bytes, made.books[0].limit_bytes) == (64 * MIB, 128 * MIB)
    assert daemon.figure("membroker_tenant_guarantee_bytes", tenant="pod-7f9c", location="device") == 64 * MIB
    assert (daemon.endpoint("pod-7f9c") / "handoff.sock").stat().st_mode & 0o777 == 0o600
    with worker() as one:
        enter(one, daemon)
        one.do("notices = []; client.on_notice(notices.append)")
        one.do("pool = model.pool(page_size='2MiB'); pool.allocate(0, '8MiB'); pool.free(0, '8MiB')")
        one.do("segment = model.create_segment('weights', PAGE); segment.write(0, b'w'); segment.seal()")
        assert delete(daemon).deleting
        with pytest.raises(membroker.AccessDenied) as caught:
            membroker.connect(daemon.endpoint("pod-7f9c"))
        assert caught.value.reason == "TENANT_DELETED"
        assert one.refused("model.allocate(PAGE)").reason == "TENANT_LIMIT"
        assert raw.reason(create(daemon)) == "TENANT_DELETED"
        until(lambda: one.ask("[type(one).__name__ for one in notices]") == ["Draining"])
        with membroker.connect(daemon.endpoint()) as other:
            assert other.model("m").available().now_bytes >= 256 * MIB - 42 * MIB
        one.do("pool.close(); kept.close()")
        assert not is_gone(daemon)
        one.do("segment.close()")
        until(lambda: is_gone(daemon))
    assert "[" not in kept_file(daemon)
    lines = until(lambda: [line for line in daemon.log().splitlines() if "method=DeleteTenant" in line])
    assert f"result=OK by_uid={os.geteuid()} by_pid={os.getpid()}" in lines[0]
    assert create(daemon).name == NAME, "the name is free again"


def test_it_outlives_the_daemon(daemon: Daemon) -> None:
    """A restart keeps the tenant, its sessions and its numbers; a deletion that was under way goes on."""
    create(daemon, guarantee_bytes=64 * MIB)
    with worker() as one:
        enter(one, daemon)
        daemon.kill()
        daemon.start_again()
        one.do("more = model.allocate('16MiB')")
        row = tenant(daemon)
        assert row.books[0].guarantee_bytes == 64 * MIB
        delete(daemon)
        daemon.kill()
        daemon.start_again()
        assert one.refused("model.allocate('2MiB')").reason == "TENANT_LIMIT"
        with pytest.raises(membroker.AccessDenied):
            membroker.connect(daemon.endpoint("pod-7f9c"))
        assert one.ask("bytes(kept.view()[:4]).decode()") == "kept"
        one.do("kept.close(); more.close()")
        until(lambda: is_gone(daemon))


def test_beside_the_configuration(daemon: Daemon) -> None:
    """A tenant by command that is added to the file is the file's from then on. A reload leaves the others."""
    assert raw.reason(delete(daemon, "tenants/red")) == "TENANT_CONFIGURED"
    create(daemon, limit_bytes=64 * MIB)
    create(daemon, "tenants/other")
    with worker() as one:
        enter(one, daemon)
        tenants = {"red": {}, "blue": {}, "pod-7f9c": {"guarantee": "32MiB"}}
        reload(daemon, tenants=tenants)
        assert raw.reason(delete(daemon)) == "TENANT_CONFIGURED"
        row = tenant(daemon)
        assert (row.books[0].limit_bytes, row.books[0].guarantee_bytes) == (64 * MIB, 32 * MIB)
        assert "created.other" in kept_file(daemon)
        assert "created.pod-7f9c" not in kept_file(daemon)
        one.do("kept.close(); client.close()")
    until(lambda: not daemon.sessions())
    reload(daemon, tenants={"red": {}, "blue": {}})
    until(lambda: not list(daemon.endpoint("pod-7f9c").glob("*")))
    assert (daemon.endpoint("other") / "handoff.sock").exists()


@pytest.mark.deep
@pytest.mark.parametrize("point", TENANT_POINTS)
def test_the_daemon_is_killed(
    point: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Between any two steps: the tenant is there as a whole or not at all, and a deletion that is in the file ends."""
    monkeypatch.setenv(faulty_daemon.ARMED, str(tmp_path_factory.mktemp("crash") / "armed"))
    with running(module="tests.support.faulty_daemon crash") as daemon, worker() as one:
        if point not in ("tenant kept", "tenant open"):
            create(daemon, guarantee_bytes=64 * MIB)
            enter(one, daemon)
            one.do("segment = model.create_segment('weights', PAGE); segment.write(0, b'w'); segment.seal()")
        faulty_daemon.arm(point, 0)
        with pytest.raises(grpc.RpcError):
            command_until_the_end(daemon, point, one)
        daemon.process.wait(DEADLINE_SECONDS)
        daemon.start_again()
        if point in ("tenant kept", "tenant open"):
            row = tenant(daemon)
            assert row.books[0].guarantee_bytes == 64 * MIB
            enter(one, daemon)
            assert raw.reason(create(daemon)) == "TENANT_EXISTS"
            assert delete(daemon).deleting
            one.do("kept.close()")
        elif point in ("deletion kept", "deletion begun"):
            assert one.refused("model.allocate(PAGE)").reason == "TENANT_LIMIT"
            one.do("segment.close(); kept.close()")
        until(lambda: is_gone(daemon))
        assert daemon.books().lent_bytes == 0
        assert daemon.books().reserved_bytes == 0
        assert "[" not in kept_file(daemon)


def command_until_the_end(daemon: Daemon, point: str, one: Worker) -> None:
    """Make the tenant or delete it, and release all that it has; look until the daemon is dead."""
    with daemon.admin_stub() as stub:
        if point in ("tenant kept", "tenant open"):
            settings = pb.TenantSettings(guarantee_bytes=64 * MIB)
            stub.CreateTenant(pb.CreateTenantRequest(name=NAME, settings=settings), timeout=DEADLINE_SECONDS)
        else:
            stub.DeleteTenant(pb.DeleteTenantRequest(name=NAME), timeout=DEADLINE_SECONDS)
            one.do("segment.close(); kept.close()")
        while True:
            stub.ListTenants(pb.ListTenantsRequest(), timeout=DEADLINE_SECONDS)
