"""Opens the driver of the device that this daemon owns, and works out how much may be lent and by which rules.

Sizes are decided once, at the start. Only `changed_rules` may be called again while the daemon runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from membroker.vmm import Driver, DriverError, DriverUnavailable, Location, format_exact, open_driver
from membroker.vmm.sizes import GIB, MIB

from ..config.config import Config, quotas_of
from ..config.guarantees import misfit_sentences
from ..core import policy
from ..core.names import Location as CoreLocation
from ..core.names import QuotaKey
from ..core.rows import Quota
from ..system import logs

HOST_GRANULARITY = 2 * MIB
HOST_DEFAULT_CAPACITY = GIB
CUDA_HEADROOM = 2 * GIB
"""Room for the CUDA contexts of workers (about 500 MiB each on an H200), the gate's reserve and the anchor."""
CUDA_GATE_RESERVE = 256 * MIB
_UNIFIED_MEMORY = (
    "this GPU shares the machine's memory, as GB10 and Jetson do, and does not tell how much of it is in use, which a "
    'broker must know: the driver "host" lends that memory to programs that run on the CPU'
)
MAX_MODELS_OF_USERS = 4_096
"""Models in all, where each user is a tenant: nobody has configured how many these are."""
CUDA_STOCK = GIB
"""The size of a GPU's warm pool. The host driver has no warm pool: it creates an extent in 30 µs."""


class DeviceError(Exception):
    """The device cannot be used as configured. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The driver, and how much of its device may be lent. Sizes are in bytes."""

    driver: Driver
    reopen: Callable[[Mapping[str, int], Mapping[CoreLocation, int]], Driver]
    """Opens the same driver with the descriptors of an earlier daemon's driver (`Driver.survivors`).

    The second argument is what is lent already. The host driver gets room for that, even if less is configured now.
    """
    directory: str
    capacities: Mapping[CoreLocation, int]
    headroom: int
    gate_reserve: int
    stock_extents: int
    stock_bytes: int
    fell_back: bool = False
    """Whether `driver = "auto"` found no usable GPU and took the host driver, which lends ordinary memory."""

    def rules(
        self,
        config: Config,
        anchor: int,
        max_sessions: int,
        max_segment_extents: int,
        capacities: Mapping[CoreLocation, int] | None = None,
    ) -> policy.Rules:
        """Return the core's rules. `capacities` replace the plan's if more than those is lent already."""
        fixed = policy.Rules(
            granularity=self.driver.device.granularity,
            capacities=capacities or self.capacities,
            anchor_bytes=anchor,
            max_sessions=max_sessions,
            max_segment_extents=max_segment_extents,
            stock_extents=self.stock_extents,
            stock_bytes=self.stock_bytes,
        )
        return changed_rules(fixed, config)


def changed_rules(rules: policy.Rules, config: Config) -> policy.Rules:
    """Return the rules with the values that a reload of the configuration may change."""
    quotas = dict(quotas_of(config.tenants))
    return replace(
        rules,
        limits={key: quota.limit for key, quota in quotas.items() if quota.limit is not None},
        guarantees={key: quota.guarantee for key, quota in quotas.items() if quota.guarantee is not None},
        weights={key: quota.weight for key, quota in quotas.items() if quota.weight is not None},
        default_limits=_by_location(config.default_limit, config.default_host_limit),
        settle_ns=int(config.settle_seconds * 1e9),
        model_grace_ns=int(config.model_grace_seconds * 1e9),
        guarantee_wait_ns=int(config.guarantee_wait_seconds * 1e9),
        recall_ns=int(config.recall_seconds * 1e9),
        slice_ns=int(config.slice_seconds * 1e9),
        unlent=frozenset(name for name, tenant in config.tenants.items() if not tenant.lend_unused),
        max_sessions_per_tenant=_share(rules.max_sessions, len(config.endpoints) if config.tenants else 0),
        max_models_per_tenant=config.max_models_per_tenant,
        max_models=max(MAX_MODELS_OF_USERS, config.max_models_per_tenant) if config.uid_tenants else None,
    )


def _share(sessions: int, tenants: int) -> int | None:
    """Return how many sessions one tenant may have, so that it cannot use up all of them.

    Half of an equal share is reserved for each other tenant; the endpoint in which each uid is a tenant counts as one.
    If there is no other, a quarter is reserved for the others in it.
    """
    if tenants == 1:
        return None
    kept = sessions // 4 if not tenants else (tenants - 1) * (sessions // (2 * tenants))
    return max(1, sessions - kept)


def _by_location(device: int | None, host: int | None) -> dict[CoreLocation, int]:
    both: dict[CoreLocation, int | None] = {"device": device, "host": host}
    return {where: limit for where, limit in both.items() if limit is not None}


def check_guarantees(rules: policy.Rules) -> None:
    """Raise `DeviceError` if the configured guarantees do not fit the limits and what this device can lend."""
    if problems := misfit_sentences({}, rules):
        raise DeviceError("; ".join(problems) + ": lower guarantees in the configuration")


def warn_of_guarantees(quotas: Mapping[QuotaKey, Quota], rules: policy.Rules, config: Config) -> None:
    """Log which guarantees cannot be kept because of quotas that were set by command, and which are for no tenant."""
    for sentence in misfit_sentences(quotas, rules):
        logs.warn(f"{sentence}: see `membroker quota list --all`, and lower one by `membroker quota set`")
    for (tenant, model, location), quota in () if config.uid_tenants else sorted(quotas.items(), key=str):
        if quota.guarantee and tenant not in config.tenants:
            name = tenant if model is None else f"{tenant}/{model}"
            where = "" if location == "device" else f" --location {location}"
            logs.warn(
                "memory is kept for a tenant that is not configured: "
                f"`membroker quota set {name}{where} --guarantee none` ends that",
                tenant=tenant,
            )


