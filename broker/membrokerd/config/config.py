"""The operator's configuration: one TOML file, checked as a whole, as frozen values in bytes, seconds and paths.

Owns the keys, their defaults, and the sizes that must fit each other; all problems are shown at once. It must never
look at a device: a value that depends on the driver stays None here and is decided where the driver is known.
"""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from membroker.wire.names import SYSTEM_DIRECTORY, SYSTEM_VARIABLE

from ..core import policy
from ..core.admission import misfits
from ..core.names import Location, QuotaKey
from ..core.rows import Quota
from ..system import files
from . import checks
from .checks import Size, Table, joined, size_text

QUOTA_KEYS: Mapping[Location, tuple[str, str, str]] = {
    "device": ("limit", "guarantee", "weight"),
    "host": ("host_limit", "host_guarantee", "host_weight"),
}
"""The keys of each number of a `Quota`."""
MAX_UIDS = 64
"""Users that may open sessions of a tenant that is made by command."""


class ConfigError(ValueError):
    """The configuration cannot be used. `problems` has a sentence for each thing that is wrong."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class MetricsConfig(Table):
    """Where Prometheus finds the figures. `port` 0 is any free one, None 9710 and the number of the GPU.

    Without `model_reasons` a model's refusals are one sum.
    """

    enabled: Annotated[bool, Strict()] = True
    address: Annotated[str, Strict(), Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Strict(), Field(ge=0, le=65_535)] | None = None
    model_reasons: Annotated[bool, Strict()] = True


@dataclass(frozen=True, slots=True)
class LogConfig(Table):
    """How the log is written: `text` or `json`, from this level on."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class ModelQuota(Table):
    """The quota of a model or a tenant, in bytes. `guarantee` is kept for it.

    `limit` None leaves it to the level above, and `weight` None is 1.
    """

    limit: Size | None = None
    host_limit: Size | None = None
    guarantee: Size | None = None
    host_guarantee: Size | None = None
    weight: checks.Weight | None = None
    host_weight: checks.Weight | None = None


@dataclass(frozen=True, slots=True)
class TenantQuotas(ModelQuota):
    """The quotas of a tenant and of each of its models; these keys are in the file of quotas too."""

    models: Mapping[checks.ModelName, ModelQuota] = field(default_factory=dict)


def quotas_of(tenants: Mapping[str, TenantQuotas]) -> Iterator[tuple[QuotaKey, Quota]]:
    """Yield what is set for each tenant and model at each location."""
    for tenant, own in tenants.items():
        named: list[tuple[str | None, ModelQuota]] = [(None, own), *own.models.items()]
        for model, table in named:
            for location, keys in QUOTA_KEYS.items():
                limit, guarantee, weight = (getattr(table, key) for key in keys)
                quota = Quota(limit, guarantee, weight)
                if quota != Quota():
                    yield (tenant, model, location), quota


@dataclass(frozen=True, slots=True)
class ModelConfig(ModelQuota):
    """A model's quota, and when its engines sleep by themselves. None: as its tenant says; 0: never."""

    idle_sleep_seconds: checks.Seconds | None = None


@dataclass(frozen=True, slots=True)
class TenantConfig(TenantQuotas):
    """A tenant and its endpoint. `owner`, `group` and `mode` are those of its sockets; None leaves the daemon's.

    Only users in `uids` may open sessions; where it is empty, the sockets' mode decides. `lend_unused`: what is
    guaranteed to the tenant and its models and not used is lent to others that answer recalls. `idle_sleep_seconds` is
    that of its models; None: as the daemon's; 0: never.
    """

    models: Mapping[checks.ModelName, ModelConfig] = field(default_factory=dict)
    idle_sleep_seconds: checks.Seconds | None = None
    lend_unused: Annotated[bool, Strict()] = True
    uids: checks.Uids = frozenset()
    owner: checks.Owner | None = None
    group: checks.Group | None = None
    mode: checks.Mode | None = None


@dataclass(frozen=True, slots=True)
class CreatedTenant(TenantConfig):
    """A tenant that was made by command: it is kept in the file of quotas, which has its numbers beside it.

    `deleting`: it takes no new sessions, and is gone when nothing of it is lent.
    """

    uids: Annotated[checks.Uids, Field(max_length=MAX_UIDS)] = frozenset()
    deleting: Annotated[bool, Strict()] = False


def without_guarantees(tenant: TenantConfig) -> TenantConfig:
    """Return a tenant's configuration without its guarantees."""
    models = {name: replace(model, guarantee=None, host_guarantee=None) for name, model in tenant.models.items()}
    return replace(tenant, guarantee=None, host_guarantee=None, models=models)


