"""What a ResourceClaim asks for, in the shapes of two Kubernetes versions, and what of it is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.client.dra.claims import NODE, UID, VERSIONS, claim, config, result
from tests.support.sizes import GIB, MIB

from membroker.dra import claims
from membroker.dra.claims import ClaimError


def read(given: Any) -> claims.Wanted:
    return claims.read(given, UID, NODE)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_claim_wants(version: str) -> None:
    """The class's parameters, then the claim's; those of other drivers and other requests do not count."""
    wanted = read(
        claim(
            version,
            results=[result("gpu-12345678-slot3"), result("disk-1", driver="other.example")],
            configs=[
                config("Class", limit="16Gi", weight=2, maxGuarantee="8Gi"),
                config("Claim", guarantee="4Gi", group=10001, mode="0660"),
                config("Claim", ["another"], guarantee="1Gi"),
                {"source": "FromClaim", "opaque": {"driver": "other.example", "parameters": {"guarantee": 1}}},
                {"source": "FromClaim"},
            ],
        )
    )
    assert wanted.devices == (claims.Allotted(("gpu",), NODE, "gpu-12345678-slot3", "gpu-12345678"),)
    assert wanted.tenants == {
        "gpu-12345678": {
            "limit_bytes": 16 * GIB,
            "weight": 2,
            "guarantee_bytes": 4 * GIB,
            "group": 10001,
            "mode": 0o660,
        }
    }
    assert wanted.pods == ("acme/worker-0",)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_capacity_that_it_asks_for_is_its_guarantee(version: str) -> None:
    """What the scheduler has reserved, which may be rounded up, comes before what the request says."""
    assert read(claim(version, memory="8Gi")).tenants == {"host": {"guarantee_bytes": 8 * GIB}}
    reserved = result(consumedCapacity={"memory": "10Gi"})
    assert read(claim(version, memory="8Gi", results=[reserved])).tenants == {"host": {"guarantee_bytes": 10 * GIB}}
    less = claim(version, memory="8Gi", configs=[config("Claim", guarantee="2Gi")])
    assert read(less).tenants == {"host": {"guarantee_bytes": 2 * GIB}}
    with pytest.raises(ClaimError, match=r"9.0 GiB, more than the capacity 'memory' .*8.0 GiB"):
        read(claim(version, memory="8Gi", configs=[config("Claim", guarantee="9Gi")]))


def test_two_devices_of_one_gpu_are_one_tenant() -> None:
    """Guarantees and limits add up; a limit counts only if each has one."""
    rows = [result("host-slot0", "a"), result("host-slot1", "b"), result("host-1", "c")]
    every = config("Claim", guarantee="1Gi", limit="2Gi", owner=7)
    wanted = read(claim(results=rows, configs=[every]))
    assert wanted.tenants["host"] == {"guarantee_bytes": 2 * GIB, "limit_bytes": 4 * GIB, "owner": 7}
    assert wanted.tenants["host-1"] == {"guarantee_bytes": GIB, "limit_bytes": 2 * GIB, "owner": 7}
    one = read(claim(results=rows, configs=[config("Claim", ["a"], guarantee="1Gi", limit="2Gi")]))
    assert one.tenants["host"] == {"guarantee_bytes": GIB}
    shared = [result("host-slot0", "a"), result("host-slot0", "b")]
    assert read(claim(results=shared)).devices[0].requests == ("a", "b")


def test_the_class_bounds_its_claims() -> None:
    bounds = config("Class", maxGuarantee="2Gi", maxLimit="4Gi", maxHostLimit="1Gi")
    wanted = read(claim(configs=[config("Claim", guarantee="2Gi"), bounds]))
    assert wanted.tenants["host"] == {"guarantee_bytes": 2 * GIB, "limit_bytes": 4 * GIB, "host_limit_bytes": GIB}
    for given in ({"guarantee": "2049Mi"}, {"limit": "5Gi"}, {"hostLimit": 2**31}):
        with pytest.raises(ClaimError, match="and the class allows"):
            read(claim(configs=[bounds, config("Claim", **given)]))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"weight": 2}, "'weight' is not a parameter of a claim: only a DeviceClass may set it"),
        ({"limitt": "1Gi"}, "'limitt' is not a parameter of a claim: there are group"),
        *(({"limit": size}, "not a size") for size in ("1GiB", -1, "9Ei", True, 1.5, "1e99", "1" * 100_000)),
        ({"guarantee": "2Gi", "limit": "1Gi"}, "guarantee is 2.0 GiB, more than limit"),
        *(({"mode": mode}, "not a mode") for mode in ("0999", 432)),
        ({"owner": 2**32 - 1}, "not a whole number"),
        ({"apiVersion": "membroker/v9"}, "need apiVersion: membroker/v1 and kind: Tenant"),
    ],
)
def test_parameters_that_are_refused(given: Any, what: str) -> None:
    with pytest.raises(ClaimError) as raised:
        read(claim(configs=[config("Claim", **given)]))
    assert what in str(raised.value)
    assert len(str(raised.value)) < 1_000


@pytest.mark.parametrize(
    ("device", "what"),
    [
        ({"adminAccess": True}, "adminAccess is not offered"),
        ({"pool": "node-b"}, "the device 'host-slot0' is in the pool 'node-b', and this is the node node-a"),
        ({"device": "../../etc"}, "is not a device of the driver"),
        ({"request": "a" * 300}, "request: a name was expected"),
        ({"driver": "another"}, "the claim has no device of the driver membroker"),
        ({"consumedCapacity": {"memory": "much"}}, "memory is 'much'"),
    ],
)
def test_devices_that_are_refused(device: Any, what: str) -> None:
    with pytest.raises(ClaimError, match=re.escape(what)):
        read(claim(results=[result(**device)]))


def test_a_claim_that_is_another_or_not_allocated() -> None:
    with pytest.raises(ClaimError, match="another one has its name now"):
        claims.read(claim(), f"1{UID[1:]}", NODE)
    with pytest.raises(ClaimError, match="not allocated"):
        read({**claim(), "status": {}})
    with pytest.raises(ClaimError, match="results has 33 entries, more than 32"):
        read(claim(results=[result()] * 33))


def test_quantities() -> None:
    texts = ("1.5Mi", "129e6", 4096, "1500m", "7Ei")
    assert [claims.quantity(text) for text in texts] == [MIB * 3 // 2, 129_000_000, 4096, 2, 7 << 60]


def test_names_of_a_claim() -> None:
    assert claims.tenant_of(UID) == f"dra-{UID}"
    for wrong in ("", UID.upper(), UID[1:], f"{UID}\n", "../" * 12):
        with pytest.raises(ClaimError):
            claims.tenant_of(wrong)
    claims.check_place("acme", "worker.gpu-0")
    for namespace, name in (("acme/..", "a"), ("acme", "../a"), ("acme", "a?b"), ("", "a"), ("acme", "a" * 254)):
        with pytest.raises(ClaimError):
            claims.check_place(namespace, name)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_part_of_another_type_is_refused_or_left_out(version: str) -> None:
    """Each value of a claim, replaced by each kind of JSON, gives a claim or a ClaimError."""
    kinds: tuple[Any, ...] = (None, True, 7, -1.5, "", "x" * 9, "\ud800", [], [[]], {}, {"name": {}}, [None], [7])
    directories = {"host", "x" * 9}

    def places(value: Any) -> list[tuple[Any, Any]]:
        found = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        deeper = [place for _, one in found if isinstance(one, dict | list) for place in places(one)]
        return [(value, key) for key, _ in found] + deeper

    def fresh() -> Any:
        configs = [config("Class", limit="2Gi"), config("Claim", ["gpu"], mode="600")]
        return claim(version, memory="1Gi", configs=configs)

    refused: set[str] = set()
    for number in range(len(places(fresh()))):
        for kind in kinds:
            given = fresh()
            container, key = places(given)[number]
            container[key] = kind
            try:
                (device,) = read(given).devices
                assert device.directory in directories
                assert "".join(device.requests).encode(), "the answer to the kubelet is UTF-8"
            except ClaimError as error:
                refused.add(str(error))
    assert len(refused) > 20
