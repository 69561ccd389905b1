"""The command `membroker`, as people and scripts use it: against a real daemon, and against none."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.command import COMMAND, good, refused, rows
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import MIB

import membroker
from membroker.errors import BrokerUnavailable

pytestmark = pytest.mark.shared_daemon


@pytest.fixture
def worker(daemon: Daemon) -> Iterator[membroker.Client]:
    """A worker of red whose model uses 4 MiB of 8 and was refused once."""
    with membroker.connect(daemon.endpoint("red"), client="a [red]worker[/red]") as client:
        model = client.model("Qwen/Qwen3-8B", virtual_capacity="64GiB", limit="8MiB")
        with model.pool(page_size="2MiB") as pool:
            pool.allocate(0, 4 * MIB)
            with pytest.raises(membroker.OutOfMemory):
                pool.allocate(8 * MIB, 8 * MIB)
            yield client


@pytest.mark.usefixtures("worker")
def test_all_that_is_known_of_one_model(daemon: Daemon) -> None:
    """By its own name or with its tenant, as the list shows it; a name that is misspelled is told the right one."""
    for name, where in itertools.product(
        ("Qwen/Qwen3-8B", "red/Qwen/Qwen3-8B"), (daemon.endpoint("red"), daemon.admin)
    ):
        out = good("models", name, at=where)
        figures = dict(re.split(r"\s{2,}", line.strip()) for line in out.splitlines()[1:])
        assert (figures["used"], figures["limit"], figures["virtual"]) == ("4.0 MiB", "8.0 MiB", "64.0 GiB")
        assert (figures["peak"], figures["extents"], figures["refused"]) == ("4.0 MiB", "2", "1 MODEL_LIMIT")
    said = refused("models", "Qwen/Qwen3-8", at=daemon.admin)
    assert "there is no model 'Qwen/Qwen3-8' now, did you mean Qwen/Qwen3-8B?" in said


@pytest.mark.usefixtures("worker")
def test_a_tenant_sees_its_own_and_the_operator_sees_all(daemon: Daemon) -> None:
    """Blue's endpoint knows nothing of red. The operator's needs no --admin, and a device's directory has it in it."""
    blue = daemon.endpoint("blue")
    assert "no models are registered" in good("models", at=blue)
    assert [each["tenant"] for each in json.loads(good("sessions", "--json", at=blue))] == ["tenants/blue"]
    assert "Qwen/Qwen3-8B" in good("models", "--admin", at=blue)
    for place in (daemon.admin, daemon.root):
        for where in ({"at": place}, {"env": {"MEMBROKER_ENDPOINT": str(place)}}):
            assert "Qwen/Qwen3-8B" in good("models", **where)
            assert [each["tenant"] for each in json.loads(good("sessions", "--json", **where))] == ["tenants/red"]


def test_nothing_is_borrowed_at_the_admin_endpoint(daemon: Daemon) -> None:
    """A program is given the operator's endpoint by mistake: it is told so, not that no daemon runs."""
    with pytest.raises(BrokerUnavailable, match="operator's endpoint"):
        membroker.connect(daemon.admin, timeout=0.1)
    said = refused("segments", "show", "m/s", at=daemon.admin, status=2)
    assert "at its tenant's endpoint, not at the admin endpoint" in said


