"""What a daemon inherits from who started it does not matter: it can be stopped and reloaded, and it works."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.all_gpus import running_all
from tests.support.daemons import DEADLINE_SECONDS, running, until
from tests.support.hindered import DESCRIPTORS
from tests.support.workers import children

import membroker

HINDERED = ("-m", "tests.support.hindered", "membrokerd.cli")


def ignores(pid: int, *numbers: signal.Signals) -> list[bool]:
    (ignored,) = re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return [bool(int(ignored, 16) >> (number - 1) & 1) for number in numbers]


def unhindered(pid: int) -> None:
    """Look at a process: no signal is blocked, those that end it are heard, and its limits are as they can be."""
    said = Path(f"/proc/{pid}/status").read_text()
    assert re.search(r"^SigBlk:\s*0+$", said, re.MULTILINE)
    assert not any(ignores(pid, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD))
    assert re.search(r"^Umask:\s*(0022|0177)$", said, re.MULTILINE), "the keeper has a stricter one"
    limits = Path(f"/proc/{pid}/limits").read_text()
    for name in ("Max file size", "Max open files", "Max cpu time"):
        soft, hard = next(line for line in limits.splitlines() if line.startswith(name))[len(name) :].split()[:2]
        assert soft == hard, name


def test_a_daemon_whose_parent_hinders_it() -> None:
    """SIGTERM and SIGHUP were blocked: it could neither be stopped nor reloaded, and an alarm would have killed it."""
    with running(module="tests.support.hindered") as daemon:
        unhindered(daemon.process.pid)
        until(lambda: daemon.keeper())
        unhindered(daemon.keeper())
        with membroker.connect(daemon.endpoint()) as client, client.model("m").allocate("2MiB"):
            daemon.process.send_signal(signal.SIGHUP)
            until(lambda: "configuration reloaded" in daemon.log())
        assert daemon.descriptors() < DESCRIPTORS
        for path in (daemon.root, daemon.directory / "kept" / "host"):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(DEADLINE_SECONDS) == 0


def test_the_parent_of_all_and_its_daemons(tmp_path: Path) -> None:
    """With SIGCHLD ignored it would not see how a daemon has ended, and with SIGTERM blocked it would not stop."""
    with running_all(tmp_path, HINDERED) as parent:
        parent.wait_until_ready()
        daemons = children(parent.process.pid)
        assert len(daemons) == 2
        for pid in (parent.process.pid, *daemons):
            unhindered(pid)
        os.kill(daemons[0], signal.SIGKILL)
        until(lambda: re.search("a daemon has died .*status=-9", parent.log()))


def test_a_keeper_by_hand(tmp_path: Path) -> None:
    """It is started by an operator's script, and ends when it is told to; nohup still keeps it from a hangup."""
    command = [sys.executable, "-m", "tests.support.hindered", "membrokerd.restart.keeper", "--stay"]
    path = tmp_path / "keeper" / "fdstore.sock"
    with subprocess.Popen([*command, str(path)], stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout.readline() == b"listening\n"
        unhindered(keeper.pid)
        assert ignores(keeper.pid, signal.SIGHUP) == [True]
        keeper.terminate()
        assert keeper.wait(DEADLINE_SECONDS) == 0


def test_a_user_namespace_that_does_not_map_every_user_is_told() -> None:
    """`unshare -Ur`, as PrivateUsers=yes: the start warns, and a worker inside is served."""
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no user namespace")
    with running(module="tests.support.faulty_daemon in_user_namespace") as daemon:
        until(lambda: "this user namespace does not map every user" in daemon.log())
        inside = [sys.executable, "-c", "import membroker, sys; membroker.connect(sys.argv[1]).close()"]
        subprocess.run([*inside, str(daemon.endpoint())], check=True)  # this user is the one that is mapped
