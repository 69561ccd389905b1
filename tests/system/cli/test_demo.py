"""`membroker demo`: it proves what it says, says so when it cannot, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, running
from tests.support.template import PythonProcess
from tests.support.template import run as run_python

from membroker.cli.demo import processes as demo_processes
from membroker.cli.demo import scenes as demo

pytestmark = pytest.mark.deep

COMMAND = [sys.executable, "-m", "membroker.cli.main", "demo"]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the demo makes its directory. At the end nothing is in it, and no process knows it but this one."""
    assert run_python(["-c", ""]).returncode == 0  # the tests' template starts here, and does not know the directory
    directory = Path(tempfile.mkdtemp(prefix="mb-"))
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    left = [path.name for path in directory.iterdir()], processes_of(directory)
    shutil.rmtree(directory)
    assert left == ([], [])


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork the demo's daemons and workers from the tests' template, which is faster. At the end none is left."""
    started: list[PythonProcess] = []

    def start(command: list[str], *, start_new_session: bool, **options: Any) -> PythonProcess:
        started.append(PythonProcess(command[1:], **options))
        return started[-1]

    same = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    names = SimpleNamespace(Popen=start, **same)
    monkeypatch.setattr(demo_processes, "subprocess", names)
    yield
    assert [one.pid for one in started if one.poll() is None] == []


def processes_of(directory: Path) -> list[str]:
    """Return the command lines of the processes, but this one, that have a directory in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            is_another = entry.name.isdecimal() and entry.name != str(os.getpid())
            if is_another and os.fsencode(directory) in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.usefixtures("place")
def test_it_proves_what_it_says() -> None:
    """All scenes, as `make demo` plays them."""
    done = subprocess.run(COMMAND, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    out = " ".join(done.stdout.split())
    assert "have mapped 128.0 MiB, but only 64.0 MiB are charged and in use on the device." in out
    titles = ("Sharing:", "Trade:", "Burst:", "Refusal:", "Death: a broker", "Death: a worker", "Sleep:")
    assert sorted(titles, key=out.index) == list(titles)
    burst = re.search(r"red gets 64.0 MiB after (\d+) ms\. No request was refused\.", out)
    assert burst is not None, out
    assert f"A lent guarantee of 64.0 MiB came back in {burst[1]} ms without a refusal" in out
    said = re.search(
        r"For (\d+) ms no broker ran: in that time red computed (\d+) rounds, blue (\d+)\..* and (\d+) ms after", out
    )
    assert said is not None, out
    without, red, blue, away = map(int, said.groups())
    assert min(red, blue) > 0
    # Half of the pause before a successor is started: so long there was surely none.
    assert min(without, away) > demo_processes.RESTART_SECONDS * 500
    assert "right to the byte: red holds 80.0 MiB, blue 144.0 MiB" in out
    assert "Proved: 64.0 MiB of weights were mapped by two workers and charged once. " in out
    assert f"While the broker was dead, the workers computed {red + blue} rounds," in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order(place: Path, number: signal.Signals) -> None:
    """Ctrl-C, `timeout`, and a terminal that is closed. What is left behind is the fixture's to see."""
    with subprocess.Popen(
        COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("Sharing:") for line in process.stdout)
        assert len(processes_of(place)) == 6, "itself, a daemon and its keeper, three workers"
        os.killpg(process.pid, number)
        _, complaint = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, complaint) == (128 + number, "")


def test_a_worker_whose_demo_has_left_ends_without_a_word() -> None:
    """Ctrl-C while it does what it was told: there is nobody to answer."""
    with running() as daemon:
        environment = {**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint())}
        command = [sys.executable, "-m", "membroker.cli.demo.worker", "chat", "1GiB", ""]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, env=environment, text=True, **pipes) as worker:  # type: ignore[call-overload]
            assert json.loads(worker.stdout.readline()) == {"ready": True}
            worker.stdout.close()
            worker.stdin.write('{"do": "held"}\n')
            worker.stdin.close()
            assert (worker.stderr.read(), worker.wait(DEADLINE_SECONDS)) == ("", 0)


