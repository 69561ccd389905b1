"""`membroker dra` between a fake kubelet, a fake API server and a real daemon: claims become tenants, and end."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.client.dra.claims import NODE, UID, claim, config, result
from tests.client.dra.cluster import GROUP, Node, node
from tests.support import raw
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import MIB
from tests.support.template import run as run_python
from tests.support.workers import worker

from membroker.dra import api_server
from membroker.dra.agent import Agent
from membroker.dra.files import DeviceFiles, Records
from membroker.dra.v1 import kubelet_pb2 as pb
from membroker.v1 import admin_pb2 as apb

TENANT = f"dra-{UID}"
OTHER = f"1{UID[1:]}"


@pytest.fixture(scope="module")
def shared() -> Iterator[Node]:
    with running() as daemon, node(daemon) as found:
        yield found


@pytest.fixture
def one(shared: Node) -> Iterator[Node]:
    """A node with nothing on it; the tests of this file use one after the other."""
    yield shared
    for name in tenants(shared.daemon):
        raw.admin_call(shared.daemon.admin, "DeleteTenant", apb.DeleteTenantRequest(name=name))
    until(lambda: not tenants(shared.daemon))
    for path in (*shared.records.iterdir(), *shared.cdi.iterdir()):
        path.unlink()
    shared.api.reset()
    shared.version = "v1"


@pytest.fixture
def daemon(one: Node) -> Daemon:
    return one.daemon


def tenants(daemon: Daemon) -> dict[str, Any]:
    rows = raw.admin_call(daemon.admin, "ListTenants", apb.ListTenantsRequest(page_size=1000)).tenants
    return {row.name: row for row in rows if row.HasField("settings")}


def cdi(one: Node, uid: str = UID) -> Any:
    return json.loads((one.cdi / f"membroker-{uid}.json").read_text())


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_the_life_of_a_claim(daemon: Daemon, one: Node, version: str) -> None:
    """By both versions of the kubelet's service and of the API: a worker enters the tenant that is mounted."""
    one.version, one.api.versions = version, [version, "v1alpha3"]
    settings = config("Claim", guarantee="64Mi", limit="128Mi", mode="0600")
    asked = one.api.add(claim(version, configs=[settings]))
    answer = one.prepare(asked)[UID]
    assert answer.error == ""
    (device,) = answer.devices
    assert (list(device.request_names), device.pool_name, device.device_name) == (["gpu"], NODE, "host-slot0")
    assert list(device.cdi_device_ids) == [f"membroker/tenant={UID}-host"]
    made = tenants(daemon)[f"tenants/{TENANT}"]
    (books,) = [row for row in made.books if row.location == 1]
    assert (books.guarantee_bytes, books.limit_bytes, made.settings.mode) == (64 * MIB, 128 * MIB, 0o600)

    (found,) = cdi(one)["devices"]
    assert f"{cdi(one)['kind']}={found['name']}" == device.cdi_device_ids[0]
    endpoint = str(daemon.endpoint(TENANT))
    assert found["containerEdits"]["env"] == [f"MEMBROKER_ENDPOINT={endpoint}"]
    (mount,) = found["containerEdits"]["mounts"]
    assert (mount["hostPath"], mount["containerPath"], "ro" in mount["options"]) == (endpoint, endpoint, True)

    with worker() as pod:
        pod.connect(daemon, TENANT)
        pod.do("kept = client.model('chat').allocate('32MiB')")
        assert one.unprepare(asked)[UID].error == ""
        assert tenants(daemon)[f"tenants/{TENANT}"].deleting
        assert not list(one.cdi.iterdir())
        assert not list(one.records.iterdir())
        assert "TENANT_DELETED" not in one.log()
        assert "is being deleted" in one.prepare(asked)[UID].error  # of the same claim for the next pod: ask again
        pod.do("kept.close()")
        until(lambda: not tenants(daemon))
    assert one.prepare(asked)[UID].error == ""
    assert one.unprepare(asked)[UID].error == ""
    until(lambda: not tenants(daemon))
    assert f"has the tenant {TENANT} (host) for acme/worker-0" in one.log()


def test_every_call_can_be_repeated(daemon: Daemon, one: Node) -> None:
    """Also when the API server has gone, and after the end of the agent by SIGKILL or of the node's /var/run."""
    asked = one.api.add(claim(configs=[config("Claim", guarantee="64Mi")]))
    first, file = one.prepare(asked), cdi(one)
    one.api.objects.clear()
    assert one.prepare(asked) == first
    one.stop(signal.SIGKILL)
    (one.cdi / f"membroker-{UID}.json").unlink()
    (one.records / "x.json").write_text("{}")  # nobody's
    one.start()
    assert cdi(one) == file  # the kubelet does not ask again after a reboot
    assert "cannot write the runtime's file of the claim 'x'" in one.log()
    (one.records / "x.json").unlink()
    assert one.prepare(asked) == first
    assert list(tenants(daemon)) == [f"tenants/{TENANT}"]
    for _ in range(2):
        assert one.unprepare(asked)[UID].error == ""
    until(lambda: not tenants(daemon))


