"""Every alert fires: a real Prometheus, a real daemon, and each state made real.

The rules are deploy/'s with their minutes as seconds. Every state that is made here lasts until the test ends it; one
that ends by itself within an alert's real `for` could never fire it, and must not be used to show that it does.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support import daemons
from tests.support.daemons import DEADLINE_SECONDS, Daemon, find_root, running, until, whole_lines
from tests.support.fake_cuda import say_faults, with_faults
from tests.support.honest_worker import spare_descriptors
from tests.support.sizes import MIB
from tests.support.template import PythonProcess
from tests.support.workers import PAGE, Worker, worker, workers

from membroker.v1 import admin_pb2

pytestmark = pytest.mark.deep

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
ALERTS = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
NOT_MADE_REAL = {"MembrokerPeersUnknown", "MembrokerSlowTurns"}
"""Only in `test_alert_rules`: a kernel that does not know its processes, and a machine without processors."""
TRUE_OF_A_BUSY_MACHINE = {"MembrokerDown", "MembrokerSlowTurns"}
"""Here a second is a minute: where others compute, scrapes may take longer than that, and turns be slow for 20."""
CONFIGURATION = """
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
rule_files: [alerts.yml]
scrape_configs:
  # As discovery by annotations names it: no rule may need a name of ours.
  - job_name: kubernetes-pods
    file_sd_configs: [{files: [targets.json]}]
"""


class Prometheus:
    """A Prometheus on loopback that scrapes one target; `fired` are all alerts that it has seen fire."""

    def __init__(self, directory: Path, metrics_url: str) -> None:
        self._directory = directory
        # Not the quarter of an hour in which restarts count: on a busy machine three take longer than 15 s.
        rules = re.sub(r"(for: |(?<!process_start_time_seconds)\[|offset )(\d+)m\b", r"\1\2s", RULES.read_text())
        (directory / "alerts.yml").write_text(rules)
        (directory / "prometheus.yml").write_text(CONFIGURATION)
        self.scrape(metrics_url)
        self._log = (directory / "log").open("wb")
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        command += ["--web.listen-address=127.0.0.1:0"]
        self.process = subprocess.Popen(command, cwd=directory, stdout=self._log, stderr=self._log)
        self.fired: set[str] = set()
        self._authority = until(self._listens_at)

    def _listens_at(self) -> str:
        assert self.process.poll() is None, "Prometheus has ended"
        said = re.search(r'"Listening on" address=(\S+)', whole_lines(self._directory / "log"))
        return said[1] if said else ""

    def scrape(self, metrics_url: str) -> None:
        """Scrape a daemon there from now on, as the same instance: each has the port that the kernel gave it.

        Without a URL discovery knows no daemon any more.
        """
        target = metrics_url.removeprefix("http://").removesuffix("/metrics")
        new = self._directory / "targets.new"
        new.write_text(json.dumps([{"targets": [target] if target else [], "labels": {"instance": "broker"}}]))
        new.rename(self._directory / "targets.json")

    def ask(self, path: str) -> Any:
        """Return the data of an answer, or None while there is no answer."""
        try:
            with urllib.request.urlopen(f"http://{self._authority}/api/v1/{path}", timeout=DEADLINE_SECONDS) as answer:
                return json.load(answer)["data"]
        except OSError:
            assert self.process.poll() is None, "Prometheus has ended"
            return None

    def scraped(self) -> int:
        """Return how many scrapes there were."""
        found = self.ask("query?query=count_over_time(up[5m])")
        return int(found["result"][0]["value"][1]) if found and found["result"] else 0

    def firing(self) -> set[str]:
        """Return the alerts that fire now."""
        told = self.ask("alerts") or {"alerts": []}
        now = {alert["labels"]["alertname"] for alert in told["alerts"] if alert["state"] == "firing"}
        self.fired |= now
        return now

    def until_fired(self, *alerts: str) -> None:
        """Wait until each has fired at some time."""
        assert set(alerts) <= ALERTS
        until(lambda: self.firing() is not None and self.fired >= set(alerts), DEADLINE_SECONDS)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self._log.close()


@contextmanager
def prometheus(directory: Path, metrics_url: str) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes a daemon."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    made = Prometheus(directory, metrics_url)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def stderr() -> Iterator[int]:
    """Let daemons write their log into a pipe; yield the end that a test may read from, or not."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 20)

    def start(arguments: list[str], **options: Any) -> PythonProcess:
        return PythonProcess(arguments, **{**options, "stderr": writer, "stdout": writer})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemons, "PythonProcess", start)
        yield reader
    os.close(writer)
    os.close(reader)