@pytest.mark.usefixtures("place", "forked")
@pytest.mark.parametrize(
    ("breakage", "disproved"),
    [
        ("copies", "weights of 64.0 MiB are charged 128.0 MiB"),
        ("misreads", "the two workers read different weights"),
        ("keeps", "a deleted segment's bytes did not become free"),
    ],
)
def test_it_fails_where_a_claim_of_its_sharing_does_not_hold(
    breakage: str, disproved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader that borrows a copy of its own, reads something else, or never lets go: each is noticed."""
    tell = demo.DemoWorker.tell

    def told(worker: demo.DemoWorker, do: str, **more: Any) -> dict[str, Any]:
        answer = {} if (breakage, do) == ("keeps", "let go") else tell(worker, do, **more)
        if (breakage, do) == ("copies", "attach"):
            tell(worker, "admit", request=1, pages=demo.WEIGHTS // demo.PAGE)
        return {"sum": id(answer)} if (breakage, do) == ("misreads", "sum") else answer

    monkeypatch.setattr(demo.DemoWorker, "tell", told)
    monkeypatch.setattr(demo_processes, "SOON_SECONDS", 1.5)
    assert demo.main() == 1
    assert f"the demo failed: {disproved}" in capsys.readouterr().err


def plays_only(scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out all other scenes."""
    scenes = {"_sharing", "_trade", "_burst", "_refusal", "_death_of_the_broker", "_death", "_sleep", "_scrape"}
    for name in scenes - {scene}:
        told = (0, 0) if name == "_death_of_the_broker" else 0
        monkeypatch.setattr(demo, name, lambda *_, told=told: told)


def fails(capsys: pytest.CaptureFixture[str], disproved: str) -> None:
    assert demo.main() == 1
    assert f"the demo failed: {disproved}" in " ".join(capsys.readouterr().err.split())


# --- the burst ---


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("breakage", "disproved"),
    [
        ("promises nothing", "an unused guarantee is not lent: the broker may lend 256.0 MiB of device memory"),
        ("is slow", "the memory was back only after"),
        ("wants more", "a burst within the guarantee was refused"),
        ("holds more", "batch holds 1 bytes, and is not charged just that"),
        ("is refused", "something was refused"),
    ],
)
def test_it_fails_where_a_claim_of_its_burst_does_not_hold(
    breakage: str, disproved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A borrower that answers no recalls, memory that comes late or not, books that are wrong, a refusal on the way."""
    plays_only("_burst", monkeypatch)
    tell = demo.DemoWorker.tell

    def told(worker: demo.DemoWorker, do: str, **more: Any) -> dict[str, Any]:
        if (breakage, do) == ("promises nothing", "answer recalls"):
            return {}
        if (breakage, do, worker.model) == ("wants more", "admit", "chat"):
            more["pages"] = demo.CAPACITY // demo.PAGE
        if (breakage, do) == ("is refused", "check"):
            assert "refused" in tell(worker, "admit", request=-1, pages=demo.CAPACITY // demo.PAGE)
        answer = tell(worker, do, **more)
        return {"held": 1} if (breakage, do) == ("holds more", "held") else answer

    monkeypatch.setattr(demo.DemoWorker, "tell", told)
    monkeypatch.setattr(demo_processes, "SOON_SECONDS", 1.5)
    if breakage == "is slow":
        monkeypatch.setattr(demo, "BURST_SECONDS", 0.0)
    fails(capsys, disproved)


# --- the guest ---


@pytest.mark.usefixtures("place", "forked")
@pytest.mark.parametrize(
    ("breakage", "disproved"),
    [
        ("changes", "the guest's memory is not what it was"),
        ("is silent", "the guest does not say why it sleeps"),
        ("ends", "paint does not answer"),
    ],
)
def test_it_fails_where_a_claim_of_its_guest_does_not_hold(
    breakage: str, disproved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plays_only("_sleep", monkeypatch)
    monkeypatch.setattr(demo, "GUEST", 160 << 20)  # no other has anything
    monkeypatch.setattr(demo_processes, "SOON_SECONDS", 1.5)
    checksum, answers = demo.DemoGuest.checksum, iter(range(2))

    def told(guest: demo.DemoGuest) -> int:
        if breakage == "ends":
            guest.process.kill()
            guest.process.wait()
        return checksum(guest) + (next(answers) if breakage == "changes" else 0)

    monkeypatch.setattr(demo.DemoGuest, "checksum", told)
    if breakage == "is silent":
        monkeypatch.setattr(demo.DemoBroker, "sleep_of", lambda *_: ("", ""))
    fails(capsys, disproved)


# --- the broker's death ---


@pytest.fixture
def only_the_brokers_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other scenes have nothing to do with it."""
    plays_only("_death_of_the_broker", monkeypatch)


def before_the_successor(monkeypatch: pytest.MonkeyPatch, happens: Callable[[Path], None]) -> None:
    """Let something happen to the dead daemon's directory `state/`."""
    start = demo.DemoBroker._start

    def started(broker: demo.DemoBroker) -> None:
        if broker.starts:
            happens(broker._root / "state")
        start(broker)

    monkeypatch.setattr(demo.DemoBroker, "_start", started)


@pytest.mark.usefixtures("place", "forked", "only_the_brokers_death")
class TestTheBrokersDeath:
    """Each of its claims can fail."""

    def test_a_successor_without_the_books(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before_the_successor(monkeypatch, lambda state: (state / "journal").unlink())
        fails(capsys, "chat: the broker at")

    def test_a_successor_without_the_keeper(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What the host driver knows of earlier extents is lost with it, and so are the weights."""
        before_the_successor(monkeypatch, lambda state: demo_processes._end_keeper(state / "fdstore.sock"))
        fails(capsys, "the device and the workers' memory differ")

    def test_no_successor(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def stays_away(broker: demo.DemoBroker) -> None:
            monkeypatch.setattr(demo_processes, "START_SECONDS", 0.1)
            broker._leaving.wait()

        monkeypatch.setattr(demo.DemoBroker, "_supervise", stays_away)
        fails(capsys, "the broker was killed, and no other was started in its place")

    @pytest.mark.parametrize(
        ("order", "change", "disproved"),
        [
            ("end work", {"rounds": 0}, "a worker stood still while no broker ran"),
            ("held", {"held": 78 << 20}, "chat holds 81788928 bytes, and is not charged just that"),
            ("sum", {"sum": -1}, "the weights changed with their broker"),
        ],
    )
    def test_a_worker_that_says_something_else(
        self,
        order: str,
        change: dict[str, int],
        disproved: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        tell, told = demo.DemoWorker.tell, list[str]()

        def lies(worker: demo.DemoWorker, do: str, **more: Any) -> dict[str, Any]:
            told.append(do)
            lied = do == order and "end work" in told
            return tell(worker, do, **more) | (change if lied else {})

        monkeypatch.setattr(demo.DemoWorker, "tell", lies)
        monkeypatch.setattr(demo_processes, "SOON_SECONDS", 1.5)
        fails(capsys, disproved)

    def test_a_daemon_that_dies_once_more(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It is started again, as systemd would, and everything goes on: that must not hide it."""

        def dies(stage: demo.Stage, *_: object) -> float:
            stage.broker.crash()
            return 0.0

        monkeypatch.setattr(demo, "_death", dies)
        fails(capsys, "a daemon ended by itself")
