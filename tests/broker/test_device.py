"""What the configuration comes to: what one tenant may have of the sessions, and what is kept ready."""

from __future__ import annotations

from typing import Any

import pytest

from membrokerd.config import Config
from membrokerd.device import DeviceError, _share, plan

MIB = 1 << 20


def test_the_only_tenant_may_have_every_session() -> None:
    assert _share(100, tenants=1) is None


@pytest.mark.parametrize(("sessions", "tenants"), [(31, 2), (155, 2), (155, 10), (1024, 50)])
def test_all_but_one_tenant_leave_room_for_the_last(sessions: int, tenants: int) -> None:
    """However many it starts, every other tenant still gets half of an equal share."""
    share = _share(sessions, tenants)
    assert share is not None
    assert sessions - share >= (tenants - 1) * (sessions // tenants // 2)
    assert share >= sessions // tenants


def test_where_each_uid_is_a_tenant_a_quarter_is_left_to_the_others() -> None:
    assert _share(155, tenants=0) == 155 - 38
    assert _share(1, tenants=0) == 1


@pytest.mark.parametrize(
    ("keys", "extents", "size"),
    [
        ({}, 0, 0),
        ({"stock_extents": 8}, 0, 0),
        ({"stock": 64 * MIB}, 64, 64 * MIB),
        ({"stock": 64 * MIB, "stock_extents": 8}, 8, 64 * MIB),
        ({"stock": 0, "stock_extents": 8}, 0, 0),
    ],
    ids=str,
)
def test_the_host_twin_keeps_a_stock_only_where_one_is_configured(
    keys: dict[str, Any], extents: int, size: int, tmp_path: Any
) -> None:
    found = plan(Config(runtime_directory=tmp_path, driver="host", **keys))
    try:
        rules = found.rules(Config(runtime_directory=tmp_path), anchor=0, max_sessions=4, max_segment_extents=4)
        assert (rules.stock_extents, rules.stock_bytes) == (found.stock_extents, found.stock_bytes) == (extents, size)
    finally:
        found.driver.close()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gate_reserve": 64 * MIB}, "a gate_reserve of 64.0 MiB is more than the headroom of 0 B"),
        (
            {"host_driver_total": 64 * MIB, "headroom": 128 * MIB},
            "the device has 64.0 MiB and headroom and anchor take",
        ),
    ],
    ids=str,
)
def test_a_twin_that_could_lend_nothing_does_not_start(keys: dict[str, Any], said: str, tmp_path: Any) -> None:
    """With `driver = "auto"` only the machine says that the figures are a twin's: no check of the file could."""
    with pytest.raises(DeviceError, match=said):
        plan(Config(runtime_directory=tmp_path, driver="host", **keys))
