"""What a ResourceClaim asks of this node: pure, from the object of the API server to the settings of tenants.

Owns the shapes of resource.k8s.io/v1, v1beta2 and v1beta1, the parameters of membroker in a DeviceClass or a claim, and
the names that are made of a claim's uid. Everything in a claim is from outside: each value is checked and bounded here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..errors import MembrokerError
from ..ext import names
from ..vmm.sizes import format_exact

DRIVER = "membroker"
"""The driver's name in ResourceSlices, DeviceClasses and claims, and the prefix of its attributes."""
PARAMETERS = ("membroker/v1", "Tenant")
"""apiVersion and kind of the parameters in a DeviceClass or a claim."""
CAPACITY = "memory"
"""The capacity of a device of which a claim can ask for a part."""
MAX_RESULTS = 32
"""As in the API: the devices of one claim."""
MAX_REQUESTS = 32
MAX_CONFIGS = 64
"""As in the API: up to 32 of the classes and 32 of the claim."""
MAX_PODS = 256
MAX_SHOWN = 200

_UID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LABEL = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SLOT = re.compile(r"-slot[0-9]{1,2}\Z")
_QUANTITY = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,9}))?(|[KMGTPE]i|[mkMGTPE]|[eE][0-9]{1,2})")
_UNITS = {"m": Fraction(1, 1000), "k": Fraction(1000)}
_UNITS |= {letter: Fraction(1000) ** (power + 2) for power, letter in enumerate("MGTPE")}
_UNITS |= {f"{letter}i": Fraction(1024) ** (power + 1) for power, letter in enumerate("KMGTPE")}

_SIZES = ("guarantee", "limit", "hostGuarantee", "hostLimit")
_IDS = ("owner", "group")
_OF_CLAIM = frozenset((*_SIZES, *_IDS, "mode"))
_OF_CLASS = _OF_CLAIM | {"weight", "maxGuarantee", "maxLimit", "maxHostGuarantee", "maxHostLimit"}
"""What only the operator may say, who makes the classes: bounds for the claims, and the weight."""
_FIELDS = {
    "guarantee": "guarantee_bytes",
    "limit": "limit_bytes",
    "weight": "weight",
    "hostGuarantee": "host_guarantee_bytes",
    "hostLimit": "host_limit_bytes",
    "owner": "owner",
    "group": "group",
    "mode": "mode",
}
"""Of each parameter the field of TenantSettings."""


class ClaimError(MembrokerError):
    """A claim that cannot be prepared. The kubelet shows the sentence in an event of the pod."""


@dataclass(frozen=True, slots=True)
class Allotted:
    """One device of a claim: which requests it is for, its name in the pool, and the directory of its daemon."""

    requests: tuple[str, ...]
    pool: str
    device: str
    directory: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a claim wants: its devices, and for each daemon's directory the settings of the claim's tenant there.

    `pods` are the pods that have reserved the claim, as NAMESPACE/NAME. `uuids` are those of its GPUs, once the daemons
    have said them, and `place` is the claim's namespace and name.
    """

    devices: tuple[Allotted, ...]
    tenants: Mapping[str, Mapping[str, int]]
    pods: tuple[str, ...]
    uuids: tuple[str, ...] = ()
    place: tuple[str, str] = ("", "")


def check_uid(uid: str) -> str:
    """Return the uid of a claim. Raises `ClaimError` if it is not one."""
    if not _UID.fullmatch(uid):
        raise ClaimError(f"{shown(uid)} is not the uid of a claim")
    return uid


def check_place(namespace: str, name: str) -> None:
    """Raise `ClaimError` if these are not the namespace and the name of an object: they become part of a URL."""
    if not _LABEL.fullmatch(namespace) or not _SUBDOMAIN.fullmatch(name):
        raise ClaimError(f"{shown(namespace)}/{shown(name)} is not the name of a claim")


def tenant_of(uid: str) -> str:
    """Return the name of the tenant of a claim: 40 characters, so that its socket's path is short enough."""
    return f"dra-{check_uid(uid)}"


def directory_of(device: str) -> str:
    """Return the directory of a device's daemon, below the runtime directory: its name without the slot."""
    directory = _SLOT.sub("", device)
    if not _LABEL.fullmatch(device) or not _LABEL.fullmatch(directory):
        raise ClaimError(f"{shown(device)} is not a device of the driver {DRIVER}")
    return directory


