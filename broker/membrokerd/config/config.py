"""What the operator decided: one TOML file, checked as a whole, as frozen values in bytes, seconds and paths.

Owns the keys, their defaults and the sentence for everything that can be wrong with them; all problems are shown at
once. It must never look at a device: what depends on the driver stays None here and is decided where it is known.
"""

from __future__ import annotations

import copy
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from membroker.wire.names import valid_model, valid_tenant

from .. import files
from .checks import CAPACITY_STEP, KEYS, MODEL_NAME, Check, nearest, size_text

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class ConfigError(ValueError):
    """The configuration cannot be used. `problems` has a sentence for each thing that is wrong."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Where Prometheus finds the figures. `port` 0 is any free one, None 9710 and the number of the card."""

    enabled: bool = True
    address: str = "127.0.0.1"
    port: int | None = None


@dataclass(frozen=True, slots=True)
class LogConfig:
    """How the log is written: `text` or `json`, from this level on."""

    format: str = "text"
    level: str = "info"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a tenant's model may be charged, in bytes; None leaves it to the tenant's limit."""

    limit: int | None = None
    host_limit: int | None = None


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """A tenant and its endpoint. `owner`, `group` and `mode` are those of its sockets; None leaves the daemon's.

    `uids` may open sessions; empty admits whom the sockets' mode admits.
    """

    limit: int | None = None
    host_limit: int | None = None
    uids: frozenset[int] = frozenset()
    owner: int | None = None
    group: int | None = None
    mode: int | None = None
    models: Mapping[str, ModelConfig] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Config:
    """All of it. Sizes in bytes; what is None is decided by the driver, or by what the device has."""

    runtime_directory: Path
    driver: str = "auto"
    device: int | str = 0
    capacity: int | None = None
    host_capacity: int = 0
    headroom: int | None = None
    gate_reserve: int | None = None
    host_driver_total: int | None = None
    default_limit: int | None = None
    default_host_limit: int | None = None
    settle_seconds: float = 10.0
    audit_seconds: float = 0.1
    model_grace_seconds: float = 60.0
    max_sessions: int | None = None
    max_models_per_tenant: int = 256
    stock: int | None = None
    stock_extents: int = 64
    descriptor_store: str = "auto"
    systemd_descriptors: int = 0
    keeper_socket: Path | None = None
    state_directory: Path | None = None
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)

    @property
    def uid_tenants(self) -> bool:
        """Say whether there is one endpoint, `default`, in which each uid is a tenant."""
        return not self.tenants


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
    document = _read(path) if path else {}
    given = {key: value for key, value in overrides.items() if value is not None}
    problems = _Problems(str(path) if path else "configuration", frozenset(given))
    values = _check(_merge(document, given), problems)
    if "runtime_directory" not in values:
        values["runtime_directory"] = _default_runtime_directory(env, os.geteuid() if uid is None else uid, problems)
    config = Config(**values)
    _check_fit(config, problems)
    problems.raise_if_any()
    return config


# --- Reading ---


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(files.read_file(path, files.MAX_TEXT_BYTES, follow=True).decode())
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}; name a readable file with --config"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text (byte {error.start}); TOML is always UTF-8"]) from error
    except (ValueError, RecursionError) as error:  # no TOML, a number of 5,000 digits, 10,000 lists in each other
        raise ConfigError([f"{path}: is not TOML: {error}"]) from error


def _merge(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with each overriding value at its key path. What is no table is left for the checks."""
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


def _default_runtime_directory(env: Mapping[str, str], uid: int, problems: _Problems) -> Path:
    if uid == 0:
        return Path("/run/membroker")
    if own := env.get("XDG_RUNTIME_DIR", ""):
        return Path(own, "membroker")
    if not problems.has("runtime_directory"):
        problems.add("runtime_directory", 'XDG_RUNTIME_DIR is not set; write where, as in "/tmp/membroker-me"')
    return Path()


class _Problems:
    """What is wrong so far, by key path; each sentence begins with where the value was written."""

    def __init__(self, file: str, overridden: frozenset[str]) -> None:
        self._file, self._overridden = file, overridden
        self._found: list[tuple[str, str]] = []

    def add(self, key: str, sentence: str) -> None:
        origin = "command line" if key in self._overridden else self._file
        self._found.append((key, f"{origin}: {key}: {sentence}"))

    def has(self, key: str) -> bool:
        return any(found == key for found, _ in self._found)

    def raise_if_any(self) -> None:
        if self._found:
            raise ConfigError([sentence for _, sentence in self._found])


# --- Checking ---


def _check(document: Mapping[str, Any], problems: _Problems) -> dict[str, Any]:
    """Return the arguments of `Config` that the document gives."""
    values = _check_table(document, "", KEYS[""], problems, ("metrics", "log", "tenants"))
    values["metrics"] = MetricsConfig(**_check_section(document, "metrics", problems))
    values["log"] = LogConfig(**_check_section(document, "log", problems))
    values["tenants"] = {
        name: _check_tenant(table, path, problems)
        for name, path, table in _tables(document, "", "tenants", problems)
        if _known_tenant_name(name, path, problems)
    }
    return values