def test_a_tenant_that_it_did_not_make_stays(daemon: Daemon, one: Node) -> None:
    made = apb.CreateTenantRequest(name=f"tenants/{TENANT}", settings=apb.TenantSettings(limit_bytes=MIB))
    raw.admin_call(daemon.admin, "CreateTenant", made)
    asked = one.api.add(claim())
    assert f"host has a tenant {TENANT} that this agent has not made" in one.prepare(asked)[UID].error
    assert one.unprepare(asked)[UID].error == ""
    assert not list(one.records.iterdir())
    (row,) = tenants(daemon).values()
    assert not row.deleting


def test_each_claim_of_a_call_has_its_own_end(daemon: Daemon, one: Node) -> None:
    good = one.api.add(claim())
    large = one.api.add(claim(uid=OTHER, name="large", configs=[config("Claim", guarantee="1Gi")]))
    absent = pb.Claim(namespace="acme", name="absent", uid=f"2{UID[1:]}")
    odd = pb.Claim(namespace="acme", name="odd", uid="../../etc/passwd")
    found = {uid: answer.error for uid, answer in one.prepare(good, large, absent, odd).items()}
    assert found.pop(UID) == ""
    assert "more than the capacity (256.0 MiB)" in found.pop(OTHER)
    assert "the API server has no ResourceClaim acme/absent" in found.pop(absent.uid)
    assert "is not the uid of a claim" in found.pop(odd.uid)
    assert not found
    assert list(tenants(daemon)) == [f"tenants/{TENANT}"]
    assert [path.name for path in one.records.iterdir()] == [f"{UID}.json"]
    assert [path.name for path in one.cdi.iterdir()] == [f"membroker-{UID}.json"]
    errors = {uid: answer.error for uid, answer in one.unprepare(good, absent, odd).items()}
    assert (errors[UID], errors[absent.uid]) == ("", "")
    assert "is not the uid" in errors[odd.uid]


def test_a_claim_for_two_gpus(daemon: Daemon, one: Node) -> None:
    """It gets a tenant at each daemon or at none. While one daemon is away the other's tenant ends all the same."""
    second = Daemon(daemon.directory, device=1)
    try:
        rows = [result("host-slot3", "a"), result("host-1-slot0", "b")]
        small = config("Claim", ["b"], guarantee="64Mi")
        asked = one.api.add(claim(results=rows, configs=[small]))
        large = one.api.add(claim(uid=OTHER, name="x", results=rows, configs=[config("Claim", ["b"], guarantee="1Gi")]))
        assert "more than the capacity" in one.prepare(large)[OTHER].error
        assert not tenants(daemon)
        answer = one.prepare(asked)[UID]
        assert [(list(device.request_names), list(device.cdi_device_ids)) for device in answer.devices] == [
            (["a"], [f"membroker/tenant={UID}-host"]),
            (["b"], [f"membroker/tenant={UID}-host-1"]),
        ]
        assert list(tenants(daemon)) == list(tenants(second)) == [f"tenants/{TENANT}"]
        assert [device["name"] for device in cdi(one)["devices"]] == [f"{UID}-host", f"{UID}-host-1"]
        second.kill()
        assert "the daemon of host-1 does not run" in one.unprepare(asked)[UID].error
        until(lambda: not tenants(daemon))
        second.start_again()
        assert one.unprepare(asked)[UID].error == ""
        until(lambda: not tenants(second))
        assert second.stop() == 0
    finally:
        second.process.kill()
        second.process.wait()


def test_what_fails_last_leaves_nothing(daemon: Daemon, one: Node) -> None:
    """The tenant is made, and the runtime's file cannot be written."""
    asked = one.api.add(claim())
    one.cdi.rmdir()
    assert "No such file or directory" in one.prepare(asked)[UID].error
    until(lambda: not tenants(daemon))
    assert not list(one.records.iterdir())
    one.cdi.mkdir()
    assert one.prepare(asked)[UID].error == ""
    assert one.unprepare(asked)[UID].error == ""


def test_an_agent_that_died_after_its_record(daemon: Daemon, one: Node) -> None:
    """Its tenant is not made yet: the next call makes it, and never takes it for another's."""
    asked = one.api.add(claim(configs=[config("Claim", guarantee="64Mi")]))
    assert one.prepare(asked)[UID].error == ""
    raw.admin_call(daemon.admin, "DeleteTenant", apb.DeleteTenantRequest(name=f"tenants/{TENANT}"))
    until(lambda: not tenants(daemon))
    assert one.prepare(asked)[UID].error == ""
    assert list(tenants(daemon)) == [f"tenants/{TENANT}"]
    assert one.unprepare(asked)[UID].error == ""


