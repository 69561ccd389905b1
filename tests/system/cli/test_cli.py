"""The command `membroker`, as people and scripts use it: against a real daemon, and against none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
        model = client.model("llama-7b", virtual_capacity="64GiB", limit="8MiB")
        with model.pool(page_size="2MiB") as pool:
            pool.allocate(0, 4 * MIB)
            with pytest.raises(membroker.OutOfMemory):
                pool.allocate(8 * MIB, 8 * MIB)
            yield client


@pytest.mark.usefixtures("worker")
def test_all_that_is_known_of_one_model(daemon: Daemon) -> None:
    """By its own name or with its tenant, as the list shows it; a name that is misspelled is told the right one."""
    red, admin = str(daemon.endpoint("red")), str(daemon.admin)
    for name, where in (("llama-7b", red), ("red/llama-7b", red), ("llama-7b", admin), ("red/llama-7b", admin)):
        out = good("models", name, "--endpoint", where)
        figures = dict(re.split(r"\s{2,}", line.strip()) for line in out.splitlines()[1:])
        assert (figures["used"], figures["limit"], figures["virtual"]) == ("4.0 MiB", "8.0 MiB", "64.0 GiB")
        assert (figures["peak"], figures["extents"], figures["refused"]) == ("4.0 MiB", "2", "1 MODEL_LIMIT")
    for where, listing in ((red, "membroker models"), (admin, "membroker models --admin")):
        said = refused("models", "lama-7b", "--endpoint", where)
        assert f"there is no model 'lama-7b' now, did you mean llama-7b? `{listing}` lists" in said


@pytest.mark.usefixtures("worker")
def test_a_tenant_sees_its_own_and_the_operator_sees_all(daemon: Daemon) -> None:
    """Blue's endpoint knows nothing of red. The operator's needs no --admin, and a device's directory has it in it."""
    blue = daemon.endpoint("blue")
    assert "no models are registered" in good("models", at=blue)
    assert [each["tenant"] for each in json.loads(good("sessions", "--json", at=blue))] == ["tenants/blue"]
    assert "llama-7b" in good("models", "--admin", at=blue)
    for place in (daemon.admin, daemon.root):
        for where in ({"at": place}, {"env": {"MEMBROKER_ENDPOINT": str(place)}}):
            assert "llama-7b" in good("models", **where)
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
    assert re.search(
        r"^capacity +256\.0 MiB\n  lent +4\.0 MiB\n  releasing +0 B\n  free +252\.0 MiB", status, re.MULTILINE
    )
    assert f"pid {daemon.process.pid}" in status
    sessions = good("sessions", at=red)
    assert re.search(rf"red +open +{os.getpid()} +\d+[smh] +4\.0 MiB +llama-7b +- +a \[red\]worker", sessions)
    device = json.loads(good("status", "--json", at=red))
    assert (device["driver"], device["locations"]["device"]["lent_bytes"]) == ("host", 4 * MIB)
    mine = [each for each in json.loads(good("sessions", "--json", at=red)) if not each["observer"]]
    assert [each["books"]["device"]["used_bytes"] for each in mine] == [4 * MIB]
    assert rows(good("models", at=red)) == [
        ["model", "used", "guarantee", "limit", "waiting", "recallable", "late", "refused"],
        ["red/llama-7b", "4.0 MiB", "-", "8.0 MiB", "-", "-", "-", "1"],
    ]
    (model,) = json.loads(good("models", "--json", at=red))
    assert (model["books"]["device"]["limit_bytes"], model["denials_total"]) == (8 * MIB, {"MODEL_LIMIT": 1})