CONFIG = {
    "driver": "auto",
    "capacity": "256MiB",
    "settle_seconds": 0.5,
    "audit_seconds": 0.1,
    "max_sessions": 4,
    "tenants": {"red": {"limit": "128MiB"}, "blue": {}},
}
_ASK_AGAIN_AND_AGAIN = """
import threading
def ask():
    while not over.wait(0.2):
        try: model.allocate('512MiB')
        except membroker.OutOfMemory as error: assert error.reason == 'TENANT_LIMIT', error
        try: limited.allocate('4MiB')
        except membroker.OutOfMemory as error: assert error.reason == 'MODEL_LIMIT', error
over = threading.Event()
asking = threading.Thread(target=ask, daemon=True)
asking.start()
"""


def borrow(one: Worker, daemon: Daemon, tenant: str, size: int) -> None:
    one.connect(daemon, tenant)
    one.do(f"model = client.model('m-{one.pid}'); pool = model.pool(page_size='2MiB')")
    one.do(f"pool.allocate(0, {size})")


@pytest.mark.timeout(400)
def test_every_alert_fires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: int) -> None:
    """Limit reached, stranger, forked child, lost connection, full disk, no descriptors, unread log, dead daemon.

    And guarantees that cannot be kept, a worker that does not answer a recall, a drain, and restarts.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with (
        running(CONFIG) as daemon,
        prometheus(tmp_path, daemon.device().metrics_url) as watch,
        workers(3) as (parent, lost, asker),
        ExitStack() as ending,
    ):
        until(lambda: watch.scraped() >= 5)
        watch.until_fired("MembrokerDriverFallback")
        until(lambda: watch.firing() == {"MembrokerDriverFallback"})  # nothing else is wrong

        _break_the_configuration(daemon, watch)
        _stand_near_a_limit_while_drained(daemon, watch)
        _guarantee_what_is_lent(daemon, watch)
        _recall_from_one_that_is_stopped(daemon, watch)
        ending.callback(os.kill, _make_a_child_keep_memory(daemon, watch, parent), signal.SIGKILL)
        lost.do(f"raw = Raw({str(daemon.endpoint())!r}, 'handoff'); raw.hello(); raw.socket.shutdown(2)")
        borrow(asker, daemon, "red", 2 * MIB)
        asker.do("limited = client.model('limited', limit='2MiB')")
        asker.do(_ASK_AGAIN_AND_AGAIN)
        with worker() as full, worker() as fourth:
            full.connect(daemon, "blue")
            full.do("model = client.model('full'); pool = model.pool(page_size='2MiB')")

            def fires_amid_refusals() -> bool:
                assert full.refused("pool.allocate(0, 240 * MIB)").reason == "DEVICE_FULL"
                return "MembrokerDeviceFull" in watch.firing()

            until(fires_amid_refusals)
            fourth.connect(daemon, "blue")
            watch.until_fired(
                "MembrokerSessionsNearLimit",
                "MembrokerTenantAtLimit",
                "MembrokerModelAtLimit",
                "MembrokerSessionsDetached",
            )
            fourth.do("client.close()")
            _use_up_descriptors(daemon, watch)
            _fill_the_log(full, watch)
            asker.do("over.set(); asking.join()")
            _fill_the_disk(daemon, watch, full)
        daemon.kill()
        watch.until_fired("MembrokerDown")
        _restart_again_and_again(daemon, watch)
        watch.scrape("")
        watch.until_fired("MembrokerTargetGone")
        expected = ALERTS - {"MembrokerDeviceLost", "MembrokerDriverFailed"} - NOT_MADE_REAL
        assert watch.fired - TRUE_OF_A_BUSY_MACHINE == expected - TRUE_OF_A_BUSY_MACHINE


def test_a_lost_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU falls off the bus: the pager goes off, and stops when the GPU is back."""
    faults = with_faults(tmp_path, monkeypatch)
    with (
        running({"driver": "cuda", "capacity": "1GiB", "audit_seconds": 0.1}) as daemon,
        prometheus(tmp_path, find_root(daemon).device().metrics_url) as watch,
    ):
        until(lambda: watch.scraped() >= 5)
        until(lambda: watch.firing() == set())
        say_faults(faults, "nvmlDeviceGetMemoryInfo 15\n")
        watch.until_fired("MembrokerDeviceLost")
        assert watch.fired - TRUE_OF_A_BUSY_MACHINE == {"MembrokerDeviceLost"}
        with worker() as one:
            one.connect(find_root(daemon))
            one.do("model = client.model('m')")

            def fires_amid_failures() -> bool:
                assert one.refused("model.allocate(PAGE)").reason == "DRIVER_FAILED"
                return "MembrokerDriverFailed" in watch.firing()

            until(fires_amid_failures)
        say_faults(faults, "")
        until(lambda: watch.firing() == set())


def _break_the_configuration(daemon: Daemon, watch: Prometheus) -> None:
    path = daemon.directory / "membrokerd.toml"
    good = path.read_text()
    path.write_text("tenants = [")
    daemon.process.send_signal(signal.SIGHUP)
    watch.until_fired("MembrokerReloadRefused")
    path.write_text(good)
    daemon.process.send_signal(signal.SIGHUP)