def test_what_is_left_of_a_claim_that_does_not_exist_any_more(daemon: Daemon, one: Node) -> None:
    """It goes when the API server itself says that the claim is gone, and for no other answer."""
    lines: list[str] = []
    beside = Agent(
        NODE,
        daemon.root.parent,
        api_server.ApiServer("127.0.0.1", one.api.port, one.api.account),
        Records(one.records),
        DeviceFiles(one.cdi, daemon.root.parent, "MEMBROKER_ENDPOINT"),
        lines.append,
    )
    asked = one.api.add(claim())
    assert one.prepare(asked)[UID].error == ""
    path = "/apis/resource.k8s.io/v1/namespaces/acme/resourceclaims/worker-gpu"
    for at, *answer in (
        (path, 404, b"404 page not found"),
        (path, 404, b'{"reason": "NotFound", "details": {"name": "another"}}'),
        (path, 503, b""),
        (GROUP, 404, b'{"reason": "NotFound", "details": {"name": "worker-gpu"}}'),
        (GROUP, 200, b'{"versions": []}'),
    ):
        one.api.raw = {at: tuple(answer)}
        beside.collect()
        assert [each.name for each in one.records.iterdir()] == [f"{UID}.json"]
    one.api.raw = {}
    beside.collect()
    assert list(tenants(daemon)) == [f"tenants/{TENANT}"]
    assert not lines
    one.api.add(claim(uid=OTHER))  # of the same name
    beside.collect()
    until(lambda: not tenants(daemon))
    assert not list(one.records.iterdir())
    asked = one.api.add(claim())
    assert one.prepare(asked)[UID].error == ""
    del one.api.objects[path]
    beside.collect()
    assert not [*one.records.iterdir(), *one.cdi.iterdir()]
    assert lines == [f"the claim {UID} does not exist any more: its tenant {TENANT} ends"] * 2


def test_a_call_while_the_last_one_is_at_work(one: Node) -> None:
    asked = one.api.add(claim())
    one.api.goes_on.clear()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(one.prepare, asked)
        until(lambda: any("/resourceclaims/" in path for _, path in one.api.calls))
        try:
            assert "an earlier call for this claim has not ended" in one.prepare(asked)[UID].error
            assert "an earlier call" in one.unprepare(asked)[UID].error
        finally:
            one.api.goes_on.set()
        assert first.result()[UID].error == ""
    assert one.unprepare(asked)[UID].error == ""


def test_a_daemon_that_is_away(daemon: Daemon, one: Node) -> None:
    """Its claims wait, with a sentence; when it is back it has its tenants, and they can end."""
    asked = one.api.add(claim())
    assert one.prepare(asked)[UID].error == ""
    daemon.kill()
    next_one = one.api.add(claim(uid=OTHER, name="next"))
    for error in (one.prepare(asked)[UID].error, one.prepare(next_one)[OTHER].error, one.unprepare(asked)[UID].error):
        assert f"the daemon of host does not run on {NODE}" in error
    assert [path.name for path in one.records.iterdir()] == [f"{UID}.json"]
    daemon.start_again()
    assert one.prepare(asked)[UID].error == ""
    assert one.unprepare(asked)[UID].error == ""
    until(lambda: not tenants(daemon))


def test_bad_answers_of_the_api_server(one: Node) -> None:
    asked = one.api.add(claim())
    (path,) = (path for path in one.api.objects if "/resourceclaims/" in path)  # the agent may have published its slice
    for status, text, what in (
        (200, b"[" * 100_000, "is not JSON"),
        (200, b"x" * ((4 << 20) + 1), "has more than"),
        (403, json.dumps({"message": "n\n" * 9_999}).encode(), "refuses it (403): 'n\\nn"),
    ):
        one.api.raw[path] = status, text
        assert what in one.prepare(asked)[UID].error
    one.api.raw = {GROUP: (200, b'{"versions": [{"version": "v1alpha3"}, 7]}')}
    one.api.objects.clear()
    assert "the API server has none of resource.k8s.io v1, v1beta2, v1beta1" in one.prepare(asked)[UID].error
    (one.api.account / "token").write_text("another")  # as one that has ended
    assert "refuses it (401): 'Unauthorized'" in one.prepare(asked)[UID].error


def test_a_second_agent_leaves_the_first_alone(one: Node) -> None:
    done = run_python(one.arguments(), env=one.environment())
    assert done.returncode == 1
    assert "another agent serves the kubelet here" in done.stderr
    asked = one.api.add(claim())
    assert one.prepare(asked)[UID].error == ""
    assert one.unprepare(asked)[UID].error == ""
    assert not any(path.stat().st_mode & 0o007 for path in (one.socket, one.records))
