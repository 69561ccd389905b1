"""Suspects: when the device has more in use than the books know, an operator learns which processes have it."""

from __future__ import annotations

from typing import Any

from tests.support.command import good
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import MIB
from tests.support.workers import Worker, descriptors_at_start, until_clean, workers

from membroker.v1 import admin_pb2

LIE = "client._session.reconnecting.release(list(pool._holding.extents.values()))"


def processes(daemon: Daemon) -> dict[int, Any]:
    with daemon.admin_stub() as stub:
        return {one.pid: one for one in stub.ListProcesses(admin_pb2.ListProcessesRequest()).processes}


def borrow(one: Worker, daemon: Daemon, tenant: str, size: int) -> None:
    one.connect(daemon, tenant)
    one.do("model = client.model('m', virtual_capacity='1GiB'); pool = model.pool(page_size='2MiB')")
    one.do(f"pool.allocate(0, {size})")


def test_a_liar_is_named_and_shown_and_the_honest_are_not() -> None:
    """Three engines have 64 MiB mapped each: one has said that it released them, one is charged for them, and one holds
    them as a segment.
    """
    with running({"audit_seconds": 0.05, "host_capacity": "16MiB"}) as daemon, workers(3) as (liar, honest, reader):
        at_start = descriptors_at_start(daemon)
        borrow(liar, daemon, "red", 64 * MIB)
        borrow(honest, daemon, "blue", 64 * MIB)
        honest.do("weights = model.create_segment('weights', '64MiB'); weights.seal()")
        honest.do("host = model.allocate('8MiB', location='host')")
        reader.connect(daemon, "blue").do("weights = client.attach('m/weights')")
        assert [processes(daemon)[each.pid].excess_bytes for each in (liar, honest, reader)] == [0, 0, 0]
        assert daemon.suspects() == []

        liar.do("pool.view(0, 4)[:] = b'mine'")
        liar.do(LIE)
        until(lambda: liar.pid in daemon.suspects())
        assert (daemon.books().free_bytes, daemon.books().unaccounted_bytes) == (128 * MIB, 64 * MIB)
        assert reader.refused("client.model('n').allocate('66MiB')").reason == "DEVICE_FULL", "it is lent to nobody"
        reader.do("client.model('n').allocate('64MiB').close()")
        assert liar.ask("bytes(pool.view(0, 4)).decode()") == "mine"
        assert not {honest.pid, reader.pid} & {*daemon.suspects()}
        seen = processes(daemon)
        for each, books in (
            (liar, (64 * MIB, 0, 0, 64 * MIB)),
            (honest, (128 * MIB, 64 * MIB, 64 * MIB, 0)),
            (reader, (64 * MIB, 0, 64 * MIB, 0)),
        ):
            one = seen[each.pid]
            assert (one.used_bytes, one.charged_bytes, one.segment_bytes, one.excess_bytes) == books
        assert list(seen[liar.pid].models) == ["tenants/red/models/m"]
        assert list(seen[liar.pid].sessions) == [one.name for one in daemon.sessions() if one.pid == liar.pid]

        (row,) = (line for line in good("processes", at=daemon.admin).splitlines() if line.split()[0] == str(liar.pid))
        assert row.split()[2:] == [*["64.0", "MiB"], *["0", "B"] * 2, *["64.0", "MiB"], "red/m"]
        liar.kill()
        until(lambda: daemon.books().unaccounted_bytes == 0)
        assert liar.pid not in processes(daemon)
        honest.do("weights.close(); client.delete_segment('m/weights'); host.close(); pool.close(); client.close()")
        reader.kill()
        until_clean(daemon, at_start)
        assert not {honest.pid, reader.pid} & {*daemon.suspects()}