def plan(config: Config) -> Plan:
    """Open the driver and return what may be lent; raises `DeviceError` or `DriverError`."""
    if config.driver == "host":
        return _plan_host(config)
    if config.driver == "cuda":
        return _plan_cuda(config)
    try:
        return _plan_cuda(config)
    except DriverError as error:
        logs.warn(
            'no GPU is usable, so the host driver lends ordinary memory: set driver = "cuda" to make the daemon '
            'fail instead, or driver = "host" if this is intended; `membroker doctor` says what is wrong with the GPU',
            error=str(error),
        )
        return replace(_plan_host(config), fell_back=True)


def look_at_device(config: Config) -> tuple[str, dict[CoreLocation, int], str]:
    """Return the name of the device's directory, what it may lend, and why it could not be asked, or "".

    A device that cannot be asked has what is configured, or any size, and a name that none has. Raises `DeviceError` as
    the start does.
    """
    why = ""
    for kind in ("cuda", "host") if config.driver == "auto" else (config.driver,):
        try:
            found = plan(replace(config, driver=kind))
        except DriverError as error:
            why = str(error)
        else:
            found.driver.close()
            return found.directory, dict(found.capacities), ""
    capacity = policy.MAX_BYTES if config.capacity is None else config.capacity
    return "gpu-12345678", _capacities(capacity, config), why


def _plan_host(config: Config) -> Plan:
    reserved = (config.headroom or 0) + HOST_GRANULARITY
    total = config.host_driver_total
    if total is None:
        total = (config.capacity or HOST_DEFAULT_CAPACITY) + reserved
    capacity = config.capacity if config.capacity is not None else total - reserved
    _check_capacity(capacity, total, reserved)
    _check_reserve(config.gate_reserve or 0, config.headroom or 0)
    host_bytes = max(config.host_capacity, HOST_GRANULARITY)
    ordinal = config.device if isinstance(config.device, int) else 0

    def open_host(survivors: Mapping[str, int] | None, charged: Mapping[CoreLocation, int]) -> Driver:
        return open_driver(
            "host",
            total_bytes=max(total, charged.get("device", 0) + reserved),
            host_bytes=max(host_bytes, charged.get("host", 0)),
            ordinal=ordinal,
            survivors=survivors,
        )

    driver = open_host(None, {})
    return Plan(
        driver=driver,
        reopen=open_host,
        directory=driver.device.uuid,
        capacities=_capacities(capacity, config),
        headroom=config.headroom or 0,
        gate_reserve=config.gate_reserve or 0,
        stock_extents=config.stock_extents if config.stock else 0,
        stock_bytes=config.stock or 0,
    )


def _plan_cuda(config: Config) -> Plan:
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # number GPUs as nvidia-smi does
    driver = open_driver("cuda", config.device)
    try:
        info = driver.memory(Location.DEVICE)
        if info is None:
            raise DriverUnavailable("nvmlDeviceGetMemoryInfo", "NVML_ERROR_NOT_SUPPORTED", 3, _UNIFIED_MEMORY)
        granularity = driver.device.granularity
        headroom = CUDA_HEADROOM if config.headroom is None else config.headroom
        reserved = headroom + granularity
        capacity = config.capacity
        if capacity is None:
            capacity = (info.total - reserved) // granularity * granularity
        _check_capacity(capacity, info.total, reserved)
        if config.gate_reserve is not None:
            _check_reserve(config.gate_reserve, headroom)
    except BaseException:
        driver.close()
        raise
    reserve = CUDA_GATE_RESERVE if config.gate_reserve is None else config.gate_reserve
    stock = CUDA_STOCK if config.stock is None else config.stock
    extents = config.stock_extents if stock else 0
    directory, capacities = directory_of(driver.device.uuid), _capacities(capacity, config)
    return Plan(
        driver=driver,
        reopen=lambda *_: driver,
        directory=directory,
        capacities=capacities,
        headroom=headroom,
        gate_reserve=reserve,
        stock_extents=extents,
        stock_bytes=stock,
    )


def _capacities(capacity: int, config: Config) -> dict[CoreLocation, int]:
    capacities: dict[CoreLocation, int] = {"device": capacity}
    if config.host_capacity:
        capacities["host"] = config.host_capacity
    return capacities


def _check_reserve(reserve: int, headroom: int) -> None:
    if reserve > headroom:
        raise DeviceError(
            f"a gate_reserve of {format_exact(reserve)} is more than the headroom of {format_exact(headroom)}, so lent "
            "memory would use it up; lower `gate_reserve`, or raise `headroom`"
        )


def _check_capacity(capacity: int, total: int, reserved: int) -> None:
    if total <= reserved:
        raise DeviceError(
            f"the device has {format_exact(total)}, and headroom and anchor take {format_exact(reserved)}, so "
            "nothing is left to lend; lower `headroom`"
        )
    if not 0 < capacity <= total - reserved:
        raise DeviceError(
            f"a capacity of {format_exact(capacity)} does not fit: the device has {format_exact(total)}, of which "
            f"{format_exact(reserved)} are headroom and anchor; lower `capacity` or `headroom`"
        )


def directory_of(uuid: str) -> str:
    """Return a GPU's directory: `gpu-` and the first 8 hex digits of its UUID, which may be written without `GPU-`."""
    return "gpu-" + uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", "")[:8].lower()
