"""`membroker demo`: it proves what it says, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.template import run as run_python

from membroker.cli.demo import processes as demo_processes

pytestmark = pytest.mark.deep

PATIENT_SECONDS = 100.0
"""What a burst may take here. The demo's own bound is a claim about a machine that has nothing else to do."""
PATIENT = (
    f"from membroker.cli.demo import scenes; scenes.BURST_SECONDS = {PATIENT_SECONDS}; "
    "import sys; from membroker.cli.main import main; sys.exit(main(['demo']))"
)

STANDING = (
    "import signal, sys; from membroker.cli.demo import scenes; from membroker.cli.main import main; "
    "scenes.Stage.show_moment = lambda stage: signal.pause(); sys.exit(main(['demo']))"
)
"""It stays in its first scene until a signal comes."""


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
    titles = ("Sharing:", "Trade:", "Burst:", "Refusal:", "Death: a broker", "Death: a worker", "Sleep:", "Proved:")
    assert sorted(titles, key=out.index) == list(titles)
    said = re.search(
        r"For (\d+) ms no broker ran: in that time red computed (\d+) rounds, blue (\d+)\..* and (\d+) ms after", out
    )
    assert said is not None, out
    without, red, blue, away = map(int, said.groups())
    assert min(red, blue) > 0
    # Half of the pause before a successor is started: so long there was surely none.
    assert min(without, away) > demo_processes.RESTART_SECONDS * 500
    assert "right to the byte: red holds 80.0 MiB, blue 144.0 MiB" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order(place: Path, number: signal.Signals) -> None:
    """Ctrl-C, `timeout`, and a terminal that is closed. What is left behind is the fixture's to see."""
    with subprocess.Popen(
        [sys.executable, "-c", STANDING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert any(line.startswith("Sharing:") for line in process.stdout)
        assert len(processes_of(place)) == 6, "itself, a daemon and its keeper, three workers"
        os.killpg(process.pid, number)
        _, complaint = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, complaint) == (128 + number, "")
