"""The node's ResourceSlice, as a fake API server keeps it, beside a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.client.dra.claims import NODE, claim, config
from tests.client.dra.cluster import GROUP, NODE_UID, ApiServer
from tests.support import raw
from tests.support.daemons import Daemon, until
from tests.support.sizes import MIB

from membroker.dra import api_server
from membroker.dra.slices import SLOTS, Slices
from membroker.v1 import admin_pb2 as apb

pytestmark = pytest.mark.shared_daemon


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def slices(daemon: Daemon, api: ApiServer, lines: list[str]) -> Slices:
    (daemon.root.parent / "7").unlink(missing_ok=True)
    (daemon.root.parent / "7").symlink_to(daemon.root.name)  # a GPU's number is no second GPU
    caller = api_server.ApiServer("127.0.0.1", api.port, api.account)
    return Slices(NODE, daemon.root.parent, caller, lines.append)


@pytest.mark.parametrize(("version", "release"), [("v1", "1.36"), ("v1beta1", "1.33")])
def test_kubernetes_knows_each_field(api: ApiServer, slices: Slices, version: str, release: str) -> None:
    """Of the slices, and of the claims that the tests make."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    api.versions = [version]
    for api.shares_devices in (True, False):
        slices.publish()
        (found,) = api.objects.values()
        if release != "1.33" or not api.shares_devices:  # that one has no shared devices yet
            validate.validate(found, release, strict=True)
        api.objects.clear()
    memory = "8Gi" if version == "v1" else None
    validate.validate(claim(version, configs=[config("Claim", limit="1Gi")], memory=memory), release, strict=True)


def spec(api: ApiServer, version: str = "v1") -> Any:
    return api.objects[f"{GROUP}/{version}/resourceslices/{NODE}-membroker"]["spec"]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_shared_devices(daemon: Daemon, api: ApiServer, slices: Slices, lines: list[str], version: str) -> None:
    """One device for each GPU; the memory that others are guaranteed is not offered. An old cluster gets slots."""
    api.versions = [version]
    slices.publish()
    found = spec(api, version)
    assert (found["driver"], found["nodeName"], found["pool"]["name"]) == ("membroker", NODE, NODE)
    (device,) = found["devices"]
    assert device["name"] == "host"
    kept = device["basic"] if version == "v1beta1" else device
    assert kept["capacity"]["memory"]["value"] == str(256 * MIB)
    assert kept["capacity"]["memory"]["requestPolicy"]["default"] == "0"
    assert kept["allowMultipleAllocations"] is True
    assert kept["attributes"]["uuid"]["string"] == daemon.device().uuid
    assert lines == ["published host, shared by claims"]

    for name in ("a", f"dra-{'0' * 36}"):
        made = apb.TenantSettings(guarantee_bytes=64 * MIB)
        raw.admin_call(daemon.admin, "CreateTenant", apb.CreateTenantRequest(name=f"tenants/{name}", settings=made))
    slices.publish()
    (device,) = spec(api, version)["devices"]
    assert device.get("basic", device)["capacity"]["memory"]["value"] == str(192 * MIB)
    assert spec(api, version)["pool"]["generation"] == 2
    for name in ("a", f"dra-{'0' * 36}"):
        raw.admin_call(daemon.admin, "DeleteTenant", apb.DeleteTenantRequest(name=f"tenants/{name}"))
    until(lambda: len(list((daemon.root / "tenants").iterdir())) == 2)

    api.shares_devices = False  # the API server drops the field of a feature that is off
    slices.publish()
    assert [one["name"] for one in spec(api, version)["devices"]] == [f"host-slot{number}" for number in range(SLOTS)]
    assert lines[-1] == f"published host, for {SLOTS} claims each"


def test_it_writes_only_what_has_changed(api: ApiServer, slices: Slices) -> None:
    slices.publish()
    before = len(api.calls)
    slices.publish()
    assert [method for method, _ in api.calls[before:]] == ["GET"]
    api.objects.clear()  # as the kubelet does when it has missed the agent
    slices.publish()
    assert spec(api)["pool"]["generation"] == 1


@pytest.mark.shared_daemon(False)
def test_a_daemon_that_is_away_takes_no_device_with_it(daemon: Daemon, api: ApiServer, slices: Slices) -> None:
    slices.publish()
    daemon.kill()
    api.objects.clear()
    slices.publish()
    assert [one["name"] for one in spec(api)["devices"]] == ["host"]


def test_the_slice_goes_with_its_node(api: ApiServer, slices: Slices, lines: list[str]) -> None:
    slices.publish()
    ((_, found),) = api.objects.items()
    (owner,) = found["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", NODE, NODE_UID)
    api.objects.clear()
    api.raw[f"/api/v1/nodes/{NODE}"] = 200, b'{"metadata": 7}'
    for _ in range(2):
        slices.publish()
    assert not api.objects
    assert len(lines) == 2, "trouble is told once"
    assert lines[-1].endswith(f"the API server's node {NODE} is not one")


def test_an_answer_that_never_ends_has_its_time(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some bytes come before each timeout of a read: the call would keep one of the agent's threads forever."""
    monkeypatch.setattr(api_server, "CALL_SECONDS", 0.5)
    api.drips = True
    api.raw[GROUP] = 200, bytes(1 << 20)
    with pytest.raises(api_server.ApiError):
        api_server.ApiServer("127.0.0.1", api.port, api.account).call("GET", GROUP)