@dataclass(frozen=True, slots=True)
class Config(Table):
    """All keys. Sizes are in bytes; one that is None depends on the driver, or on the memory that the device has.

    `load` replaces an empty `runtime_directory` by the one of this user.
    """

    runtime_directory: checks.Directory = Path()
    driver: Literal["auto", "host", "cuda"] = "auto"
    device: checks.Device = 0
    capacity: checks.PositiveCapacity | None = None
    host_capacity: checks.Capacity = 0
    headroom: Size | None = None
    gate_reserve: Size | None = None
    host_driver_total: checks.PositiveCapacity | None = None
    default_limit: Size | None = None
    default_host_limit: Size | None = None
    settle_seconds: checks.Seconds = 10.0
    audit_seconds: Annotated[checks.Seconds, Field(ge=0.01)] = 0.1
    model_grace_seconds: checks.Seconds = 60.0
    guarantee_wait_seconds: checks.Seconds = 10.0
    recall_seconds: Annotated[checks.Seconds, Field(ge=0.01)] = 1.0
    slice_seconds: checks.Seconds = 60.0
    idle_sleep_seconds: checks.Seconds = 0.0
    idle_sleep: Literal["when-wanted", "always"] = "when-wanted"
    max_sessions: checks.Count | None = None
    max_models_per_tenant: checks.Count = 256
    stock: Size | None = None
    stock_extents: Annotated[int, Strict(), Field(ge=0, le=4_096)] = 64
    descriptor_store: Literal["auto", "systemd", "keeper", "memory"] = "auto"
    systemd_descriptors: Annotated[int, Strict(), Field(ge=0, le=1_000_000)] = 0
    keeper_socket: checks.KeeperSocket | None = None
    state_directory: checks.Directory | None = None
    record: Annotated[bool, Strict()] = False
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    tenants: Mapping[checks.TenantName, TenantConfig] = field(default_factory=dict)

    @property
    def created(self) -> dict[str, CreatedTenant]:
        """Return the tenants that were made by command."""
        return {name: tenant for name, tenant in self.tenants.items() if isinstance(tenant, CreatedTenant)}

    @property
    def of_file(self) -> Config:
        """Return the configuration without the tenants that were made by command."""
        return self.with_created({})

    def with_created(self, created: Mapping[str, CreatedTenant]) -> Config:
        """Return the configuration with these tenants made by command. One of the file goes before them."""
        kept = {name: tenant for name, tenant in self.tenants.items() if not isinstance(tenant, CreatedTenant)}
        return replace(self, tenants={**kept, **{name: tenant for name, tenant in created.items() if name not in kept}})

    @property
    def uid_tenants(self) -> bool:
        """Say whether there is an endpoint, `default`, in which each uid is a tenant: the file has no tenants."""
        return len(self.created) == len(self.tenants)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Return the names of the endpoints: of the tenants, and of all users where each is a tenant."""
        return (*[checks.OF_USERS] * self.uid_tenants, *self.tenants)


def load(
    path: Path | None,
    overrides: Mapping[str, Any],
    env: Mapping[str, str] = os.environ,
    uid: int | None = None,
) -> Config:
    """Return the configuration of `path` (None: all defaults), with what the command line says above it.

    `overrides` has key paths (`"metrics.port"`); a None in it was not given. `env` and `uid` (None: this process's)
    choose the runtime directory where none is configured. Raises `ConfigError` with everything that is wrong.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    document = _merge(_read(path) if path else {}, given)
    config, problems = checks.check(Config, document)
    if "runtime_directory" not in document:
        directory = _default_runtime_directory(env, os.geteuid() if uid is None else uid)
        config = replace(config, runtime_directory=directory or Path())
        if directory is None:
            where = (
                "XDG_RUNTIME_DIR is not set: `export XDG_RUNTIME_DIR=~/run`, or another directory of your own, in the "
                "shells of programs too; then they find the broker. Or name one, as in --runtime-directory "
                "/tmp/membroker-me"
            )
            problems.setdefault("runtime_directory", where)
    problems |= dict(_misfits(config, problems))
    if problems:
        origins = {key: "command line" if key in given else path or "configuration" for key in problems}
        raise ConfigError([f"{origins[key]}: {key}: {sentence}" for key, sentence in problems.items()])
    return config


def load_place(path: Path | None, overrides: Mapping[str, Any]) -> Config:
    """Return a configuration of which nothing is right but where its daemon is, as far as a file says that.

    The file may be wrong. Raises `ConfigError` if this user has no runtime directory.
    """
    try:
        document = _read(path) if path else {}
    except ConfigError:
        document = {}
    place = {key: document[key] for key in ("runtime_directory", "driver", "device") if key in document}
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        return load(None, place | given)
    except ConfigError:
        return load(None, given)


# --- Reading ---


def _read(path: Path) -> dict[str, Any]:
    text = ""
    try:
        text = files.read_file(path, files.MAX_TEXT_BYTES, follow=True).decode()
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}; name a readable file with --config"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text (byte {error.start}); TOML is always UTF-8"]) from error
    except (ValueError, RecursionError) as error:  # no TOML, a number of 5,000 digits, 10,000 lists in each other
        raise ConfigError([f"{path}: is not TOML: {error}{_meant(text, str(error))}"]) from error