def _check_section(document: Mapping[str, Any], name: str, problems: _Problems) -> dict[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, Mapping):
        problems.add(name, f"is a table: write [{name}] and its keys below")
        return {}
    return _check_table(table, name, KEYS[name], problems)


def _check_tenant(table: Mapping[str, Any], path: str, problems: _Problems) -> TenantConfig:
    values = _check_table(table, path, KEYS["tenants.NAME"], problems, ("models",))
    models = {}
    for name, model_path, model in _tables(table, path, "models", problems):
        if not valid_model(name):
            problems.add(model_path, MODEL_NAME)
        models[name] = ModelConfig(**_check_table(model, model_path, KEYS["tenants.NAME.models.MODEL"], problems))
    return TenantConfig(**values, models=models)


def _known_tenant_name(name: str, path: str, problems: _Problems) -> bool:
    if valid_tenant(name):
        return True
    problems.add(
        path, "a tenant's name is [a-z0-9] and then at most 23 of [a-z0-9-]: it is a directory's too; rename it"
    )
    return False


def _tables(
    parent: Mapping[str, Any], path: str, name: str, problems: _Problems
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield name, key path and table of each table in `parent`'s table of tables `name`."""
    where = _join(path, name)
    tables = parent.get(name, {})
    if not isinstance(tables, Mapping):
        problems.add(where, f"is a table of tables: write [{where}.NAME] and its keys below")
        return
    for key, table in tables.items():
        if isinstance(table, Mapping):
            yield key, _join(where, key), table
        else:
            problems.add(_join(where, key), f"is a table: write [{_join(where, key)}] and its keys below")


def _check_table(
    table: Mapping[str, Any],
    path: str,
    checks: Mapping[str, Check],
    problems: _Problems,
    inner: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the values of the known keys that pass their checks; `inner` names the tables that others check."""
    values = {}
    for key, value in table.items():
        if key in checks:
            try:
                values[key] = checks[key](value)
            except ValueError as error:
                problems.add(_join(path, key), str(error))
        elif key not in inner:
            problems.add(_join(path, key), "is not a key that membrokerd knows" + nearest(key, (*checks, *inner)))
    return values


def _check_fit(config: Config, problems: _Problems) -> None:
    """Find sizes that are fine alone and do not fit each other."""
    for key, size, limit_key, limit in _bounds(config):
        if size is not None and limit is not None and size > limit and not problems.has(limit_key):
            problems.add(key, f"{size_text(size)} is more than {limit_key}, {size_text(limit)}; write at most that")
    if config.keeper_socket is not None and config.keeper_socket.parent == config.runtime_directory:
        problems.add(
            "keeper_socket",
            "is in the runtime directory itself, which tenants pass through, and the keeper lets nobody else into "
            'its directory; name one of its own, such as "/run/membroker-keeper/fdstore.sock"',
        )


def _bounds(config: Config) -> Iterator[tuple[str, int | None, str, int | None]]:
    """Yield (key, size, key of its bound, bound)."""
    headroom = 0 if config.headroom is None and config.driver == "host" else config.headroom
    yield "gate_reserve", config.gate_reserve, "headroom", headroom
    if config.driver != "cuda" and config.host_driver_total is not None:
        most = max(0, config.host_driver_total - 2 * CAPACITY_STEP)
        yield "headroom", config.headroom, "host_driver_total less anchor and one granule", most
        if (left := config.host_driver_total - (headroom or 0) - CAPACITY_STEP) > 0:
            yield "capacity", config.capacity, "host_driver_total less headroom and anchor", left
    yield "default_limit", config.default_limit, "capacity", config.capacity
    yield "default_host_limit", config.default_host_limit, "host_capacity", config.host_capacity
    for name, tenant in config.tenants.items():
        path = _join("tenants", name)
        yield f"{path}.limit", tenant.limit, "capacity", config.capacity
        yield f"{path}.host_limit", tenant.host_limit, "host_capacity", config.host_capacity
        for own, model in tenant.models.items():
            own_path = _join(f"{path}.models", own)
            above = (
                (f"{path}.limit", tenant.limit),
                ("default_limit", config.default_limit),
                ("capacity", config.capacity),
            )
            yield f"{own_path}.limit", model.limit, *_first_set(above)
            host_above = (
                (f"{path}.host_limit", tenant.host_limit),
                ("default_host_limit", config.default_host_limit),
                ("host_capacity", config.host_capacity),
            )
            yield f"{own_path}.host_limit", model.host_limit, *_first_set(host_above)


def _first_set(bounds: Iterable[tuple[str, int | None]]) -> tuple[str, int | None]:
    """Return the first (key, size) that has a size, else the last."""
    bound: tuple[str, int | None] = ("", None)
    for bound in bounds:
        if bound[1] is not None:
            break
    return bound


def _join(path: str, key: str) -> str:
    """Return the key path as TOML writes it: what is no bare key is quoted."""
    quoted = key if _BARE_KEY.fullmatch(key) else json.dumps(key)
    return f"{path}.{quoted}" if path else quoted