def _stand_near_a_limit_while_drained(daemon: Daemon, watch: Prometheus) -> None:
    with worker() as one, daemon.admin_stub() as admin:
        borrow(one, daemon, "red", 124 * MIB)
        admin.Drain(admin_pb2.DrainRequest())
        watch.until_fired("MembrokerTenantNearLimit", "MembrokerDrained")
        admin.Undrain(admin_pb2.UndrainRequest())
        one.do("pool.close(); client.close()")


def _restart_again_and_again(daemon: Daemon, watch: Prometheus) -> None:
    """It crashes three times within a quarter of an hour; each start is scraped."""

    def started() -> str:
        found = watch.ask("query?query=process_start_time_seconds")
        return str(found["result"][0]["value"][1]) if found and found["result"] else ""

    for number in range(4):
        before = started()
        if number:
            daemon.kill()
        daemon.start_again()
        watch.scrape(daemon.device().metrics_url)
        until(lambda before=before: started() not in ("", before))
    watch.until_fired("MembrokerRestarts")


def _guarantee_what_is_lent(daemon: Daemon, watch: Prometheus) -> None:
    with worker() as one, daemon.admin_stub() as admin:
        borrow(one, daemon, "blue", 160 * MIB)
        request = admin_pb2.SetQuotaRequest(name="tenants/red", guarantee_bytes=128 * MIB)
        request.update_mask.paths.append("guarantee_bytes")
        admin.SetQuota(request)
        watch.until_fired("MembrokerGuaranteeShortfall")
        with worker() as owner:
            owner.connect(daemon, "red")
            owner.do("model = client.model('owner')")

            def fires_amid_refusals() -> bool:
                assert owner.refused("model.allocate(128 * MIB, timeout=0.05)").reason == "CAPACITY"
                return watch.firing() >= {"MembrokerGuaranteedRequestRefused", "MembrokerCapacityRefused"}

            until(fires_amid_refusals, DEADLINE_SECONDS)
            owner.begin("model.allocate(128 * MIB, timeout=3600).close()")
            watch.until_fired("MembrokerLongWaits")
            one.do("pool.close(); client.close()")
            owner.result()
        request.ClearField("guarantee_bytes")
        admin.SetQuota(request)


def _recall_from_one_that_is_stopped(daemon: Daemon, watch: Prometheus) -> None:
    with worker() as one, daemon.admin_stub() as admin:
        one.do("from tests.support.raw import *; from pathlib import Path")
        one.do(f"session = Session(Path({str(daemon.endpoint('blue'))!r}))")
        one.do("model = session.register('stopped', answers_recalls=True)")
        one.do(f"ids = session.borrow(model, {160 * MIB})")
        one.send(signal.SIGSTOP)
        request = admin_pb2.SetQuotaRequest(name="tenants/blue", limit_bytes=64 * MIB)
        admin.SetQuota(request)  # the broker asks for what is above it
        watch.until_fired("MembrokerLateRecall")
        request.ClearField("limit_bytes")
        admin.SetQuota(request)


def _make_a_child_keep_memory(daemon: Daemon, watch: Prometheus, parent: Worker) -> int:
    """A rank dies, and a child that it forked holds its memory on, longer than the broker waits."""
    borrow(parent, daemon, "blue", 64 * MIB)
    child = parent.ask("fork_unseen()")
    parent.kill()
    watch.until_fired("MembrokerMemoryNotReturned", "MembrokerUnaccounted")
    os.kill(child, signal.SIGSTOP)  # it stays, until its memory has made the device full
    return child


def _use_up_descriptors(daemon: Daemon, watch: Prometheus) -> None:
    spare_descriptors(daemon.process.pid, 3)  # a scrape needs two
    watch.until_fired("MembrokerDescriptorsNearLimit")
    spare_descriptors(daemon.process.pid, None)


def _fill_the_log(one: Worker, watch: Prometheus) -> None:
    """The pipe is full, then the daemon's queue."""
    one.do("buffers = 0")
    until(
        lambda: (
            one.do("for _ in range(200): model.allocate(PAGE).close()") or "MembrokerLogLinesDropped" in watch.firing()
        ),
        DEADLINE_SECONDS,
    )


def _fill_the_disk(daemon: Daemon, watch: Prometheus, one: Worker) -> None:
    pid, (_, hard) = daemon.process.pid, resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (PAGE, hard))  # an extent is a file, too
    one.do(
        "refused = None\n"
        "while refused is None:\n"
        "    try:\n"
        "        model.allocate(PAGE).close()\n"
        "    except membroker.MembrokerError as error:\n"
        "        refused = error\n"
    )
    assert one.ask("refused.reason") == "JOURNAL_FULL"
    watch.until_fired("MembrokerJournalFull")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