@pytest.mark.usefixtures("worker")
def test_status_and_sessions_say_what_there_is(daemon: Daemon) -> None:
    """To people, and to programs, which get bytes."""
    red = daemon.endpoint("red")
    status = good("status", at=red)
    assert ["endpoint", str(red)] in rows(status)
    assert re.search(r"^capacity +256\.0 MiB\n  lent +4\.0 MiB\n", status, re.MULTILINE)
    assert f"pid {daemon.process.pid}" in status
    sessions = good("sessions", at=red)
    assert re.search(rf"red +open +{os.getpid()} +\d+[smh] +4\.0 MiB +Qwen/Qwen3-8B +- +a \[red\]worker", sessions)
    device = json.loads(good("status", "--json", at=red))
    assert (device["driver"], device["locations"]["device"]["lent_bytes"]) == ("host", 4 * MIB)
    mine = [each for each in json.loads(good("sessions", "--json", at=red)) if not each["observer"]]
    assert [each["books"]["device"]["used_bytes"] for each in mine] == [4 * MIB]
    assert rows(good("models", at=red))[1] == ["red/Qwen/Qwen3-8B", "4.0 MiB", "-", "8.0 MiB", "-", "-", "-", "1"]
    (model,) = json.loads(good("models", "--json", at=red))
    assert (model["books"]["device"]["limit_bytes"], model["denials_total"]) == (8 * MIB, {"MODEL_LIMIT": 1})


def test_a_quota_is_set_listed_and_ended(daemon: Daemon, worker: membroker.Client) -> None:
    """A limit below what is used takes nothing away, refuses what comes, and goes as it came; a wrong name is told."""
    red = daemon.endpoint("red")
    out = good("quota", "set", "red/Qwen/Qwen3-8B", "--limit", "2MiB", at=red)
    assert "limit 2.0 MiB, guarantee as configured, weight as configured, used 4.0 MiB" in out
    assert "it borrows nothing more" in out
    assert worker.models()[0].books["device"].limit_bytes == 2 * MIB
    assert rows(good("quota", "list", at=red))[1] == ["red/Qwen/Qwen3-8B", "-", "2.0 MiB", "-", "4.0 MiB"]
    assert "there is no model of that name now" in good("quota", "set", "red/chat", "--limit", "2MiB", at=red)
    names = [quota["name"] for quota in json.loads(good("quota", "list", "--json", at=red))]
    assert names == ["tenants/red/models/Qwen/Qwen3-8B", "tenants/red/models/chat"]
    for name in ("red/chat", "red/Qwen/Qwen3-8B"):
        assert "limit as configured" in good("quota", "set", name, "--limit", "none", at=red)
    assert "no quota was set by command" in good("quota", "list", at=red)
    assert worker.models()[0].books["device"].limit_bytes == 8 * MIB
    said = refused("quota", "set", "bleu/chat", "--limit", "1GiB", at=red)
    assert "there is no tenant 'bleu'" in said
    assert said.endswith(", did you mean blue?")


def test_watching_goes_on_when_the_broker_is_back() -> None:
    """Each reason why there are no numbers is said once, and then there are some. It ends quietly with its reader."""
    with running() as daemon:
        command = [sys.executable, *COMMAND, "models", "--watch", "0.05", "--endpoint", str(daemon.endpoint("red"))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "no models are registered\n"
            daemon.kill()
            said = [until(process.stderr.readline) for _ in range(2)]
            assert [" is gone: " in said[0], " is dead " in said[1]] == [True, True]
            daemon.start_again()
            with membroker.connect(daemon.endpoint("red")) as client:
                client.model("chat")
                until(lambda: "red/chat" in process.stdout.readline())
            process.stdout.close()
            assert process.stderr.read() == ""


def test_an_output_that_cannot_show_everything(daemon: Daemon) -> None:
    """A name with letters that the terminal's encoding lacks, and an output that is closed: neither is a traceback."""
    with membroker.connect(daemon.endpoint(), client="größer 大"):
        assert "gr??er ?" in good("sessions", at=daemon.endpoint(), env={"PYTHONIOENCODING": "ascii"})
        command = [sys.executable, *COMMAND, "sessions", "--endpoint", str(daemon.endpoint())]
        for where, status, said in (
            (">&-", 0, ""),
            (">/dev/full", 1, "membroker: cannot write the output: No space left on device\n"),
        ):
            done = subprocess.run(["sh", "-c", f'"$@" {where}', "sh", *command], capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (status, said)
