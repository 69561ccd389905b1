"""What a reload of the configuration changes, and what it leaves for the next start."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS

from membrokerd.config.config import Config, LogConfig, MetricsConfig, ModelConfig, TenantConfig
from membrokerd.runtime.reload import CHANGEABLE, Reloader, compare

BEFORE = Config(Path("/run/m"), tenants={"red": TenantConfig(limit=4, uids=frozenset([1])), "blue": TenantConfig()})
OTHER: dict[str, Any] = {field.name: 8 for field in dataclasses.fields(Config)} | {
    "metrics": MetricsConfig(port=1),
    "log": LogConfig(format="json"),
    "tenants": {**BEFORE.tenants, "green": TenantConfig()},
}
"""Each key with another value, which nothing looks at."""


@pytest.mark.parametrize("key", OTHER)
def test_a_key_is_in_force_or_named(key: str) -> None:
    """Never neither: an operator who changed a value and sees no word of it believes that it holds."""
    changes = compare(BEFORE, dataclasses.replace(BEFORE, **{key: OTHER[key]}))
    if key in CHANGEABLE:
        assert getattr(changes.config, key) == OTHER[key]
        assert changes.fixed == ()
    else:
        assert changes.config == BEFORE
        assert changes.fixed == ({"metrics": "metrics.port", "log": "log.format"}.get(key, key),)


def test_tenants_come_go_and_change() -> None:
    """And of the log its level, but not its format."""
    numbers = {"limit": 5, "host_limit": 6, "guarantee": 1, "host_guarantee": 2, "weight": 3, "host_weight": 0}
    models = {"m": ModelConfig(1, weight=2, idle_sleep_seconds=7.0)}
    red = TenantConfig(
        **numbers, lend_unused=False, idle_sleep_seconds=8.0, uids=frozenset([2]), models=models, owner=7, mode=0o600
    )
    tenants = {"red": red, "green": TenantConfig(limit=1)}
    changes = compare(BEFORE, dataclasses.replace(BEFORE, tenants=tenants, log=LogConfig("json", "debug")))
    assert (changes.added, changes.removed) == (("green",), ("blue",))
    assert set(changes.fixed) == {"tenants.red.owner", "tenants.red.mode", "log.format"}
    assert changes.config.log == LogConfig("text", "debug")
    assert changes.config.tenants == {
        "red": dataclasses.replace(red, owner=None, mode=None),
        "green": TenantConfig(limit=1),
    }


@pytest.mark.parametrize("tenants", [({}, BEFORE.tenants), (BEFORE.tenants, {})], ids=["named", "each user"])
def test_users_or_named_tenants_is_decided_at_the_start(tenants: Any) -> None:
    """Between 'each user is a tenant' and named ones no session could go on as whose it was."""
    before, after = (dataclasses.replace(BEFORE, tenants=each) for each in tenants)
    changes = compare(before, after)
    assert (changes.config, changes.fixed, changes.added, changes.removed) == (before, ("tenants",), (), ())


def test_a_stop_does_not_wait_for_a_reload() -> None:
    """The file names a user, and the name service does not answer: the successor must not wait for that."""
    asked, answered = threading.Event(), threading.Event()

    def read() -> Config:
        asked.set()
        answered.wait()
        return BEFORE

    async def apply(config: Config) -> None:
        raise AssertionError("a daemon that has stopped was reloaded")

    async def live() -> None:
        reloader = Reloader(None, read)
        reloader.begin(apply)
        reloader.ask()
        while not asked.is_set():
            await asyncio.sleep(0)
        reloader.close()

    daemon = threading.Thread(target=lambda: asyncio.run(live()))
    daemon.start()
    daemon.join(DEADLINE_SECONDS)
    stopped = not daemon.is_alive()
    answered.set()
    daemon.join()
    assert stopped
