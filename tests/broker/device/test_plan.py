"""What the configuration comes to: what one tenant may have of the sessions, and what is kept ready."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.sizes import MIB

from membroker.vmm import DriverUnavailable
from membrokerd.config.config import Config, TenantConfig
from membrokerd.core.ledger import Ledger
from membrokerd.core.policy import Rules, limit_of
from membrokerd.device import plan as device
from membrokerd.device.plan import MAX_MODELS_OF_USERS, Plan, _share, changed_rules, plan


@pytest.mark.parametrize(("sessions", "tenants"), [(31, 2), (155, 2), (155, 10), (1024, 50)])
def test_all_but_one_tenant_leave_room_for_the_last(sessions: int, tenants: int) -> None:
    """However many it starts, every other tenant still gets half of an equal share."""
    share = _share(sessions, tenants)
    assert share is not None
    assert sessions - share >= (tenants - 1) * (sessions // tenants // 2)
    assert share >= sessions // tenants
    assert _share(sessions, tenants=1) is None, "the only tenant may have every session"
    assert _share(sessions, tenants=0) == sessions - sessions // 4, "each uid is a tenant"


def test_where_each_user_is_a_tenant_all_models_together_are_bounded() -> None:
    """99 uids made 25,344 models, and a scrape of 95 MiB. Configured tenants are as many as the operator wants."""
    rules = Rules(granularity=2, capacities={"device": MIB})
    assert changed_rules(rules, Config()).max_models == MAX_MODELS_OF_USERS
    assert changed_rules(rules, Config(max_models_per_tenant=10_000)).max_models == 10_000
    assert changed_rules(rules, Config(tenants={"red": TenantConfig()})).max_models is None


@pytest.mark.parametrize(("driver", "fell_back"), [("auto", True), ("host", False)])
def test_a_host_driver_in_the_place_of_a_gpu_is_warned_of(
    driver: str, fell_back: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The GPU's driver was not loaded after a reboot: the node lends ordinary memory, and looks healthy."""

    def unusable(config: Config) -> Plan:
        raise DriverUnavailable("cuInit", "CUDA_ERROR_NO_DEVICE", 100, "CUDA does not start here")

    monkeypatch.setattr(device, "_plan_cuda", unusable)
    made = plan(Config(runtime_directory=tmp_path, driver=driver))
    made.driver.close()
    assert (made.fell_back, made.driver.device.driver) == (fell_back, "host")
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == fell_back
    if fell_back:
        (said,) = warnings
        assert "the host driver lends ordinary memory" in said.getMessage()
        assert 'set driver = "cuda"' in said.getMessage()
        assert "CUDA_ERROR_NO_DEVICE" in said.fields["error"]  # type: ignore[attr-defined]


def test_the_default_limit_is_each_tenants_that_has_none(tmp_path: Any) -> None:
    """A tenant of the file, a user that nobody has named, and a location that has no default."""
    tenants = {"red": TenantConfig(limit=64 * MIB), "blue": TenantConfig()}
    config = Config(tmp_path, driver="host", default_limit=8 * MIB, tenants=tenants)
    made = plan(config)
    made.driver.close()
    rules = made.rules(config, anchor=0, max_sessions=4, max_segment_extents=4)
    ledger = Ledger({"device": 1 << 30, "host": 1 << 30})
    limits = {name: limit_of(ledger.quotas, rules, (name, None, "device")) for name in ("red", "blue", "uid-1000")}
    assert limits == {"red": 64 * MIB, "blue": 8 * MIB, "uid-1000": 8 * MIB}
    assert limit_of(ledger.quotas, rules, ("blue", None, "host")) is None
