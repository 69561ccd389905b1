"""ResourceClaims as the API servers of two Kubernetes versions show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NODE = "node-a"
UID = "0b9c8f7e-1d2c-4b3a-9e8f-7a6b5c4d3e2f"
VERSIONS = ("v1", "v1beta1")


def parameters(**given: Any) -> dict[str, Any]:
    return {"apiVersion": "membroker/v1", "kind": "Tenant", **given}


def config(source: str, requests: Sequence[str] = (), **given: Any) -> dict[str, Any]:
    return {
        "source": f"From{source}",
        "requests": list(requests),
        "opaque": {"driver": "membroker", "parameters": parameters(**given)},
    }


def result(device: str = "host-slot0", request: str = "gpu", **more: Any) -> dict[str, Any]:
    return {"request": request, "driver": "membroker", "pool": NODE, "device": device, **more}


def claim(
    version: str = "v1",
    *,
    uid: str = UID,
    name: str = "worker-gpu",
    results: Sequence[Mapping[str, Any]] = (),
    configs: Sequence[Mapping[str, Any]] = (),
    memory: object = None,
) -> dict[str, Any]:
    """Return a claim of the pod acme/worker-0 with one request, `gpu`, and its allocation.

    `memory`: how much of the device's capacity the request asks for.
    """
    asked: dict[str, Any] = {"deviceClassName": "membroker", "allocationMode": "ExactCount", "count": 1}
    if memory is not None:
        asked["capacity"] = {"requests": {"memory": memory}}
    request = {"name": "gpu", "exactly": asked} if version == "v1" else {"name": "gpu", **asked}
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "acme", "uid": uid},
        "spec": {"devices": {"requests": [request]}},
        "status": {
            "allocation": {"devices": {"results": list(results) or [result()], "config": list(configs)}},
            "reservedFor": [{"resource": "pods", "name": "worker-0", "uid": "9" * 8 + UID[8:]}],
        },
    }
