"""`membroker tenant`: an operator, or a script of a platform, makes and deletes tenants."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command import good, refused, run
from tests.support.daemons import Daemon, until
from tests.support.sizes import MIB
from tests.support.template import PythonProcess
from tests.support.workers import worker


def test_the_life_of_a_tenant(daemon: Daemon, tmp_path: Path) -> None:
    """It is made, changed, entered and deleted; the command waits, and says who still has its memory."""
    assert good("tenant", "list", at=daemon.admin).startswith("no tenant was made by command")
    told = good("tenant", "create", "pod-1", "--guarantee", "64MiB", "--dry-run", at=daemon.admin)
    assert told == "nothing is made; it would be possible\n"
    told = good("tenant", "create", "pod-1", "--guarantee", "64MiB", "--mode", "0600", at=daemon.admin)
    assert told.splitlines() == [
        "pod-1, device memory: limit none, guarantee 64.0 MiB, weight 1",
        f"programs enter it at MEMBROKER_ENDPOINT={daemon.endpoint('pod-1')}",
    ]
    good("tenant", "set", "pod-1", "--limit", "128MiB", "--uids", "none", "--guarantee", "none", at=daemon.admin)
    (row,) = json.loads(good("tenant", "list", "--json", at=daemon.admin))
    assert (row["settings"]["uids"], row["books"]["device"]["limit_bytes"], row["deleting"]) == ([], 128 * MIB, False)
    with worker() as one:
        one.connect(daemon, "pod-1").do("kept = client.model('chat').allocate('32MiB')")
        status, out, _ = run("tenant", "delete", "pod-1", "--timeout", "0.05", at=daemon.admin)
        assert status == 1
        assert one.ask("client.session").removeprefix("sessions/") in out
        assert out.endswith("32.0 MiB were still charged at the end of the wait: the deletion goes on\n")
        assert "pod-1 (being deleted)" in good("tenant", "list", at=daemon.admin)
        shown = tmp_path / "shown"
        with shown.open("w") as output:
            arguments = ["tenant", "delete", "pod-1", "--endpoint", str(daemon.admin)]
            waits = PythonProcess(["-m", "membroker.cli.main", *arguments], stdout=output)
            until(lambda: "still holding memory" in shown.read_text())
            name = one.ask("client.session")
            one.do("kept.close()")
            assert waits.wait() == 0
    assert f"{name} of pod-1, process {one.pid}, has released 32.0 MiB" in shown.read_text()
    assert shown.read_text().endswith("pod-1 is deleted\n")
    assert "there is no tenant 'pod-1'" in refused("tenant", "delete", "pod-1", at=daemon.admin)
    good("tenant", "create", "pod-1", at=daemon.admin)
    answer = json.loads(good("tenant", "delete", "pod-1", "--json", at=daemon.admin))
    assert (answer["deleted"], answer["sessions"]) == (True, [])


def test_what_is_refused(daemon: Daemon) -> None:
    """With the numbers, and with what to do."""
    told = refused("tenant", "create", "pod-1", "--guarantee", "1GiB", at=daemon.admin)
    assert "would be 1.0 GiB of device memory, more than the capacity (256.0 MiB)" in told
    told = refused("tenant", "delete", "red", at=daemon.admin)
    assert "is in the daemon's configuration file: change or remove it there, and reload" in told
    assert "membroker quota set red" in told
    good("tenant", "set", "red", "--limit", "64MiB", at=daemon.admin)
    assert "limit 64.0 MiB" in good("quota", "set", "red", "--weight", "2", at=daemon.admin)
