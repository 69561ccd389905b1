"""The Kubernetes pod of each session, in listings and in the log, as long as the session and over a restart."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support import faulty_daemon
from tests.support.command import good
from tests.support.daemons import Daemon, running, until
from tests.support.workers import worker

UID = "0b9c8f7e-1d2c-4b3a-9e8f-7a6b5c4d3e2f"


def test_sessions_have_their_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faulty_daemon.CGROUPS, str(tmp_path))
    with running(module="tests.support.faulty_daemon in_kubernetes") as daemon, worker() as one, worker() as other:
        (tmp_path / "pods" / f"web_api-0_{UID}").mkdir(parents=True)
        (tmp_path / str(one.pid)).mkdir()
        cgroup = tmp_path / str(one.pid) / "cgroup"
        cgroup.write_text(f"0::/kubepods/burstable/pod{UID}/{'c' * 64}\n")
        one.connect(daemon)
        other.connect(daemon)
        name = one.ask("client.session")
        until(lambda: pods(daemon)[name] == (UID, "web/api-0"))
        assert pods(daemon)[other.ask("client.session")] == ("", "")
        one.do("kept = client.model('m').allocate('32MiB')")
        (found,) = json.loads(good("processes", "--json", at=daemon.admin))
        assert (found["pid"], found["pod_uid"], found["pod_name"]) == (one.pid, UID, "web/api-0")
        labels = f'location="device",pod_name="api-0",pod_namespace="web",pod_uid="{UID}",tenant="red"'
        assert series(daemon) == [labels]
        daemon.kill()
        daemon.start_again()
        until(lambda: {session.name: session.state for session in daemon.sessions()}[name] == 1)
        until(lambda: pods(daemon)[name] == (UID, "web/api-0"))
        one.do("client.close()")
        until(lambda: name not in pods(daemon))
        until(lambda: not series(daemon))
        # A thread of the daemon writes the log, after the answers.
        (line,) = until(lambda: re.findall(f"^.*session ended.*{name}.*$", daemon.log(), re.MULTILINE))
        assert f"pod={UID} pod_name=web/api-0" in line


def pods(daemon: Daemon) -> dict[str, tuple[str, str]]:
    rows = json.loads(good("sessions", "--json", at=daemon.admin))
    return {row["name"]: (row["pod_uid"], row["pod_name"]) for row in rows}


def series(daemon: Daemon) -> list[str]:
    found = re.findall(r"^membroker_pod_used_bytes\{gpu_uuid=\"[^\"]*\",(.*)\} 3.3554432e\+07$", daemon.metrics(), re.M)
    assert len(found) == daemon.metrics().count("\nmembroker_pod_used_bytes{")
    return found
