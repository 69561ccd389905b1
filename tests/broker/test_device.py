"""What one tenant may have of the sessions, so that it cannot shut the others out."""

from __future__ import annotations

import pytest

from membrokerd.device import _share


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
