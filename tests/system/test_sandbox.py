"""A sandbox refuses a system call: it is told by its name, with the reason of the kernel, and as no other fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.daemons import Daemon
from tests.support.sandbox import can_refuse

pytestmark = pytest.mark.skipif(not can_refuse(), reason="the system calls of this machine are not known here")


def in_sandbox(calls: str, *command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.support.sandbox", calls, *command]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def start(place: Path, calls: str, driver: str = "host") -> str:
    """Return the last sentence of a daemon that does not start in such a sandbox."""
    options = ["--driver", driver, "--metrics-port", "0", "--runtime-directory", str(place / "run")]
    done = in_sandbox(calls, "-m", "membrokerd.cli", *options)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_a_daemon_tries_what_it_needs(tmp_path: Path) -> None:
    """Later, a refused pidfd_open would say that a worker is dead, and a refused flock that another daemon runs."""
    for calls in (["pidfd_open"], ["eventfd2", "flock"]):
        said = start(tmp_path, ",".join(calls))
        assert said.startswith("membrokerd: this system refuses what a broker needs: ")
        assert "; ".join(f"{call}: Operation not permitted (EPERM)" for call in calls) in said
        assert said.endswith("allow it in the sandbox")
        assert not (tmp_path / "run").exists(), "it has begun nothing"
    assert "memfd_create" in start(tmp_path, "memfd_create")


def test_the_doctor_tries_too() -> None:
    done = in_sandbox("pidfd_open,memfd_create", "-m", "membroker.cli.main", "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["system calls"]["status"] == "fail"
    for call in ("pidfd_open", "memfd_create"):
        assert f"{call}: Operation not permitted (EPERM)" in checks["system calls"]["found"]
    assert "seccomp" in checks["system calls"]["advice"]


_CONNECT = """
import membroker, sys
try:
    with membroker.connect(sys.argv[1], transport="grpc" if len(sys.argv) > 2 else "handoff") as client:
        client.models()
except membroker.MembrokerError as error:
    print(type(error).__name__, error)
"""


def test_a_worker_is_told_which_call_is_refused(daemon: Daemon) -> None:
    """It had descriptors left, and was told to raise their limit."""
    for calls, named, by in (("socket", "socket(AF_UNIX, SOCK_SEQPACKET)", []), ("eventfd2", "eventfd2", ["grpc"])):
        said = in_sandbox(calls, "-c", _CONNECT, str(daemon.endpoint()), *by).stdout
        assert said.startswith(f"AccessDenied {named}: Operation not permitted (EPERM): this process may not make")
