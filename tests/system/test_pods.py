"""The Kubernetes pod of each session, in listings and in the log, as long as the session and over a restart."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support import faulty_daemon
from tests.support.command import good
from tests.support.daemons import Daemon, running, until
from tests.support.terminal import Terminal
from tests.support.workers import worker
from tests.system.cli.test_top import names, top

from membroker.cli.screen import cut

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
        assert series(daemon) == [
            f'location="device",pod_name="api-0",pod_namespace="web",pod_uid="{UID}",tenant="red"'
        ]
        daemon.kill()
        daemon.start_again()
        until(lambda: {session.name: session.state for session in daemon.sessions()}[name] == 1)
        until(lambda: pods(daemon)[name] == (UID, "web/api-0"))
        one.do("client.close()")
        until(lambda: name not in pods(daemon))
        until(lambda: not series(daemon))
        # A thread of the daemon writes the log, after the answers.
        (line,) = until(
            lambda: [line for line in daemon.log().splitlines() if "session ended" in line and name in line]
        )
        assert f"pod={UID} pod_name=web/api-0" in line


def test_a_tenant_and_a_model_have_the_pod_of_their_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator finds the pod of a tenant that the agent has named after a claim, live."""
    monkeypatch.setenv(faulty_daemon.CGROUPS, str(tmp_path))
    tenant = f"dra-{UID}"
    config = {"tenants": {tenant: {"guarantee": "16MiB"}, "blue": {"guarantee": "16MiB"}}}
    with running(config, module="tests.support.faulty_daemon in_kubernetes") as daemon, worker() as one:
        with top("--endpoint", str(daemon.root), columns=160) as terminal:
            until(lambda: "no models" in terminal.text())
            terminal.press("t")
            until(lambda: len(names(terminal)) == 2)
            (tmp_path / "pods" / f"web_api-0_{UID}").mkdir(parents=True)
            (tmp_path / str(one.pid)).mkdir()
            (tmp_path / str(one.pid) / "cgroup").write_text(f"0::/kubepods/burstable/pod{UID}/{'c' * 64}\n")
            one.connect(daemon, tenant)
            one.do("kept = client.model('m').allocate('32MiB')")
            until(lambda: lines(terminal, "web/api-0") == [cut(tenant, 33)])
            terminal.press("/API-0\r")
            until(lambda: names(terminal) == [cut(tenant, 33)])
            terminal.press("t")
            until(lambda: lines(terminal, "web/api-0") == [cut(f"{tenant}/m", 33)])
        one.do("client.close()")


def lines(terminal: Terminal, pod: str) -> list[str]:
    return [line.split()[0] for line in terminal.lines() if line.split()[-1:] == [pod]]


def pods(daemon: Daemon) -> dict[str, tuple[str, str]]:
    rows = json.loads(good("sessions", "--json", at=daemon.admin))
    return {row["name"]: (row["pod_uid"], row["pod_name"]) for row in rows}


def series(daemon: Daemon) -> list[str]:
    found = re.findall(r"^membroker_pod_used_bytes\{gpu_uuid=\"[^\"]*\",(.*)\} 3.3554432e\+07$", daemon.metrics(), re.M)
    assert len(found) == daemon.metrics().count("\nmembroker_pod_used_bytes{")
    return found
