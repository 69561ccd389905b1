"""The quotas and the tenants that were set and made by command, in one file: they outlive the daemon.

Owns the file's path and format. People may read it, and change it while no daemon runs. It is checked like the
configuration, and refused as a whole if anything in it is wrong.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from membroker.wire.names import SYSTEM_DIRECTORY
from membroker.wire.ownership import stranger_in
from membroker.wire.paths import unwritable

from ..core.names import QuotaKey
from ..core.rows import Quota
from ..system import files
from ..system.device_directory import DirectoryError
from .checks import CreatedName, Table, TenantName, check, exact_size, joined
from .config import QUOTA_KEYS, Config, CreatedTenant, TenantQuotas, quotas_of, systemd_directory

Quotas = Mapping[QuotaKey, Quota]
"""What was set, as in the ledger."""

SYSTEM = Path("/var/lib/membroker")
"""What belongs to the runtime directory /run/membroker, which does not outlive a reboot."""
FILE = "quotas.toml"
MAX_CREATED = 64
"""Tenants that are made by command at a time: each has an endpoint, with the memory that docs/bounds.md says."""
_WHAT_TO_DO = "put it right, or remove the file to end all that was set by command"
_REFUSED = "quotas by command will be refused, since they are kept"
_HEAD = """\
# Limits, guarantees and weights that were set with `membroker quota set`. They have the keys of membrokerd.toml, and
# override its numbers. `created` are the tenants that were made with `membroker tenant create`.
# membrokerd reads this file at its start and rewrites it at each command: change it only while no membrokerd runs.
"""


@dataclass(frozen=True, slots=True)
class _File(Table):
    """The file."""

    tenants: Mapping[TenantName, TenantQuotas] = field(default_factory=dict)
    created: Mapping[CreatedName, CreatedTenant] = field(default_factory=dict)


class Kept(NamedTuple):
    """What was set and made by command. `tenants` have no numbers: these are among the quotas."""

    quotas: Quotas
    tenants: Mapping[str, CreatedTenant]

    def beside(self, config: Config) -> Kept:
        """Return what applies beside a configuration: the deletion of a tenant that it has again has not happened."""
        back = {name for name, tenant in self.tenants.items() if tenant.deleting and name in config.tenants}
        kept = {key: quota for key, quota in self.quotas.items() if key[0] not in back}
        return Kept(kept, {name: tenant for name, tenant in self.tenants.items() if name not in back})


def state_directory(config: Config, device: str, env: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for the state of a device that outlives its daemon; `device` is its directory's name.

    Unless one is configured it belongs to the runtime directory: two daemons that have different runtime directories
    have different quotas. Only for the default places of root and of a user does it outlive a reboot: others keep it in
    the device's own directory there. Raises `DirectoryError`.
    """
    base, below = _layout(config, env)
    return base / device / below


