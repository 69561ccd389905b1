"""SIGHUP: read the configuration again, and change what may change while the daemon runs.

Owns the list of keys that may change, and the comparison of two configurations. It must never end the daemon: if the
file is wrong, the log says so and everything stays as it is.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..config.config import QUOTA_KEYS, Config, ConfigError, TenantConfig
from ..system import logs

CHANGEABLE = frozenset(
    (
        "default_limit",
        "default_host_limit",
        "settle_seconds",
        "model_grace_seconds",
        "guarantee_wait_seconds",
        "recall_seconds",
        "slice_seconds",
        "idle_sleep_seconds",
        "idle_sleep",
        "max_models_per_tenant",
        "tenants",
    )
)
"""Keys that a reload changes, besides `log.level`. All others are fixed at the start."""
_CHANGEABLE_OF_TENANT = frozenset(
    ("uids", "models", "lend_unused", "idle_sleep_seconds", *chain.from_iterable(QUOTA_KEYS.values()))
)
UNCHANGED = "the configuration was not reloaded and stays as it is"


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """The result of a reload. `config` is in force afterwards; the keys in `fixed` have their old values in it."""

    config: Config
    fixed: tuple[str, ...]
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def compare(before: Config, after: Config) -> ReloadResult:
    """Return what changes from one configuration to the next, and which changed keys cannot."""
    fixed = [key for key in _changed(before, after) if key not in CHANGEABLE | {"log", "metrics"}]
    fixed += [f"metrics.{key}" for key in _changed(before.metrics, after.metrics)]
    fixed += ["log.format"] * (before.log.format != after.log.format)
    log = replace(before.log, level=after.log.level)
    changed: dict[str, Any] = {key: getattr(after, key) for key in CHANGEABLE}
    if before.uid_tenants != after.uid_tenants:
        changed["tenants"] = before.tenants
        fixed.append("tenants")
        return ReloadResult(replace(before, log=log, **changed), tuple(fixed))
    tenants = {name: _merged(before.tenants.get(name), tenant, name, fixed) for name, tenant in after.tenants.items()}
    changed["tenants"] = tenants
    added = tuple(name for name in tenants if name not in before.tenants)
    removed = tuple(name for name in before.tenants if name not in tenants)
    return ReloadResult(replace(before, log=log, **changed), tuple(fixed), added, removed)


def _changed(before: Any, after: Any) -> Iterator[str]:
    return (each.name for each in fields(before) if getattr(before, each.name) != getattr(after, each.name))


def _merged(before: TenantConfig | None, after: TenantConfig, name: str, fixed: list[str]) -> TenantConfig:
    """Return the tenant with its new quotas; its sockets keep their owner, group and mode."""
    if before is None:
        return after
    fixed += [f"tenants.{name}.{key}" for key in _changed(before, after) if key not in _CHANGEABLE_OF_TENANT]
    return replace(before, **{key: getattr(after, key) for key in _CHANGEABLE_OF_TENANT})


@dataclass(frozen=True, slots=True)
class ReloadState:
    """What is in force: all of the file as it was at the Unix time `at`, but for the keys in `pending`.

    `problems` say why a later reload was refused.
    """

    problems: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    at: float = field(default_factory=time.time)


class Reloader:
    """Reads the configuration again when asked, one reload at a time; `read` may block.

    `state` is that of the last reload, or of the start.
    """

    def __init__(self, path: Path | None, read: Callable[[], Config]) -> None:
        self._path = path
        self._read = read
        self._apply: Callable[[Config], Awaitable[Iterable[str]]] | None = None
        self.state = ReloadState()
        self._asked = False
        self._task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Reload as soon as the daemon runs; if a reload is under way, reload once more after it."""
        self._asked = True
        if self._apply is not None and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(self._apply))

    async def reload(self) -> ReloadState:
        """Reload, and return what has become of it."""
        self.ask()
        if self._task is None:
            return replace(self.state, problems=("the daemon starts or stops: try again",))
        await asyncio.shield(self._task)
        return self.state

    def begin(self, apply: Callable[[Config], Awaitable[Iterable[str]]]) -> None:
        """Start to obey: the daemon runs, and `apply` puts a configuration into force and returns what it left out."""
        self._apply = apply
        if self._asked:
            self.ask()

    def close(self) -> None:
        """Stop reloading."""
        self._apply = None
        if self._task is not None:
            self._task.cancel()

    async def _run(self, apply: Callable[[Config], Awaitable[Iterable[str]]]) -> None:
        try:
            while self._asked:
                self._asked = False
                try:
                    pending = await apply(await asyncio.wrap_future(self._begin_to_read()))
                    self.state = ReloadState(pending=tuple(pending))
                except ConfigError as error:
                    self.state = replace(self.state, problems=error.problems)
                    for problem in error.problems:
                        logs.warn(UNCHANGED, problem=problem)
                except Exception as error:  # noqa: BLE001 - the daemon must go on
                    self.state = replace(self.state, problems=("the daemon failed: see its log",))
                    logs.fault(error, doing="reload")
        finally:
            self._task = None

    def _begin_to_read(self) -> Future[Config]:
        """Read on another thread: names of users and groups may be looked up over a network.

        It is no thread of asyncio's, which a stop would wait for.
        """
        answer: Future[Config] = Future()
        answer.set_running_or_notify_cancel()

        def read() -> None:
            try:
                answer.set_result(self._read_again())
            except BaseException as error:  # noqa: BLE001 - it is raised where the answer is awaited
                answer.set_exception(error)

        threading.Thread(target=read, name="reload", daemon=True).start()
        return answer

    def _read_again(self) -> Config:
        if self._path is not None:
            try:
                found = os.stat(self._path)
            except OSError as error:
                raise ConfigError([f"{self._path}: cannot be read: {error.strerror}"]) from error
            if not stat.S_ISREG(found.st_mode):  # a pipe has nothing left to read, or never ends
                raise ConfigError([f"{self._path}: is not a regular file, so it cannot be read again"])
        return self._read()