def _meant(text: str, why: str) -> str:
    """Return the end of a sentence: the line that was meant, if quotes are missing or `true` was written as `True`."""
    place = re.search(r"\(at line ([0-9]+), ", why)
    if not place:
        return ""
    key, _, value = text.split("\n")[int(place[1]) - 1].partition("=")
    key, value = key.strip(), value.partition("#")[0].strip()
    instead = value.lower() if value.lower() in ("true", "false") else f'"{value}"'
    if not value[:1].isalnum() or _is_toml(f"{key} = {value}") or not _is_toml(f"{key} = {instead}"):
        return ""
    return f"; write {key} = {instead}"


def _is_toml(line: str) -> bool:
    try:
        return bool(tomllib.loads(line))
    except (ValueError, RecursionError):
        return False


def _merge(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with each overriding value at its key path. The checks report what should be a table."""
    merged: dict[str, Any] = copy.deepcopy(dict(document))
    for path, value in overrides.items():
        *tables, key = path.split(".")
        table = merged
        for name in tables:
            inner = table.setdefault(name, {})
            if not isinstance(inner, dict):
                break
            table = inner
        else:
            table[key] = value
    return merged


def _default_runtime_directory(env: Mapping[str, str], uid: int) -> Path | None:
    if uid == 0:
        return Path(env.get(SYSTEM_VARIABLE) or SYSTEM_DIRECTORY)
    if (given := systemd_directory(env, "RUNTIME")) is not None:
        return given
    own = env.get("XDG_RUNTIME_DIR", "")
    return Path(own, "membroker") if own else None


def systemd_directory(env: Mapping[str, str], kind: Literal["RUNTIME", "STATE"]) -> Path | None:
    """Return the first directory of that kind of a unit, which systemd has made for `User=` or `DynamicUser=`."""
    first = env.get(f"{kind}_DIRECTORY", "").partition(":")[0]
    return Path(first) if first.startswith("/") else None


# --- What must fit together ---


def _misfits(config: Config, wrong: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield key and sentence of each value that is valid but does not fit another. Keys in `wrong` are no bounds."""
    for key, size, limit_key, limit in _bounds(config):
        if size is not None and limit is not None and size > limit and limit_key not in wrong:
            yield key, f"{size_text(size)} is more than {limit_key}, {size_text(limit)}; write at most that"
    if not wrong:
        yield from _guarantee_misfits(config)
    if config.keeper_socket is not None and config.keeper_socket.parent == config.runtime_directory:
        yield (
            "keeper_socket",
            "is in the runtime directory itself, which tenants pass through, and the keeper lets no other user into "
            'its directory; name one of its own, such as "/run/membroker-keeper/fdstore.sock"',
        )


def _guarantee_misfits(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each guarantee that does not fit. A capacity that the device decides is checked at the start."""
    capacity = policy.MAX_BYTES if config.capacity is None else config.capacity
    defaults: dict[Location, int | None] = {"device": config.default_limit, "host": config.default_host_limit}
    rules = policy.Rules(
        granularity=1,
        capacities={"device": capacity, "host": config.host_capacity},
        default_limits={where: size for where, size in defaults.items() if size is not None},
    )
    quotas = dict(quotas_of(config.tenants))
    for location, (_, key, _) in QUOTA_KEYS.items():
        for misfit in misfits(quotas, rules, location):
            of_model = ("models", misfit.model) if misfit.model else ()
            path = ("tenants", misfit.tenant, *of_model, key) if misfit.tenant else ("tenants",)
            sizes = size_text(misfit.size), size_text(misfit.most)
            bound = ("host_capacity" if location == "host" else "capacity") if misfit.tenant is None else misfit.bound
            yield joined(path), f"{misfit.what} would be {sizes[0]}, more than {bound}, {sizes[1]}; write at most that"


def _bounds(config: Config) -> Iterator[tuple[str, int | None, str, int | None]]:
    """Yield (key, size, key of its bound, bound)."""
    headroom = 0 if config.headroom is None and config.driver == "host" else config.headroom
    yield "gate_reserve", config.gate_reserve, "headroom", headroom
    if config.driver != "cuda" and config.host_driver_total is not None:
        most = max(0, config.host_driver_total - 2 * checks.CAPACITY_STEP)
        yield "headroom", config.headroom, "host_driver_total less anchor and one granule", most
        if (left := config.host_driver_total - (headroom or 0) - checks.CAPACITY_STEP) > 0:
            yield "capacity", config.capacity, "host_driver_total less headroom and anchor", left
    for limit, default, whole in (
        ("limit", "default_limit", "capacity"),
        ("host_limit", "default_host_limit", "host_capacity"),
    ):
        capacity, of_each = (whole, getattr(config, whole)), (default, getattr(config, default))
        yield *of_each, *capacity
        for name, tenant in config.tenants.items():
            own = (joined(("tenants", name, limit)), getattr(tenant, limit))
            yield *own, *capacity
            above = next((bound for bound in (own, of_each) if bound[1] is not None), capacity)
            for called, model in tenant.models.items():
                yield joined(("tenants", name, "models", called, limit)), getattr(model, limit), *above
