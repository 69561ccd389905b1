"""The quotas: limits that an operator commanded, in a file, so that they hold until they are ended, reboots included.

Owns the file's place and form. People may read it, and change it while no daemon runs; it is checked as the
configuration is, and refused whole when anything in it is wrong.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from membroker.vmm.sizes import GIB, MIB, parse_size
from membroker.wire.names import valid_model, valid_tenant

from .. import files
from ..core.events import Location
from ..home import HomeError
from .checks import MODEL_NAME, nearest

Quotas = Mapping[tuple[str, str | None, Location], int]
"""Bytes by tenant, model (None: all of the tenant's together) and location, as in the ledger."""

SYSTEM = Path("/var/lib/membroker")
_KEYS: Mapping[str, Location] = {"limit": "device", "host_limit": "host"}
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TENANT_NAME = "a tenant's name is [a-z0-9] and then at most 23 of [a-z0-9-]"
_WHAT_TO_DO = "put it right, or remove the file to end all commanded limits"
_HEAD = """\
# Limits that were commanded with `membroker quota set`; they stand before those of membrokerd.toml, and have its keys.
# membrokerd reads this file when it starts, and writes it anew at each command: change it while none is running.
"""


def state_directory(device: str, env: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """Return where a device keeps what outlives a reboot; `device` is its directory's name.

    That is the system's place for root and for whoever may write there, else the own one of the user who runs this.
    `env` and `uid` (None: this process's) choose. Raises `HomeError`.
    """
    if (os.geteuid() if uid is None else uid) == 0 or os.access(SYSTEM, os.W_OK):
        return SYSTEM / device
    if Path(own := env.get("XDG_STATE_HOME", "")).is_absolute():
        return Path(own, "membroker", device)
    if Path(home := env.get("HOME", "")).is_absolute():
        return Path(home, ".local", "state", "membroker", device)
    raise HomeError("there is no place for what outlives a reboot: set XDG_STATE_HOME or HOME to an absolute path")


def trouble(directory: Path) -> str:
    """Return why nothing can be kept below this directory, which need not be there yet; "" when something can."""
    there = next(part for part in (directory, *directory.parents) if os.path.exists(part))
    if not there.is_dir():
        why = "is not a directory"
    elif not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        why = "cannot be written by this user"
    else:
        return ""
    return (
        f"limits by command will be refused, since they are to be kept in {directory} and {there} {why}: "
        "mend that, or set another state_directory"
    )


# --- Reading ---


def read(path: Path) -> Quotas:
    """Return the quotas of the file, none when there is no file. Raises `HomeError`."""
    try:
        return dict(_rows(tomllib.loads(files.read_file(path, files.MAX_TEXT_BYTES, follow=True).decode())))
    except FileNotFoundError:
        return {}
    except OSError as error:
        advice = "let this user read it" if error.errno in (errno.EACCES, errno.EPERM) else _WHAT_TO_DO
        raise HomeError(f"{path}: cannot be read: {error.strerror}; {advice}") from error
    except _Wrong as wrong:
        raise HomeError(f"{path}: {wrong}; {_WHAT_TO_DO}") from wrong
    except (ValueError, RecursionError) as error:  # as the configuration
        raise HomeError(f"{path}: is not TOML: {error}; {_WHAT_TO_DO}") from error


class _Wrong(Exception):
    """What the file says can't be. Says where, and why."""


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str | None, Location], int]]:
    for key in document:
        if key != "tenants":
            raise _Wrong(f"{key}: is not a key of quotas{nearest(key, ['tenants'])}")
    for tenant, where, table in _tables(document, "", "tenants", valid_tenant, _TENANT_NAME):
        for location, limit in _limits(table, where, "models"):
            yield (tenant, None, location), limit
        for model, place, inner in _tables(table, f"{where}.", "models", valid_model, MODEL_NAME):
            for location, limit in _limits(inner, place):
                yield (tenant, model, location), limit


def _tables(
    parent: Mapping[str, Any], above: str, name: str, valid: Callable[[str], bool], allowed: str
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield name, key path and table of each table in `parent`'s table of tables `name`."""
    tables = _table(parent.get(name, {}), f"{above}{name}")
    for key, table in tables.items():
        where = f"{above}{name}.{_quoted(key)}"
        if not valid(key):
            raise _Wrong(f"{where}: {allowed}")
        yield key, where, _table(table, where)


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _Wrong(f"{where}: is a table: write [{where}] and its keys below")
    return value


def _limits(table: Mapping[str, Any], where: str, *others: str) -> Iterator[tuple[Location, int]]:
    """Yield the limits of a table in which nothing else but `others` may stand."""
    for key, value in table.items():
        if key in _KEYS:
            try:
                yield _KEYS[key], parse_size(value)
            except (TypeError, ValueError) as error:
                raise _Wrong(f"{where}.{key}: {error}") from error
        elif key not in others:
            raise _Wrong(f"{where}.{_quoted(key)}: is not a key of quotas{nearest(key, (*_KEYS, *others))}")


# --- Writing ---


def write(path: Path, quotas: Quotas) -> None:
    """Put these quotas in place of those of the file: whole and on the disk, or not at all. Raises `OSError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_file(path, _text(quotas).encode())
    except OSError as error:
        error.filename = path  # a full disk names none
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _text(quotas: Quotas) -> str:
    names = {location: key for key, location in _KEYS.items()}
    tables: dict[str, list[str]] = {}
    for (tenant, model, location), limit in sorted(
        quotas.items(), key=lambda row: (row[0][0], row[0][1] or "", row[0][2])
    ):
        table = f"tenants.{tenant}" if model is None else f"tenants.{tenant}.models.{_quoted(model)}"
        tables.setdefault(table, []).append(f"{names[location]} = {_size(limit)}\n")
    return _HEAD + "".join(f"\n[{table}]\n{''.join(lines)}" for table, lines in tables.items())


def _quoted(key: str) -> str:
    """Return a key as TOML writes it, whatever is in it."""
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key)


def _size(limit: int) -> str:
    """Return a size as TOML: as people read it, if that is exact."""
    for step, unit in ((GIB, "GiB"), (MIB, "MiB")):
        if limit and limit % step == 0:
            return f'"{limit // step}{unit}"'
    return str(limit)
