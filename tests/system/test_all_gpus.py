"""`membrokerd --all`: one parent, one daemon for each device, and one metrics port for all.

The devices are the host driver's; the processes, signals and sockets are real.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.all_gpus import CLI, UUIDS, running_all, write_config
from tests.support.command import good
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.template import run
from tests.support.workers import is_gone, worker

import membroker
from membrokerd.observe import catalog


def refused(*words: str) -> tuple[int, str]:
    done = run([*CLI, *words])
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_a_killed_daemon_starts_again_and_the_others_go_on(place: Path) -> None:
    """Workers of both keep what they have and allocate more. The next one starts although systemd hangs."""
    with running_all(place) as parent, worker() as first, worker() as second:
        parent.wait_until_ready()
        for uuid, one in zip(UUIDS, (first, second), strict=True):
            one.do(f"client = membroker.connect({str(parent.endpoint(uuid))!r}); model = client.model('m')")
            one.do(f"kept = model.allocate('4MiB'); kept.view()[:4] = b'kept'; assert client.device_uuid == {uuid!r}")
        before = parent.pids()
        assert parent.figure("membroker_daemon_restarts_total", "host") == 0
        os.kill(before[0], signal.SIGKILL)
        until(lambda: parent.pids()[0] != before[0] and parent.get("/readyz")[0] == 200)
        assert parent.pids()[1] == before[1]
        for one in (first, second):
            one.do("more = model.allocate('2MiB'); more.close()")
            assert one.ask("bytes(kept.view()[:4]).decode()") == "kept"
            one.do("kept.close(); client.close()")
        until(lambda: parent.figure("membroker_daemon_restarts_total", "host") == 1)
        assert parent.figure("membroker_daemon_restarts_total", "host-1") == 0
        until(lambda: "a daemon has died gpu=host status=-9 restart_seconds=0.2" in parent.log())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full, suppress(BlockingIOError):
            full.setblocking(False)
            while True:
                full.sendto(b"STATUS=", str(place / "notify"))
        os.kill(before[1], signal.SIGKILL)
        until(lambda: parent.pids()[1] != before[1] and parent.get("/readyz")[0] == 200)


def test_one_port_serves_the_metrics_and_the_status_pages_of_all(place: Path) -> None:
    """Every family is there once, every series names its GPU, and a daemon that is stopped is missing alone."""
    with running_all(place) as parent:
        parent.wait_until_ready()
        status, text = parent.get("/metrics")
        assert status == 200
        families = list(text_string_to_metric_families(text))
        assert len({family.name for family in families}) == len(families)
        for family in families:
            assert {sample.labels["gpu_uuid"] for sample in family.samples} <= set(UUIDS), family.name
        served = set(re.findall(r"^# TYPE (membroker_\w+)", text, re.MULTILINE))
        assert {spec.name for spec in catalog.PARENT} <= served <= set(catalog.ALL), "docs/metrics.md has them all"
        until(lambda: [parent.figure("membroker_daemon_up", uuid) for uuid in UUIDS] == [1, 1])
        assert parent.get("/healthz")[0] == 200
        until(lambda: parent.get("/")[1].count("Device memory") == 2)
        stopped = parent.pids()[1]
        os.kill(stopped, signal.SIGSTOP)
        try:
            until(lambda: parent.figure("membroker_daemon_up", "host-1") == 0)
            until(lambda: parent.figure("membroker_build_info", "host") == 1)
            assert parent.figure("membroker_build_info", "host-1") is None
            page = until(lambda: got if (got := parent.get("/")[1]).count("Device memory") == 1 else "")
            assert '<a href="#host-1">host-1</a></td><td>does not answer</td>' in page
        finally:
            os.kill(stopped, signal.SIGCONT)
        until(lambda: parent.figure("membroker_daemon_up", "host-1") == 1)


def test_the_life_of_a_parent(place: Path) -> None:
    """systemd is told, a second parent is refused, a reload reaches every daemon, one is drained, SIGTERM ends all."""
    with running_all(place) as parent:
        parent.wait_until_ready()
        until(lambda: re.search(r"^READY=1\nSTATUS=2 of 2 daemons are ready$", parent.told(), re.MULTILINE))
        status, said = refused("--config", str(place / "membrokerd.toml"), "--all", "2")
        assert status == 1
        assert f"process {parent.process.pid}; stop it first (kill {parent.process.pid})\n" in said, "no other --device"
        assert parent.get("/readyz")[0] == 200
        write_config(place, tenants={"red": {}, "blue": {}})
        parent.process.send_signal(signal.SIGHUP)
        endpoints = [parent.endpoint(uuid).with_name("blue") for uuid in UUIDS]
        until(lambda: all((endpoint / "grpc.sock").exists() for endpoint in endpoints))
        for endpoint in endpoints:
            with membroker.connect(endpoint) as client:
                client.model("m").allocate("2MiB").close()
        pids = parent.pids()
        good("drain", "--exit", at=place / "run" / UUIDS[0])
        until(lambda: f"a daemon has ended gpu={UUIDS[0]} status=0" in parent.log())
        assert parent.process.poll() is None, "a drained daemon stays away, alone"
        parent.process.terminate()
        assert parent.process.wait(DEADLINE_SECONDS) == 0
        assert all(map(is_gone, pids))
        assert "STOPPING=1" in parent.told()
        assert not list(place.glob("run/all/state/notify-*"))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_terminals_signal_while_the_daemons_start(place: Path, number: signal.Signals) -> None:
    """The terminal sends it to the whole group. A hangup reloads; Ctrl-C ends all without a traceback."""
    with running_all(place) as parent:
        until(lambda: len(re.findall("a daemon was started", parent.log())) == 2)
        os.killpg(parent.process.pid, number)
        if number == signal.SIGHUP:
            parent.wait_until_ready()
        else:
            assert parent.process.wait(DEADLINE_SECONDS) == 0
        assert "has died" not in parent.log()


def test_no_daemon_can_start(place: Path) -> None:
    """The only reason is said by each daemon, and the parent ends instead of trying forever."""
    for uuid in UUIDS:
        (place / "run" / uuid / "state").mkdir(parents=True)
        (place / "run" / uuid / "state" / "epoch").write_text("no number\n")
    with running_all(place) as parent:
        assert parent.process.wait(DEADLINE_SECONDS) == 1
        assert len(re.findall("contains 'no number', which is not a number", parent.log())) == 2


@pytest.mark.deep
def test_the_daemons_end_with_a_parent_that_is_killed(place: Path) -> None:
    """Otherwise the next parent would find every device taken."""
    with running_all(place) as parent:
        parent.wait_until_ready()
        pids = parent.pids()
        parent.process.kill()
        until(lambda: all(map(is_gone, pids)))
    (place / "notify").unlink()
    with running_all(place) as parent:
        parent.wait_until_ready()


def test_what_starts_nothing_is_one_sentence(place: Path) -> None:
    """A directory where an earlier parent's socket would be, a wrong key, a store that cannot be shared, a driver."""
    (place / "run/all/state/notify-1").mkdir(parents=True)
    for keys, sentence in (
        ({}, r"cannot remove .*/notify-1: Is a directory; move it away"),
        ({"capacity": "much"}, "capacity: "),
        ({"descriptor_store": "systemd"}, "descriptor_store"),
        # With a GPU in the machine, `auto` would lend that, and the number would mean nothing.
        ({"driver": "auto"}, "--all takes a number only with --driver host"),
    ):
        status, said = refused("--config", str(write_config(place, **keys)), "--all", "2")
        assert (status, said.count("\n")) == (1, 1), said
        assert re.search(sentence, said), said
    assert not (place / "run/host").exists(), "nothing was started"


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
def test_a_broker_that_found_no_gpu_says_so(place: Path) -> None:
    """`driver = "auto"`, and the host's NVIDIA driver is not loaded. MembrokerDriverFallback must fire."""
    with running_all(place, count=(), driver="auto") as parent:
        parent.wait_until_ready()
        until(lambda: parent.figure("membroker_driver_fallback", "host") == 1)
        until(lambda: parent.log().count("no GPU is usable, so the host driver lends ordinary memory") == 1)