def kept_quotas(config: Config, env: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the file of quotas of each device that has one. Raises `DirectoryError`."""
    base, below = _layout(config, env)
    found = (device / below / FILE for device in base.glob("*") if not device.is_symlink())
    return sorted(path for path in found if os.path.exists(path))


def _layout(config: Config, env: Mapping[str, str]) -> tuple[Path, str]:
    """Return the directory that has one for each device, and where in that one the state is."""
    if config.state_directory is not None:
        return config.state_directory, ""
    runtime, own = os.path.realpath(config.runtime_directory), env.get("XDG_RUNTIME_DIR", "")
    of_unit, kept = systemd_directory(env, "RUNTIME"), systemd_directory(env, "STATE")
    if kept is not None and of_unit is not None and runtime == os.path.realpath(of_unit):
        return kept, ""
    if runtime == os.path.realpath(SYSTEM_DIRECTORY):
        return SYSTEM, ""
    if not own or runtime != os.path.realpath(Path(own, "membroker")):
        return config.runtime_directory, "state/kept"  # the keeper has locked `state` itself
    # After `su` or `sudo -E` they may be another user's.
    strangers = []
    for place in (Path(env.get("XDG_STATE_HOME", "")), Path(env.get("HOME", ""), ".local", "state")):
        if place.is_absolute():
            if not (stranger := stranger_in(place)):
                return place / "membroker", ""
            strangers.append(stranger)
    raise DirectoryError(
        "there is no directory for state that outlives a reboot: set XDG_STATE_HOME or HOME to an absolute path"
        + "".join(f"; {stranger}" for stranger in strangers)
    )


def trouble(directory: Path) -> str:
    """Return why nothing can be stored below this directory, which need not exist yet; "" if it can."""
    there = next(part for part in (directory, *directory.parents) if os.path.exists(part))
    if not there.is_dir():
        why = "is not a directory"
    elif said := unwritable(there):
        why = f"cannot be written, because {said}"
    else:
        return ""
    return f"{_REFUSED} in {directory} and {there} {why}: change that, or set another state_directory"


def check_place(directory: Path) -> None:
    """Raise `DirectoryError` if another user could change what is in a state directory, which need not exist yet."""
    _check_owner(directory, alone=True)


def _check_owner(path: Path, *, alone: bool = False) -> None:
    try:
        files.check_owner(path, alone=alone)
    except OSError as error:
        raise DirectoryError(f"{path}: {error.strerror}, or set another state_directory") from error


class StateDirectory:
    """The directory for a device's state, locked until this process ends: a second daemon would overwrite its files.

    `is_shared` says that another daemon has locked it: then nothing of it is used. Daemons of one device can run side
    by side if each has a runtime directory of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.is_shared, self._why = path, False, ""
        self.quotas = path / FILE
        check_place(path)
        try:
            files.make_directory(path)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._why = f"{error.filename}: {error.strerror}"
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.is_shared = True
            os.close(descriptor)
        except OSError:
            os.close(descriptor)  # the file system has no locks

    def trouble(self) -> str:
        """Return why nothing can be stored here; "" if it can."""
        if not self.is_shared:
            return trouble(self.path) or (f"{_REFUSED} in {self.path}: {self._why}" if self._why else "")
        return (
            "quotas by command are not in force and will be refused, and nothing is recorded, since another membrokerd "
            f"of this device uses {self.path}: set another state_directory"
        )

    def read(self) -> Kept:
        """Return what is in the file; nothing if another daemon has it. Raises `DirectoryError`."""
        return Kept({}, {}) if self.is_shared else read_all(self.quotas)

    def write(self, quotas: Quotas, created: Mapping[str, CreatedTenant] | None = None) -> None:
        """Replace what is in the file, as `write` does. Raises `OSError`, also if another daemon has it."""
        if self.is_shared:
            raise OSError(errno.EBUSY, "another membrokerd of this device uses it", str(self.quotas))
        write(self.quotas, quotas, created)


# --- Reading ---


def read(path: Path) -> Quotas:
    """Return the quotas of the file, or none if there is no file. Raises `DirectoryError`."""
    return read_all(path).quotas


def read_all(path: Path) -> Kept:
    """Return what is in the file, or nothing if there is no file. Raises `DirectoryError`."""
    _check_owner(path)
    try:
        document = tomllib.loads(files.read_file(path, files.MAX_TEXT_BYTES, follow=True).decode())
    except (FileNotFoundError, NotADirectoryError):
        return Kept({}, {})
    except OSError as error:
        advice = "let this user read it" if error.errno in (errno.EACCES, errno.EPERM) else _WHAT_TO_DO
        raise DirectoryError(f"{path}: cannot be read: {error.strerror}; {advice}") from error
    except (ValueError, RecursionError) as error:  # as the configuration
        raise DirectoryError(f"{path}: is not TOML: {error}; {_WHAT_TO_DO}") from error
    file, problems = check(_File, document)
    for name, tenant in file.created.items():
        for key in ("models", *chain.from_iterable(QUOTA_KEYS.values())):
            if getattr(tenant, key) not in (None, {}):
                problems[joined(("created", name, key))] = f"stands in [{joined(('tenants', name))}]"
    if len(file.created) > MAX_CREATED:
        problems["created"] = f"there are {len(file.created)} tenants, and {MAX_CREATED} is the maximum"
    if problems:
        raise DirectoryError("; ".join([*(f"{path}: {key}: {what}" for key, what in problems.items()), _WHAT_TO_DO]))
    return Kept(dict(quotas_of(file.tenants)), file.created)


def made_tenant(name: str, settings: Mapping[str, object]) -> tuple[Kept, dict[str, str]]:
    """Return the tenant and the quotas that these keys of a `[tenants.NAME]` make, and what is wrong, by key."""
    numbers = set(chain.from_iterable(QUOTA_KEYS.values()))
    document = {
        "tenants": {name: {key: value for key, value in settings.items() if key in numbers}},
        "created": {name: {key: value for key, value in settings.items() if key not in numbers}},
    }
    file, problems = check(_File, document)
    return Kept(dict(quotas_of(file.tenants)), file.created), problems


# --- Writing ---


def write(path: Path, quotas: Quotas, created: Mapping[str, CreatedTenant] | None = None) -> None:
    """Replace what is in the file, on the disk too, or change nothing. A link to it stays. Raises `OSError`."""
    try:
        files.make_directory(path.parent)
        files.check_owner(path)
        place = Path(os.path.realpath(path))  # `read` follows a link, too
        files.replace_file(place, _text(quotas, created or {}).encode())
    except OSError as error:
        error.filename = path  # a full disk's error names no file
        raise
    directory = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _text(quotas: Quotas, created: Mapping[str, CreatedTenant]) -> str:
    tables = {joined(("created", name)): list(_settings(tenant)) for name, tenant in sorted(created.items())}
    for (tenant, model, location), quota in sorted(
        quotas.items(), key=lambda row: (row[0][0], row[0][1] or "", row[0][2])
    ):
        table = joined(("tenants", tenant) if model is None else ("tenants", tenant, "models", model))
        limit, guarantee = (None if size is None else exact_size(size) for size in quota[:2])
        numbers = zip(QUOTA_KEYS[location], (limit, guarantee, quota.weight), strict=True)
        tables.setdefault(table, []).extend(f"{key} = {text}\n" for key, text in numbers if text is not None)
    return _HEAD + "".join(f"\n[{table}]\n{''.join(lines)}" for table, lines in tables.items())


def _settings(tenant: CreatedTenant) -> Iterator[str]:
    if tenant.uids:
        yield f"uids = {sorted(tenant.uids)}\n"
    for key, number in (("owner", tenant.owner), ("group", tenant.group)):
        if number is not None:
            yield f"{key} = {number}\n"
    if tenant.mode is not None:
        yield f'mode = "{tenant.mode:04o}"\n'
    if tenant.idle_sleep_seconds is not None:
        yield f"idle_sleep_seconds = {tenant.idle_sleep_seconds!r}\n"
    if not tenant.lend_unused:
        yield "lend_unused = false\n"
    if tenant.deleting:
        yield "deleting = true\n"