def test_a_quota_is_set_listed_and_ended(daemon: Daemon, worker: membroker.Client) -> None:
    """A limit below what is used takes nothing away, refuses what comes, and goes as it came."""
    at = ("--endpoint", str(daemon.endpoint("red")))
    out = good("quota", "set", "red/llama-7b", "--limit", "2MiB", *at)
    assert "limit 2.0 MiB, guarantee as configured, weight as configured, used 4.0 MiB" in out
    assert "it borrows nothing more" in out
    assert worker.models()[0].books["device"].limit_bytes == 2 * MIB
    assert rows(good("quota", "list", *at))[1] == ["red/llama-7b", "-", "2.0 MiB", "-", "4.0 MiB"]
    good("quota", "set", "tenants/red", "--limit", "128MiB", *at)
    names = [quota["name"] for quota in json.loads(good("quota", "list", "--json", *at))]
    assert names == ["tenants/red", "tenants/red/models/llama-7b"]
    for name in ("red", "red/llama-7b"):
        assert "limit as configured" in good("quota", "set", name, "--limit", "none", *at)
    assert "no quota was set by command" in good("quota", "list", *at)
    assert worker.models()[0].books["device"].limit_bytes == 8 * MIB


def test_a_quota_for_nobody_says_so(daemon: Daemon) -> None:
    """A limit may be set before its model exists. A misspelled tenant is refused."""
    said = good("quota", "set", "red/lama-7b", "--limit", "2MiB", at=daemon.admin)
    assert "there is no model of that name now: the quota takes effect when there is" in said
    assert len(good("quota", "set", "blue", "--limit", "2MiB", at=daemon.admin).splitlines()) == 1, "it is configured"
    said = refused("quota", "set", "bleu/chat", "--limit", "1GiB", at=daemon.admin)
    assert "there is no tenant 'bleu'" in said
    assert said.endswith(", did you mean blue?")


def test_a_quota_of_a_tenant_that_is_no_tenant_any_more() -> None:
    """It can be ended, and no other set. Where each user is a tenant, a quota names a user."""
    with running() as daemon:
        at = ("--endpoint", str(daemon.admin))
        good("quota", "set", "red", "--limit", "2MiB", *at)
        good("quota", "set", "blue/chat", "--guarantee", "2MiB", *at)
        assert daemon.stop() == 0
        daemon.config["tenants"] = {}
        daemon.start_again()
        good("quota", "set", "uid-1000", "--limit", "2MiB", *at)
        assert "there is no tenant 'uid-007'" in refused("quota", "set", "uid-007", "--limit", "1GiB", *at)
        good("quota", "set", "red", "--limit", "none", *at)
        good("quota", "set", "blue/chat", "--guarantee", "none", *at)
        assert [row[0] for row in rows(good("quota", "list", *at))[1:]] == ["uid-1000"]


@pytest.mark.usefixtures("worker")
def test_an_operator_needs_no_endpoint_where_no_default_tenant_is(daemon: Daemon) -> None:
    """With named tenants there is no `default`: who may enter admin/ gets it without being told."""
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        Path(directory, "membroker").symlink_to(daemon.root.parent)
        assert "llama-7b" in good("models", env={"XDG_RUNTIME_DIR": directory})


@pytest.mark.usefixtures("worker")
def test_watching_ends_quietly_with_its_reader(daemon: Daemon) -> None:
    """`membroker models --watch 0.05 | head -3`: the reader leaves, and nothing is complained about."""
    command = [sys.executable, *COMMAND, "models", "--watch", "0.05", "--endpoint", str(daemon.endpoint("red"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(4)]
        process.stdout.close()
        assert process.stderr.read() == ""
    assert lines[:2] == lines[2:], "shown twice"


def test_watching_goes_on_when_the_broker_is_back() -> None:
    """The operator restarts the daemon: each reason why there are no numbers is said once, and then there are some."""
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
            process.terminate()


def test_an_output_that_cannot_show_everything(daemon: Daemon) -> None:
    """A name with letters that the terminal's encoding lacks, and an output that is closed: neither is a traceback."""
    with membroker.connect(daemon.endpoint(), client="größer 大"):
        out = good("sessions", "--endpoint", str(daemon.endpoint()), env={"PYTHONIOENCODING": "ascii"})
        assert "gr??er ?" in out
        command = [sys.executable, *COMMAND, "sessions", "--endpoint", str(daemon.endpoint())]
        done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        full = subprocess.run(["sh", "-c", '"$@" >/dev/full', "sh", *command], capture_output=True, text=True)
        assert (full.returncode, full.stderr) == (1, "membroker: cannot write the output: No space left on device\n")
