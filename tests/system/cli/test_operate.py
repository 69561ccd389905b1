"""`membroker forget`, `drain` and `undrain`, as an operator uses them: on a real daemon, beside real workers."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from tests.support import raw
from tests.support.command import COMMAND, good, refused, rows, run
from tests.support.daemons import DEADLINE_SECONDS, Daemon, hold_still, running, until
from tests.support.sizes import MIB
from tests.support.template import PythonProcess
from tests.support.workers import ANCHOR_BYTES, PAGE, Worker, worker

import membroker
from membroker.admin import Admin
from membroker.cli import holders
from membroker.cli import main as cli
from membroker.v1 import admin_pb2


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Worker]:
    """A worker of red that holds 16 MiB with something written in it, and notes what it is told."""
    with worker() as one:
        one.connect(daemon).do("told = []; client.on_notice(lambda notice: told.append(type(notice).__name__))")
        one.do("model = client.model('chat'); kept = model.allocate('16MiB'); kept.view()[:4] = b'kept'")
        yield one


def told(engine: Worker) -> list[Any]:
    """Return what a worker was told, by kind, in order."""
    return engine.ask("told")


def test_the_bytes_of_a_forgotten_session(daemon: Daemon) -> None:
    """An engine hangs, and the daemon was restarted: nobody knows whether it comes back. The operator decides."""
    with worker() as hung:
        hung.connect(daemon).do("kept = client.model('chat').allocate('192MiB'); kept.view()[:4] = b'kept'")
        name = str(hung.ask("client.session"))
        assert f"{name} is open, its process is connected" in refused("forget", name, at=daemon.admin)
        hung.send(signal.SIGSTOP)
        daemon.kill()
        daemon.start_again()
        (found,) = json.loads(good("sessions", "--admin", "--json", at=daemon.admin))
        assert (found["name"], found["state"]) == (name, "detached")
        assert f"{name} of red is forgotten: 192.0 MiB are no longer charged" in good("forget", name, at=daemon.admin)
        assert f"{name} is not known, or has ended" in refused("forget", name, at=daemon.admin)
        assert daemon.books().lent_bytes == 0
        until(lambda: daemon.books().unaccounted_bytes == 192 * MIB)
        # Why the operator should rather have ended it: it has the memory still, and comes back to a broker without it.
        with membroker.connect(daemon.endpoint("blue")) as client:
            model = client.model("search")
            with pytest.raises(membroker.OutOfMemory) as caught:
                model.allocate("128MiB")
            assert caught.value.reason == "DEVICE_FULL"
            hung.send(signal.SIGCONT)
            assert hung.refused("client.model('chat').allocate(PAGE)").error == "SessionLost"
            assert hung.ask("bytes(kept.view()[:4]).decode()") == "kept"
            hung.kill()
            until(lambda: daemon.books().unaccounted_bytes == 0 and daemon.books().device_used_bytes == ANCHOR_BYTES)
            model.allocate("128MiB").close()


# --- drain ---


def test_a_drain_refuses_tells_and_lists_and_an_undrain_lends_again(daemon: Daemon, engine: Worker) -> None:
    """A GPU is drained: the operator sees the sessions that remain, and each worker learns why it gets nothing."""
    engine.do("segment = model.create_segment('weights', 2 * MIB); segment.seal()")
    out = good("drain", "--timeout", 0, at=daemon.admin)
    assert re.search(rf"red +open +{engine.pid} +\d+[smh] +16\.0 MiB", out)
    assert re.search(r"red/chat/weights +sealed +2\.0 MiB", out)
    shown = json.loads(good("drain", "--json", "--timeout", 0, at=daemon.admin))
    assert [(one["pid"], one["books"]["device"]["used_bytes"]) for one in shown["sessions"]] == [(engine.pid, 16 * MIB)]
    assert [one["size_bytes"] for one in shown["segments"]] == [2 * MIB]
    until(lambda: told(engine)[:1] == ["Draining"])
    for borrowing in ("model.allocate(PAGE)", "model.declare(PAGE)", "client.attach('chat/weights')"):
        refusal = engine.refused(borrowing)
        assert (refusal.error, refusal.reason) == ("BrokerUnavailable", "DRAINING")
    assert re.search(r"lending +no: it is drained", good("status", at=daemon.admin))
    assert daemon.figure("membroker_device_draining") == 1
    engine.do("kept.close(); segment.delete(); segment.close()")
    until(lambda: daemon.books().lent_bytes == 0)
    assert good("drain", at=daemon.admin).splitlines()[1:] == ["nothing is charged"]
    assert good("undrain", at=daemon.admin) == "the device lends again\n"
    assert daemon.figure("membroker_device_draining") == 0
    until(lambda: told(engine)[-1] == "Undrained")
    engine.do("kept = model.allocate(PAGE)")


def test_the_daemon_exits_once_all_is_given_back(daemon: Daemon, engine: Worker) -> None:
    """`membroker drain --exit`: at once where nothing is lent, else with the last byte."""
    status, out, _ = run("drain", "--exit", "--timeout", "0.5", at=daemon.admin)
    assert status == 1
    assert out.splitlines()[-1] == "16.0 MiB were still charged at the end of the wait: the drain goes on"
    until(lambda: told(engine) == ["Draining"])
    assert daemon.process.poll() is None
    engine.do("kept.close()")
    assert daemon.process.wait(DEADLINE_SECONDS) == 0
    until(lambda: " drained" in daemon.log())
    until(lambda: told(engine)[1:] == ["Stopping", "Disconnected"])
    daemon.start_again()
    until(lambda: told(engine)[3:] == ["Resumed"])
    engine.do("kept = model.allocate(PAGE); kept.close()")
    assert good("drain", "--exit", at=daemon.admin).splitlines()[1:] == ["nothing is charged: the daemon exits"]
    assert daemon.process.wait(DEADLINE_SECONDS) == 0


def test_a_drain_waits_and_says_which_session_lets_go(daemon: Daemon, engine: Worker) -> None:
    """An uninstall as pasted stopped a daemon with 624 MiB lent: the command that drains must be the one that waits.

    It stands in the place of an earlier drain, which would have ended the daemon.
    """
    with worker() as other:
        other.connect(daemon, "blue").do("kept = client.model('search').allocate('4MiB')")
        good("drain", "--exit", "--deadline", "86400", "--timeout", 0, at=daemon.admin)
        command = [sys.executable, "-u", "-m", "membroker", "drain", "--endpoint", str(daemon.admin)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as draining:
            assert "still holding memory:\n" in draining.stdout
            other.do("kept.close()")
            assert any(line.endswith(f"process {other.pid}, has released 4.0 MiB\n") for line in draining.stdout)
            assert draining.poll() is None
            engine.do("kept.close()")
            assert any(line.endswith(f"process {engine.pid}, has released 16.0 MiB\n") for line in draining.stdout)
            assert draining.wait(DEADLINE_SECONDS) == 0
    for _ in range(3):  # each a process, and longer than the daemon's look whether it is empty
        good("status", at=daemon.admin)
    assert daemon.process.poll() is None


def test_a_quota_that_is_only_tried(daemon: Daemon) -> None:
    """Would this guarantee be refused? It says so, and what it would be; nothing is set or written."""
    tried = good("quota", "set", "red", "--limit", "64MiB", "--guarantee", "32MiB", "--dry-run", at=daemon.admin)
    assert tried.splitlines()[0] == "nothing is set; it would be:"
    assert "limit 64.0 MiB, guarantee 32.0 MiB" in tried
    assert "900.0 GiB" in refused("quota", "set", "red", "--guarantee", "900GiB", "--dry-run", at=daemon.admin)
    assert json.loads(good("quota", "list", "--json", at=daemon.admin).strip() or "[]") == []


def test_the_daemon_exits_at_the_deadline_whatever_is_lent(
    daemon: Daemon, engine: Worker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody gives nothing back: the operator's time is over, it keeps its memory, and the next daemon knows it."""
    look, looks = holders.of_device, []

    def late(admin: Admin) -> holders.Held:
        looks.append(admin)
        if len(looks) > 1:
            daemon.process.wait(DEADLINE_SECONDS)
        return look(admin)

    monkeypatch.setattr(holders, "of_device", late)
    begun = time.monotonic()
    assert cli.main(["drain", "--deadline", "1.5", "--exit", "--endpoint", str(daemon.admin)]) == 1
    assert time.monotonic() - begun >= 1.5
    assert capsys.readouterr().out.splitlines()[-1].startswith("16.0 MiB were still charged")
    daemon.start_again()
    until(lambda: "Resumed" in told(engine))
    assert daemon.books().lent_bytes == 16 * MIB
    assert engine.ask("bytes(kept.view()[:4]).decode()") == "kept"
    engine.do("model.allocate(PAGE).close()")


