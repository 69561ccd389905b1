"""The main stories with workers under an MPS daemon of their own: a table shows what works.

Under MPS the workers' contexts are in a server process, so the server decides which process owns memory and when it
is freed.
membroker promises nothing about that yet: a story that fails is reported, and the test is an expected failure.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.daemons import Daemon, until
from tests.support.gpu import (
    SLACK,
    at_rest,
    borrow,
    enter,
    kill_and_time,
    milliseconds,
    on_gpu,
    still_has,
    until_lendable,
    used,
)
from tests.support.sizes import GIB, MIB
from tests.support.workers import Worker, proc_of

from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("gpu")]

State = Callable[[str, str], None]
Start = Callable[[], Worker]
CONTROL = "nvidia-cuda-mps-control"
PLACES = (os.environ.get("PATH", ""), "/usr/local/nvidia/bin", "/usr/bin", "/usr/local/cuda/bin")


class Mps:
    """An MPS control daemon with its pipes in a directory of its own."""

    def __init__(self, control: str, directory: Path) -> None:
        self._control = control
        self.directory = directory
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(directory / "log"),
            "PATH": os.pathsep.join([str(Path(control).parent), os.environ.get("PATH", "")]),
        }
        for name in ("pipe", "log"):
            (directory / name).mkdir()

    def start(self) -> str:
        """Start it, and return its output if that failed."""
        return "" if self._run(["-d"]) == 0 else self.said()

    def ask(self, line: str) -> str:
        self._run([], line + "\n")
        return self._answer.read_text(errors="replace").strip()

    def said(self) -> str:
        """Return the last lines that it wrote anywhere."""
        texts = [path.read_text(errors="replace") for path in sorted(self.directory.rglob("*")) if path.is_file()]
        return " | ".join(" ".join(texts).splitlines()[-4:])

    def stop(self) -> None:
        """Ask it to quit, and kill what does not exit."""
        pids = [int(word) for word in self.ask("get_server_list").split() if word.isdigit()]
        with suppress(OSError, ValueError):
            pids.append(int((self.directory / "pipe" / f"{CONTROL}.pid").read_text()))
        with suppress(subprocess.TimeoutExpired):
            self._run([], "quit -t 5\n")
        for pid in pids:
            with suppress(AssertionError):
                until(lambda pid=pid: not self._is_ours(pid), 10)
            if self._is_ours(pid):
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _is_ours(pid: int) -> bool:
        return "nvidia-cuda-mps" in proc_of(pid, "cmdline")

    @property
    def _answer(self) -> Path:
        return self.directory / "answer"

    def _run(self, arguments: list[str], line: str = "") -> int:
        # A file, not a pipe: the daemon that stays would keep a pipe open.
        asked = self.directory / "asked"
        asked.write_text(line)
        with asked.open("rb") as given, self._answer.open("wb") as answer:
            done = subprocess.run(
                [self._control, *arguments],
                stdin=given,
                stdout=answer,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                timeout=30,
                check=False,
            )
        return done.returncode


@pytest.fixture
def mps() -> Iterator[Mps]:
    """A running MPS control daemon, or a skip with the reason."""
    control = shutil.which(CONTROL, path=os.pathsep.join(PLACES))
    if control is None:
        pytest.skip(f"there is no {CONTROL} on this machine")
    directory = Path(tempfile.mkdtemp(prefix="mps-"))
    try:
        one = Mps(control, directory)
        try:
            failed = one.start()
        except (OSError, subprocess.TimeoutExpired) as error:
            failed = repr(error)
        if failed:
            pytest.skip(f"MPS does not start on this machine: {failed}")
        try:
            yield one
        finally:
            one.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_the_main_stories_with_workers_under_mps(gpu: CudaDriver, mps: Mps, state: State) -> None:
    """Workers compute through the MPS server, and the daemon does not know about it."""
    everybody: list[Worker] = []

    def start() -> Worker:
        everybody.append(Worker(environment=mps.environment))
        return everybody[-1]

    try:
        first = start()
        try:
            device = gpu.device.uuid
            first.do(f"import membroker.vmm; driver = membroker.vmm.open_driver('cuda', {device!r}, context=True)")
            first.do("from tests.support.gpu_work import *; warm_up(driver)")
        except Exception as error:  # noqa: BLE001 - any error means that MPS is not usable here
            pytest.skip(f"no worker gets a context under MPS on this machine: {error}; {mps.said()}")
        state("MPS, servers", mps.ask("get_server_list") or "none: the workers are not under MPS")
        with on_gpu(gpu, {"settle_seconds": 5.0}, back=False) as daemon:
            outcomes = {name: outcome(story, gpu, daemon, start) for name, story in STORIES.items()}
            for name, found in outcomes.items():
                state(f"MPS, {name}", found)
            for each in everybody:
                each.close()
            until_lendable(daemon)
    finally:
        for each in everybody:
            each.close()
    failed = {name: found for name, found in outcomes.items() if not found.startswith("works")}
    if failed:
        pytest.xfail(f"under MPS: {failed}")


def outcome(story: Callable[[CudaDriver, Daemon, Start], str], gpu: CudaDriver, daemon: Daemon, start: Start) -> str:
    """Run a story and return its outcome; the workers of a failed story are killed."""
    mine: list[Worker] = []

    def start_mine() -> Worker:
        mine.append(start())
        return mine[-1]

    try:
        told = story(gpu, daemon, start_mine)
    except Exception as error:  # noqa: BLE001 - this is the result
        return f"fails: {type(error).__name__}: {str(error)[:200]}"
    else:
        return f"works{told}"
    finally:
        for each in mine:
            if each.process.poll() is None:
                each.kill()
        with suppress(AssertionError):
            until_lendable(daemon)


def sharing(gpu: CudaDriver, daemon: Daemon, start: Start) -> str:
    red, blue = enter(start(), daemon), enter(start(), daemon, "blue")
    borrow(red, GIB, 1)
    borrow(blue, GIB, 2)
    assert still_has(red, GIB, 1)
    assert still_has(blue, GIB, 2)
    assert red.refused("pool.grow('4GiB')").reason == "CAPACITY"
    red.do("pool.free(0, GIB)")
    until(lambda: daemon.books().lent_bytes == GIB)
    blue.do("pool.grow('1GiB')")
    assert blue.ask("holds(driver, pool.base_address + GIB, GIB, 0)"), "the memory was not zeroed"
    return ""


def death(gpu: CudaDriver, daemon: Daemon, start: Start) -> str:
    other, left, size = enter(start(), daemon, "blue"), 256 * MIB, 2 * GIB
    borrow(other, left, 9)
    times = []
    for _ in range(2):
        one = enter(start(), daemon)
        borrow(one, size)
        held, said = at_rest(lambda: used(gpu)), len(daemon.log())
        times.append(kill_and_time(one, daemon, left))
        assert "proven=false" not in daemon.log()[said:], (
            "credited by the time limit, not because the GPU showed it free"
        )
        assert used(gpu) <= held - size + SLACK
        assert still_has(other, left, 9), "another worker's memory changed"
    return f": {milliseconds(times)} from SIGKILL until lendable"


def death_alone(gpu: CudaDriver, daemon: Daemon, start: Start) -> str:
    one = enter(start(), daemon)
    borrow(one, GIB)
    return f": {milliseconds([kill_and_time(one, daemon)])} from SIGKILL until lendable"


def forked_child(gpu: CudaDriver, daemon: Daemon, start: Start) -> str:
    one, size = enter(start(), daemon), GIB
    borrow(one, size)
    held = at_rest(lambda: used(gpu))
    child = one.ask("fork_unseen()")
    try:
        one.kill()
        until_lendable(daemon)
        kept = at_rest(lambda: used(gpu)) >= held - size + SLACK
    finally:
        os.kill(child, signal.SIGKILL)
    return ": the child keeps the memory" if kept else ": the child keeps nothing"


def segment(gpu: CudaDriver, daemon: Daemon, start: Start) -> str:
    writer, reader = enter(start(), daemon), enter(start(), daemon)
    writer.do(f"segment = model.create_segment('weights', {512 * MIB}); write_blocks(segment, 3); segment.seal()")
    reader.do("segment = client.attach('m/weights')")
    assert reader.ask("digest(segment, driver)") == writer.ask("digest(segment, driver)")
    writer.kill()
    reader.do("assert segment.read(64 * MIB, 8) == (64 * MIB).to_bytes(8, 'little')")
    reader.do("segment.delete(); segment.close()")
    return ""


STORIES: Mapping[str, Callable[[CudaDriver, Daemon, Start], str]] = {
    "two tenants and a limit": sharing,
    "SIGKILL of a worker": death_alone,
    "SIGKILL of a worker beside another": death,
    "a forked child of a dead worker": forked_child,
    "a segment": segment,
}
