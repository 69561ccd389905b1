"""The node's ResourceSlice: which GPUs a claim can have here, and how much of each can be guaranteed.

Owns the slice and its two shapes. Where the cluster counts capacity (its feature gate DRAConsumableCapacity), a GPU is
one device that many claims share, and the scheduler adds up the memory that they ask for. Elsewhere a device belongs to
one claim, so a GPU has `SLOTS` of them, and the daemon alone adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..admin import Admin
from ..errors import MembrokerError
from ..ext import endpoint
from .api_server import GROUP, ApiError, ApiServer
from .claims import CAPACITY, DRIVER, directory_of

SECONDS = 60.0
"""How often the slice is compared with the daemons. The kubelet deletes it when it has missed the agent for long."""
SLOTS = 16
"""Claims that a GPU can have at a time without shared devices: a slice has at most 128 devices, for 8 GPUs."""
MAX_DEVICES = 8
NVIDIA_UUID = "gpu.nvidia.com/uuid"
"""The attribute by which NVIDIA's driver names a GPU."""
_MAX_ATTRIBUTE = 64
_PREFIX = "tenants/dra-"


class Slices:
    """Publishes what the daemons below `runtime` lend. `say` gets a line for each change, and for each new trouble."""

    def __init__(self, node: str, runtime: Path, api: ApiServer, say: Callable[[str], None]) -> None:
        self._node = node
        self._runtime = runtime
        self._api = api
        self._say = say
        self._gpus: dict[str, Mapping[str, Any]] = {}
        """What was last known of each GPU: a daemon that restarts takes no device away."""
        self._published: dict[str, Mapping[str, Any]] | None = None
        self._trouble = ""

    def publish(self) -> None:
        """Bring the slice up to date. Failures are told, and tried again with the next call."""
        try:
            self._gpus |= dict(self._look())
            self._write()
            self._trouble = ""
        except (MembrokerError, OSError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._say(f"cannot publish the GPUs of this node: {error}")

    def _look(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the GPUs whose daemons answer."""
        for directory in sorted(self._runtime.iterdir()):
            if directory.is_symlink() or not endpoint.is_device(directory):
                continue
            try:
                with Admin(directory / "admin" / "grpc.sock") as admin:
                    device, tenants = admin.device(), admin.tenants()
            except MembrokerError:
                continue
            used = sum(
                row.books["device"].guarantee_bytes
                for row in tenants
                if "device" in row.books and not row.name.startswith(_PREFIX)
            )
            capacity = max(0, device.locations["device"].capacity_bytes - used)
            yield directory_of(directory.name), {"uuid": device.uuid, "product": device.product, "capacity": capacity}

    def _write(self) -> None:
        version = self._api.version()
        path, name = f"{GROUP}/{version}/resourceslices", f"{self._node}-{DRIVER}"
        try:
            found = self._api.call("GET", f"{path}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            found = None
        if found is not None and self._gpus == self._published:
            return
        for shared in (True, False):
            body = self._slice(version, name, found, shared=shared)
            found = (
                self._api.call("POST", path, body) if found is None else self._api.call("PUT", f"{path}/{name}", body)
            )
            if not shared or _is_shared(found):
                break
        self._published = dict(self._gpus)
        how = "shared by claims" if shared else f"for {SLOTS} claims each"
        self._say(f"published {', '.join(self._gpus) or 'no GPU'}, {how}")

    def _owner(self) -> dict[str, Any]:
        """Return the node as the owner of its slice, which then goes with it."""
        try:
            uid = str(self._api.call("GET", f"/api/v1/nodes/{self._node}")["metadata"]["uid"])
        except (KeyError, TypeError) as error:
            raise ApiError(f"the API server's node {self._node} is not one") from error
        return {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": uid, "controller": True}

    def _slice(self, version: str, name: str, found: Any, *, shared: bool) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": name, "ownerReferences": [self._owner()]}
        generation = 1
        if found is not None:
            try:
                metadata["resourceVersion"] = str(found["metadata"]["resourceVersion"])
                generation += int(found["spec"]["pool"]["generation"])
            except (KeyError, TypeError, ValueError) as error:
                raise ApiError(f"the API server's ResourceSlice {name} is not one") from error
        devices = [
            device
            for directory, gpu in sorted(self._gpus.items())[:MAX_DEVICES]
            for device in _devices(directory, gpu, shared=shared)
        ]
        if version == "v1beta1":
            devices = [
                {"name": device["name"], "basic": {key: device[key] for key in device if key != "name"}}
                for device in devices
            ]
        pool = {"name": self._node, "generation": generation, "resourceSliceCount": 1}
        return {
            "apiVersion": f"resource.k8s.io/{version}",
            "kind": "ResourceSlice",
            "metadata": metadata,
            "spec": {"driver": DRIVER, "nodeName": self._node, "pool": pool, "devices": devices},
        }


def _devices(directory: str, gpu: Mapping[str, Any], *, shared: bool) -> Iterator[dict[str, Any]]:
    attributes = {key: {"string": gpu[key][:_MAX_ATTRIBUTE]} for key in ("uuid", "product") if gpu[key]}
    if gpu["uuid"].startswith("GPU-"):  # so that a claim can have both drivers' devices of one GPU
        attributes[NVIDIA_UUID] = attributes["uuid"]
    memory: dict[str, Any] = {"value": str(gpu["capacity"])}
    if shared:
        memory["requestPolicy"] = {"default": "0", "validRange": {"min": "0"}}  # without it a claim takes all
        yield {
            "name": directory,
            "attributes": attributes,
            "capacity": {CAPACITY: memory},
            "allowMultipleAllocations": True,
        }
        return
    for slot in range(SLOTS):
        yield {"name": f"{directory}-slot{slot}", "attributes": attributes, "capacity": {CAPACITY: memory}}


def _is_shared(answer: Any) -> bool:
    """Say whether the API server has kept that devices are shared: without the feature gate it drops the field."""
    try:
        devices = answer["spec"].get("devices", [])
        return all(device.get("basic", device).get("allowMultipleAllocations") is True for device in devices)
    except (TypeError, KeyError, AttributeError):
        return False
