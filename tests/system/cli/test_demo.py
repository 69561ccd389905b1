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
PATIENT_SECONDS = 100.0
"""What a burst may take here. The demo's own bound is a claim about a machine that has nothing else to do."""
PATIENT = (
    f"from membroker.cli.demo import scenes; scenes.BURST_SECONDS = {PATIENT_SECONDS}; "
    "import sys; from membroker.cli.main import main; sys.exit(main(['demo']))"
)


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
    done = subprocess.run([sys.executable, "-c", PATIENT], capture_output=True, text=True)
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


SCENES = {"_sharing", "_trade", "_burst", "_refusal", "_death_of_the_broker", "_death", "_sleep", "_scrape"}
DISPROVED = {
    "_sharing": {
        "a reader borrows a copy": "weights of 64.0 MiB are charged 128.0 MiB",
        "a reader reads something else": "the two workers read different weights",
        "a reader never lets go": "a deleted segment's bytes did not become free",
    },
    "_burst": {
        "the borrower answers no recalls": "an unused guarantee is not lent: the broker may lend 256.0 MiB of device",
        "the memory comes late": "the memory was back only after",
        "the burst wants more": "a burst within the guarantee was refused",
        "the books are wrong": "batch holds 1 bytes, and is not charged just that",
        "something is refused": "something was refused",
    },
    "_sleep": {
        "the guest changes": "the guest's memory is not what it was",
        "the guest is silent": "the guest does not say why it sleeps",
        "the guest ends": "paint does not answer",
    },
    "_death_of_the_broker": {
        "the successor has no books": "chat: the broker at",
        # What the host driver knows of earlier extents is lost with it, and so are the weights.
        "the successor has no keeper": "the device and the workers' memory differ",
        "there is no successor": "the broker was killed, and no other was started in its place",
        "a worker stands still": "a worker stood still while no broker ran",
        "a worker holds less": "chat holds 81788928 bytes, and is not charged just that",
        "the weights change": "the weights changed with their broker",
        # It is started again, as systemd would, and everything goes on: that must not hide it.
        "a daemon dies once more": "a daemon ended by itself",
    },
}


def lies(breakage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker do something else than it is told, or say so."""
    real, orders = demo.DemoWorker.tell, list[str]()

    def tell(worker: demo.DemoWorker, do: str, **more: Any) -> dict[str, Any]:
        orders.append(do)
        match breakage, do:
            case ("a reader never lets go", "let go") | ("the borrower answers no recalls", "answer recalls"):
                return {}
            case "a reader borrows a copy", "attach":
                real(worker, "admit", request=1, pages=demo.WEIGHTS // demo.PAGE)
            case "the burst wants more", "admit" if worker.model == "chat":
                more["pages"] = demo.CAPACITY // demo.PAGE
            case "something is refused", "check":
                assert "refused" in real(worker, "admit", request=-1, pages=demo.CAPACITY // demo.PAGE)
        answer = real(worker, do, **more)
        match breakage, do:
            case "a reader reads something else", "sum":
                return {"sum": id(answer)}
            case "the books are wrong", "held":
                return {"held": 1}
            case "a worker stands still", "end work":
                return answer | {"rounds": 0}
            case "a worker holds less", "held" if "end work" in orders:
                return answer | {"held": 78 << 20}
            case "the weights change", "sum" if "end work" in orders:
                return answer | {"sum": -1}
        return answer

    monkeypatch.setattr(demo.DemoWorker, "tell", tell)
    monkeypatch.setattr(demo, "BURST_SECONDS", 0.0 if breakage == "the memory comes late" else PATIENT_SECONDS)


def changes_the_guest(breakage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "GUEST", 160 << 20)  # no other has anything
    checksum, answers = demo.DemoGuest.checksum, iter(range(2))

    def told(guest: demo.DemoGuest) -> int:
        if breakage == "the guest ends":
            guest.process.kill()
            guest.process.wait()
        return checksum(guest) + (next(answers) if breakage == "the guest changes" else 0)

    monkeypatch.setattr(demo.DemoGuest, "checksum", told)
    if breakage == "the guest is silent":
        monkeypatch.setattr(demo.DemoBroker, "sleep_of", lambda *_: ("", ""))


def changes_the_successor(breakage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = demo.DemoBroker._start

    def started(broker: demo.DemoBroker) -> None:
        state = broker._root / "state"
        if broker.starts and breakage == "the successor has no books":
            (state / "journal").unlink()
        if broker.starts and breakage == "the successor has no keeper":
            demo_processes._end_keeper(state / "fdstore.sock")
        start(broker)

    def stays_away(broker: demo.DemoBroker) -> None:
        monkeypatch.setattr(demo_processes, "START_SECONDS", 0.1)
        broker._leaving.wait()

    def dies(stage: demo.Stage, *_: object) -> float:
        stage.broker.crash()
        return 0.0

    monkeypatch.setattr(demo.DemoBroker, "_start", started)
    if breakage == "there is no successor":
        monkeypatch.setattr(demo.DemoBroker, "_supervise", stays_away)
    if breakage == "a daemon dies once more":
        monkeypatch.setattr(demo, "_death", dies)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("scene", "breakage"), [(scene, one) for scene, those in DISPROVED.items() for one in those])
def test_it_fails_where_a_claim_does_not_hold(
    scene: str,
    breakage: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """One scene alone is played, and what it shows is made untrue: it is noticed."""
    if scene != "_burst":
        request.getfixturevalue("forked")
    for name in SCENES - {scene}:
        told = (0, 0) if name == "_death_of_the_broker" else 0
        monkeypatch.setattr(demo, name, lambda *_, told=told: told)
    wait = demo_processes.claim_soon

    def claim_soon(holds: Callable[[], bool], what: str, *show: Callable[[], None]) -> None:
        """The demo waits a moment for what can never hold, and on a busy machine as long as it takes for all else."""
        never = " ".join(what.split()).startswith(DISPROVED[scene][breakage])
        monkeypatch.setattr(demo_processes, "SOON_SECONDS", 0.5 if never else DEADLINE_SECONDS)
        wait(holds, what, *show)

    monkeypatch.setattr(demo, "claim_soon", claim_soon)
    monkeypatch.setattr(demo_processes, "claim_soon", claim_soon)
    for change in (lies, changes_the_guest, changes_the_successor):
        change(breakage, monkeypatch)
    assert demo.main() == 1
    assert f"the demo failed: {DISPROVED[scene][breakage]}" in " ".join(capsys.readouterr().err.split())