def test_a_deadline_that_is_no_time_drains_nothing(daemon: Daemon, engine: Worker) -> None:
    """The library would fail at it in every worker."""
    refusal = raw.admin_call(daemon.admin, "Drain", admin_pb2.DrainRequest(deadline=Timestamp(seconds=1 << 60)))
    assert raw.reason(refusal) == "INVALID_ARGUMENT"
    engine.do("model.allocate(PAGE).close()")
    assert told(engine) == []


@pytest.mark.deep
def test_a_full_disk_is_told(daemon: Daemon, engine: Worker) -> None:
    """The disk of the runtime directory is full at night: a tenant, who gets no session to look with, is told, too."""
    assert "journal" not in good("status", at=daemon.admin) + good("doctor", at=daemon.admin)
    pid, (_, hard) = daemon.process.pid, resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (PAGE, hard))
    engine.do(
        "refused = None\n"
        "while refused is None:\n"
        "    try:\n"
        "        model.allocate(PAGE).close()\n"
        "    except membroker.MembrokerError as error:\n"
        "        refused = error\n"
    )
    assert engine.ask("refused.reason") == "JOURNAL_FULL"
    assert "no: its journal cannot be written, see `membroker doctor`" in good("status", at=daemon.admin)
    for endpoint in (daemon.admin, daemon.endpoint("red")):
        status, out, _ = run("doctor", at=endpoint)
        assert status == 1
        assert re.search(r"^fail  broker: .*journal.*\n +make room on the disk .*`df -h", out, re.MULTILINE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    until(lambda: not daemon.device().journal_full)
    assert "journal" not in good("status", at=daemon.admin) + good("doctor", at=daemon.admin)


def test_host_memory_in_the_place_of_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`driver = "auto"` on a machine whose GPU cannot be used: engines get none of its memory, and why."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with running({"driver": "auto"}) as daemon:
        assert "host, as no usable GPU was found, see `membroker doctor`" in good("status", at=daemon.admin)
        checked = re.search(r"^(\w+) +broker: .* lends (.*)", good("doctor", at=daemon.admin), re.MULTILINE)
        assert checked is not None
        assert checked.groups() == ("warn", "host memory: 256.0 MiB (device)")
        with urllib.request.urlopen(daemon.device().metrics_url.replace("/metrics", "/readyz")) as answer:
            assert answer.read().startswith(b"ok, but no usable GPU was found")


# --- which broker, and whether it answers ---


@pytest.mark.shared_daemon
def test_a_tenants_endpoint_drains_nothing(daemon: Daemon, engine: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone means to drain red, and would stop every tenant of the device."""
    red = daemon.endpoint("red")
    monkeypatch.setenv("MEMBROKER_ENDPOINT", str(red))
    for command in [("drain", "--exit", "--deadline", "1"), ("undrain", "--endpoint", str(red))]:
        said = refused(*command)
        assert f"{red} is the endpoint of one tenant" in said
        assert said.endswith(f"--endpoint {daemon.admin}")
    assert not daemon.device().draining
    engine.do("model.allocate(PAGE).close()")


STOPPED = ("status", "models", "sessions", "segments", "tenants", "processes", "quota list", "drain", "undrain")


@pytest.mark.deep
def test_a_stopped_daemon_is_not_gone(daemon: Daemon) -> None:
    """It stands in a debugger: starting another one would be the wrong advice. All commands wait at the same time."""
    commands = [[*COMMAND, *command.split(), "--endpoint", str(daemon.admin)] for command in STOPPED]
    with hold_still(daemon):
        running = [PythonProcess(command, stderr=subprocess.PIPE, text=True) for command in commands]
        for process in running:
            _, said = process.communicate(timeout=DEADLINE_SECONDS)
            assert process.returncode == 1
            assert re.search(r"^membroker: the broker at .* does not answer: it is stopped or overloaded", said)
            assert "start" not in said


def test_a_dead_daemon_is_not_stopped(daemon: Daemon) -> None:
    daemon.kill()
    for command in STOPPED:
        assert "start one with `membrokerd`" in refused(*command.split(), at=daemon.admin)
    assert "the broker is dead and left its socket behind" in refused("status", at=daemon.endpoint("red"))


def test_tenants_with_what_they_use_and_may(daemon: Daemon, engine: Worker) -> None:
    """Configured ones without anything too; a limit by command shows at once."""
    good("quota", "set", "red", "--limit", "64MiB", at=daemon.admin)
    assert rows(good("tenants", at=daemon.admin)) == [
        ["tenant", "used", "guarantee", "limit", "weight", "waiting", "models", "sessions"],
        ["blue", "0 B", "-", "-", "1", "-", "0", "0"],
        ["red", "16.0 MiB", "-", "64.0 MiB", "1", "-", "1", "1"],
    ]
    _, red = json.loads(good("tenants", "--json", at=daemon.admin))
    assert (red["books"]["device"]["used_bytes"], red["books"]["device"]["limit_bytes"]) == (16 * MIB, 64 * MIB)
