"""The limit of a model in the loop of development: a program is edited and run again, and changes it as it runs."""

from __future__ import annotations

import pytest
from tests.support.daemons import Daemon, until
from tests.support.sizes import MIB
from tests.support.workers import Refused, worker

import membroker
from membroker.admin import Admin
from membroker.v1 import resources_pb2 as rpb
from membroker.vmm import Location


def test_a_program_runs_again_with_another_limit(daemon: Daemon) -> None:
    """It ended, cleanly or not, and holds nothing: the next run is not refused for a minute."""
    for is_killed in (False, True):
        with worker() as one:
            one.connect(daemon)
            one.do("model = client.model('m', limit='4MiB', virtual_capacity='1GiB'); held = model.allocate('4MiB')")
            if is_killed:
                one.kill()
                until(lambda: all(session.state == rpb.Session.RELEASING for session in daemon.sessions()))
            else:
                one.do("client.close()")
        with membroker.connect(daemon.endpoint()) as client:
            model = client.model("m", limit="8MiB", virtual_capacity="2GiB")
            assert (model.limit, model.virtual_capacity) == (8 * MIB, 2 << 30)
            with worker() as other:
                other.connect(daemon)
                with pytest.raises(Refused, match=r"4\.0 MiB") as refused:
                    other.do("client.model('m', limit='4MiB')")
                assert refused.value.reason == "MODEL_CONFLICT"


def test_a_cell_of_a_notebook_runs_again_with_another_limit(daemon: Daemon) -> None:
    """It registers the model again, or connects again as well. What the cell has borrowed before is still there."""
    with (
        membroker.connect(daemon.endpoint()) as client,
        membroker.connect(daemon.endpoint()) as again,
        client.model("m", limit="4MiB", virtual_capacity="1GiB").allocate("4MiB"),
    ):
        assert client.model("m", limit="2MiB").limit == 2 * MIB
        model = again.model("m", limit="6MiB", virtual_capacity="2GiB")
        assert (model.limit, model.virtual_capacity) == (6 * MIB, 2 << 30)
        with model.allocate("2MiB"), pytest.raises(membroker.OutOfMemory):
            model.allocate("2MiB")


def test_the_end_of_a_block_leaves_the_model(red: membroker.Client) -> None:
    """Another limit is then no conflict, in the same process too. What is still borrowed keeps the model."""
    for limit in ("4MiB", "6MiB"):
        with red.model("block", limit=limit) as model:
            model.allocate("2MiB").close()
    assert red.models() == []
    with red.model("block") as model:
        kept = model.allocate("2MiB")
    with pytest.raises(ZeroDivisionError), red.model("block"):
        raise ZeroDivisionError
    assert [one.name for one in red.models()] == [model.resource_name]
    kept.close()
    with red.model("block"):
        red.close()


@pytest.mark.shared_daemon(False)  # it sets a quota
def test_a_program_changes_the_limit_of_its_model(daemon: Daemon, red: membroker.Client, admin: Admin) -> None:
    """For all sessions of the model, and never above what the operator has set."""
    with membroker.connect(daemon.endpoint()) as other:
        model, joined = red.model("m", limit="4MiB", virtual_capacity="1GiB"), other.model("m")
        with pytest.raises(membroker.OutOfMemory):
            joined.allocate("6MiB")
        model.limit = "6MiB"
        assert model.limit == 6 * MIB
        with joined.allocate("6MiB"):
            joined.limit = 2 * MIB
            assert model.stats().books["device"].limit_bytes == 2 * MIB
            with pytest.raises(membroker.OutOfMemory):
                model.allocate("2MiB")
        model.limit = None
        assert model.limit is None
        admin.set_quota("tenants/red/models/m", Location.DEVICE, {"limit_bytes": 8 * MIB})
        model.limit = "16MiB"
        assert model.limit == 8 * MIB
        assert model.stats().books["device"].asked_limit_bytes == 16 * MIB
        with pytest.raises(membroker.OutOfMemory):
            model.allocate("10MiB")
        with pytest.raises(membroker.InvalidRequest, match="host"):
            model.host_limit = "2MiB"
        with joined.allocate("2MiB"), model.pool("64MiB", page_size="2MiB") as pool:
            pool.allocate(0, "4MiB")
            assert model.used_bytes == 6 * MIB, "of all sessions"
        until(lambda: model.used_bytes == 0)
        assert model.peak_bytes == 6 * MIB


@pytest.mark.shared_daemon(False)  # as above
def test_a_limit_for_a_block(red: membroker.Client, admin: Admin) -> None:
    """Afterwards it is what was asked for before, also after an exception, and no copy of the operator's."""
    for name, before in (("limited", "12MiB"), ("unlimited", None)):
        model = red.model(name, limit=before)
        admin.set_quota(model.resource_name, Location.DEVICE, {"limit_bytes": 8 * MIB})
        borrow = model.limited("2MiB")(lambda size, model=model: model.allocate(size).close())
        borrow("2MiB")
        with pytest.raises(membroker.OutOfMemory):
            borrow("4MiB")
        books = model.stats().books["device"]
        assert books.limit_bytes == 8 * MIB
        assert books.asked_limit_bytes == (12 * MIB if before else None)
        model.allocate("8MiB").close()