def quantity(value: object) -> int:
    """Return a quantity of Kubernetes, as in 8Gi or 8589934592, in whole bytes, rounded up. Raises `ValueError`."""
    if isinstance(value, int) and not isinstance(value, bool):
        found = Fraction(value)
    else:
        match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError
        unit = match[3]
        factor = Fraction(10) ** int(unit[1:]) if unit[:1] in ("e", "E") and unit[1:].isdecimal() else _UNITS.get(unit)
        digits = match[2] or ""
        found = Fraction(int(match[1] + digits), 10 ** len(digits)) * (1 if factor is None else factor)
    rounded = -(-found.numerator // found.denominator)
    if not 0 <= rounded <= names.MAX_BYTES:
        raise ValueError
    return rounded


def read(claim: object, uid: str, node: str) -> Wanted:
    """Return what a claim wants of this node. Raises `ClaimError`."""
    root = _table(claim, "the claim")
    if _table(root.get("metadata"), "metadata").get("uid") != uid:
        raise ClaimError("the claim was deleted, and another one has its name now")
    status = _table(root.get("status", {}), "status")
    if status.get("allocation") is None:
        raise ClaimError("the claim is not allocated")
    allocation = _table(_table(status["allocation"], "status.allocation").get("devices", {}), "allocation.devices")
    asked = dict(_requests(_table(root.get("spec"), "spec")))
    configs = list(_configs(allocation))
    devices: dict[tuple[str, str], Allotted] = {}
    tenants: dict[str, dict[str, int]] = {}
    for result in _list(allocation.get("results", []), "results", MAX_RESULTS):
        row = _table(result, "a result")
        if row.get("driver") != DRIVER:
            continue
        request, pool, device = (_text(row.get(key), key) for key in ("request", "pool", "device"))
        if pool != node:
            raise ClaimError(f"the device {shown(device)} is in the pool {shown(pool)}, and this is the node {node}")
        if row.get("adminAccess") not in (None, False):
            raise ClaimError("adminAccess is not offered: an operator's endpoint is never mounted into a pod")
        directory = directory_of(device)
        settings = _settings(row, request, asked.get(request), configs)
        tenants[directory] = _added(tenants.get(directory), settings)
        before = devices.get((pool, device))
        name = request.partition("/")[0]  # a container names the request, and not its alternative
        requests = (name,) if before is None else (*before.requests, name)
        devices[pool, device] = Allotted(requests, pool, device, directory)
    if not devices:
        raise ClaimError(f"the claim has no device of the driver {DRIVER}")
    return Wanted(tuple(devices.values()), tenants, tuple(_pods(status, root)))


# --- the parts of a claim ---


def _requests(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name of each request, or REQUEST/ALTERNATIVE, and what it asks of a device.

    In v1beta1 a request has that itself; in v1 and v1beta2 it is in `exactly`.
    """
    devices = _table(spec.get("devices", {}), "spec.devices")
    for each in _list(devices.get("requests", []), "spec.devices.requests", MAX_REQUESTS):
        request = _table(each, "a request")
        name = _text(request.get("name"), "the name of a request")
        yield name, _table(request.get("exactly", request), "exactly")
        for other in _list(request.get("firstAvailable", []), "firstAvailable", MAX_REQUESTS):
            alternative = _table(other, "an alternative")
            yield f"{name}/{_text(alternative.get('name'), 'the name of an alternative')}", alternative


def _configs(allocation: Mapping[str, Any]) -> Iterator[tuple[bool, list[str], Mapping[str, Any]]]:
    """Yield the parameters for this driver: whether they are of a class, of which requests, and what they say."""
    for each in _list(allocation.get("config", []), "config", MAX_CONFIGS):
        config = _table(each, "a config")
        opaque = _table(config.get("opaque", {}), "opaque")
        if opaque.get("driver") != DRIVER:
            continue
        of_class = config.get("source") == "FromClass"
        requests = [_text(name, "a request") for name in _list(config.get("requests", []), "requests", MAX_REQUESTS)]
        parameters = dict(_table(opaque.get("parameters"), "the parameters"))
        if (parameters.pop("apiVersion", None), parameters.pop("kind", None)) != PARAMETERS:
            raise ClaimError("the parameters need apiVersion: {} and kind: {}".format(*PARAMETERS))
        known = _OF_CLASS if of_class else _OF_CLAIM
        for key in parameters:
            if key not in known:
                where = "only a DeviceClass may set it" if key in _OF_CLASS else f"there are {', '.join(sorted(known))}"
                raise ClaimError(f"{shown(key)} is not a parameter of a claim: {where}")
        yield of_class, requests, parameters


def _settings(
    result: Mapping[str, Any],
    request: str,
    asked: Mapping[str, Any] | None,
    configs: Sequence[tuple[bool, list[str], Mapping[str, Any]]],
) -> dict[str, int]:
    """Return the settings of a tenant for one result: the class's, then the claim's, within the class's bounds."""
    found: dict[str, int] = {}
    for first in (True, False):
        for of_class, requests, parameters in configs:
            if of_class is first and (not requests or request in requests or request.partition("/")[0] in requests):
                found |= {key: _value(key, value) for key, value in parameters.items()}
    reserved = _reserved(result, asked)
    if reserved is not None and found.setdefault("guarantee", reserved) > reserved:
        raise ClaimError(
            f"the guarantee is {format_exact(found['guarantee'])}, more than the capacity {CAPACITY!r} that the "
            f"claim asks for ({format_exact(reserved)})"
        )
    for key in _SIZES:
        bound = found.pop(f"max{key[0].upper()}{key[1:]}", None)
        if bound is not None and found.get(key, 0) > bound:
            raise ClaimError(f"{key} is {format_exact(found[key])}, and the class allows {format_exact(bound)}")
        if bound is not None and key.lower().endswith("limit"):
            found.setdefault(key, bound)
    for guarantee, limit in (("guarantee", "limit"), ("hostGuarantee", "hostLimit")):
        if found.get(guarantee, 0) > found.get(limit, names.MAX_BYTES):
            raise ClaimError(
                f"{guarantee} is {format_exact(found[guarantee])}, more than {limit} ({format_exact(found[limit])})"
            )
    return {_FIELDS[key]: value for key, value in found.items()}


def _reserved(result: Mapping[str, Any], asked: Mapping[str, Any] | None) -> int | None:
    """Return how much memory the scheduler has reserved, else what the request asks for."""
    consumed = _table(result.get("consumedCapacity", {}), "consumedCapacity")
    capacity = _table((asked or {}).get("capacity", {}), "capacity")
    for source in (consumed, _table(capacity.get("requests", {}), "capacity.requests")):
        for key in (CAPACITY, f"{DRIVER}/{CAPACITY}"):
            if key in source:
                return _value(CAPACITY, source[key])
    return None


def _value(key: str, value: object) -> int:
    """Return the value of a parameter. Raises `ClaimError`."""
    if key == "mode":
        if isinstance(value, str) and re.fullmatch("0?[0-7]{3}", value):
            return int(value, 8)
        raise ClaimError(f"mode is {shown(value)}, and not a mode such as '0660'")
    if key in _IDS or key == "weight":
        top = 1000 if key == "weight" else 2**32 - 2
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= top:
            return value
        raise ClaimError(f"{key} is {shown(value)}, and not a whole number from 0 to {top}")
    try:
        return quantity(value)
    except ValueError:
        raise ClaimError(f"{key} is {shown(value)}, and not a size such as 8Gi") from None


def _added(before: dict[str, int] | None, more: dict[str, int]) -> dict[str, int]:
    """Return the settings of two devices of one GPU: guarantees and limits add up; the first says the rest."""
    if before is None:
        return more
    sums = {
        field: before.get(field, 0) + more.get(field, 0)
        for field in ("guarantee_bytes", "host_guarantee_bytes", "limit_bytes", "host_limit_bytes")
        if (field in before and field in more) or (field in (before | more) and "guarantee" in field)
    }
    rest = {field: value for field, value in (more | before).items() if not field.endswith("_bytes")}
    if any(value > names.MAX_BYTES for value in sums.values()):
        raise ClaimError("the sizes of the claim's devices are together more than 8 EiB")
    return sums | rest


def _pods(status: Mapping[str, Any], claim: Mapping[str, Any]) -> Iterator[str]:
    namespace = _table(claim["metadata"], "metadata").get("namespace")
    if not isinstance(namespace, str) or not _LABEL.fullmatch(namespace):
        return
    for each in _list(status.get("reservedFor", []), "reservedFor", MAX_PODS):
        reserved = _table(each, "reservedFor")
        name = reserved.get("name")
        if reserved.get("resource") == "pods" and isinstance(name, str) and _SUBDOMAIN.fullmatch(name):
            yield f"{namespace}/{name}"


# --- types ---


def shown(value: object) -> str:
    """Return a value from outside as a message shows it: one line, and not long."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _table(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ClaimError(f"{what}: an object was expected, not {shown(value)}")
    return value


def _list(value: object, what: str, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise ClaimError(f"{what}: a list was expected, not {shown(value)}")
    if len(value) > most:
        raise ClaimError(f"{what} has {len(value)} entries, more than {most}")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 253 or not value.isprintable():  # nor half a surrogate
        raise ClaimError(f"{what}: a name was expected, not {shown(value)}")
    return value
