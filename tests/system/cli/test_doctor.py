"""The doctor tries what a broker does, on this machine, and says what to do where that fails."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import MIB
from tests.support.workers import worker

from membroker.cli import doctor
from membroker.v1 import admin_pb2


def test_memory_that_no_session_explains_is_a_warning() -> None:
    """An engine keeps what it said it released. That fits into the headroom at first, as a context does on a GPU."""
    config = {"headroom": "32MiB", "gate_reserve": "8MiB"}
    lie = "client._session.reconnecting.release(list(pool._holding.extents.values())[{}])"
    with running(config) as daemon, worker() as liar:
        endpoint = str(daemon.endpoint("red"))
        liar.connect(daemon).do("pool = client.model('m').pool(page_size='2MiB'); pool.allocate(0, '32MiB')")
        liar.do(lie.format(":12"))
        until(lambda: daemon.books().unaccounted_bytes == 24 * MIB)
        check = doctor.check_unaccounted(endpoint, {})
        assert (check.status, check.found) == ("ok", "24.0 MiB of device memory are in use and not in the books")
        liar.do(lie.format("12:13"))
        until(lambda: daemon.books().unaccounted_bytes == 26 * MIB)
        check = doctor.check_unaccounted(endpoint, {})
        assert check.status == "warn"
        assert "more than the 24.0 MiB that the headroom has" in check.found
        assert check.advice.startswith("`membroker processes` shows which processes use more than they are charged")


def test_no_broker_a_broker_and_a_dead_one(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator was paged, and this is the first command: it says what the other commands say.

    A worker's environment has only the library. That is no fault beside a daemon, which has its own packages and may be
    another user's; but the next daemon may have to start from here.
    """
    monkeypatch.setattr(doctor, "missing_packages", lambda: ["pydantic"])
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        env = os.environ | {"XDG_RUNTIME_DIR": directory}

        def checked() -> tuple[doctor.Check, doctor.Check]:
            checks = {check.name: check for check in doctor.examine(None, env)}
            return checks["broker"], checks["packages"]

        broker, packages = checked()
        assert (broker.status, broker.found.partition(" under ")[0]) == ("warn", "no broker was found")
        assert broker.advice.startswith("start one with `membrokerd`")
        assert (packages.status, packages.found) == ("fail", "missing: pydantic")
        Path(directory, "membroker").symlink_to(daemon.root.parent)
        broker, packages = checked()
        assert (broker.status, packages.status) == ("ok", "ok")
        assert "lends 256.0 MiB (device)" in broker.found
        assert packages.found == "missing: pydantic; only a daemon needs it, and one runs here"
        with daemon.admin_stub() as stub:
            stub.Drain(admin_pb2.DrainRequest())
        broker, _ = checked()
        assert (broker.status, broker.advice) == ("warn", "`membroker undrain` lends again")
        daemon.kill()
        broker, packages = checked()
    assert (broker.status, packages.status) == ("warn", "fail")
    assert "the broker is dead and left its socket behind" in broker.found
    assert "journalctl -u membrokerd" in broker.advice
