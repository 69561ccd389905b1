"""How the daemon starts on a real GPU: its memory, its checks, what it reports about the GPU, and its errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.gpu import at_rest, borrow, enter, nvidia_descriptors, on_gpu, run, until_lendable, used
from tests.support.sizes import GIB, MIB
from tests.support.workers import worker

from membroker.vmm import Location
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), pytest.mark.usefixtures("gpu")]

State = Callable[[str, str], None]
DAEMON, COMMAND = "membrokerd.cli", "membroker.cli.main"
HEADROOM = 2 * GIB
"""What a daemon keeps of a GPU by default."""
WITHOUT_CONTEXT = 5 * MIB


@contextmanager
def a_runtime_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        yield Path(directory)


def refuse_to_start(*arguments: str, **environment: str) -> str:
    """Run a membrokerd on the CUDA driver that must not start, and return its error."""
    with a_runtime_directory() as directory:
        own = ("--driver", "cuda", "--runtime-directory", str(directory), "--metrics-port", "0")
        done = run(DAEMON, *own, *arguments, status=1, **environment)
        assert not [*directory.rglob("*.sock")]
    (said,) = done.stderr.strip().splitlines()
    assert said.startswith("membrokerd: ")
    return said


def test_it_starts_without_a_context(gpu: CudaDriver, state: State) -> None:
    """NVML shows at most 5 MiB for it: at its start, while it lends, and afterwards. A context would be 518 MiB."""
    before = at_rest(lambda: used(gpu))
    with on_gpu(gpu) as daemon, worker() as one:

        def share() -> int:
            return dict(gpu.processes()).get(daemon.process.pid, 0)

        cost = at_rest(lambda: used(gpu)) - before
        assert share() <= WITHOUT_CONTEXT
        assert cost <= WITHOUT_CONTEXT + gpu.device.granularity, f"the start takes {cost >> 20} MiB of the GPU"
        enter(one, daemon)
        borrow(one, GIB)
        assert share() <= WITHOUT_CONTEXT
        seen = one.pid in dict(gpu.processes())
        one.do("segment = model.create_segment('s', '64MiB'); segment.seal(); segment.delete(); client.close()")
        until_lendable(daemon)
        assert share() <= WITHOUT_CONTEXT
        one.kill()
        until(lambda: used(gpu) - before <= WITHOUT_CONTEXT + gpu.device.granularity)
    state("what a daemon takes of the GPU, its anchor included", f"{cost / MIB:.1f} MiB")
    state("NVML names this machine's processes by their pids", "yes" if seen else "no: it is told other pids")


def test_its_anchor_is_one_granule_that_stays_exported(gpu: CudaDriver) -> None:
    """One create, export and import at the start, and one descriptor of the GPU's memory that it keeps."""
    with on_gpu(gpu) as daemon:
        device = daemon.device()
        assert device.locations[0].lent_bytes == 0
        assert re.search(r"^membroker_memory_descriptors_open\{.*\} 1\.0$", daemon.metrics(), re.MULTILINE)
        assert nvidia_descriptors(daemon.process.pid), "it has no descriptor of the GPU open"
        with worker() as one:
            enter(one, daemon)
            one.do("[model.allocate('64MiB').close() for _ in range(8)]; client.close()")
        until_lendable(daemon)
        assert re.search(r"^membroker_memory_descriptors_open\{.*\} 1\.0$", daemon.metrics(), re.MULTILINE)


def test_a_hidden_gpu_is_told_in_a_sentence() -> None:
    """CUDA_VISIBLE_DEVICES is empty: for CUDA the machine has no GPU. With `auto` the daemon uses the host driver."""
    said = refuse_to_start(CUDA_VISIBLE_DEVICES="")
    assert "CUDA_ERROR_NO_DEVICE" in said
    with a_runtime_directory() as directory, by_command(directory, "", CUDA_VISIBLE_DEVICES="") as status:
        assert (status["driver"], status["uuid"]) == ("host", "host")


@pytest.mark.parametrize("headroom", [None, "10GiB"])
def test_the_capacity_is_the_gpus_total_less_headroom_and_anchor(gpu: CudaDriver, headroom: str | None) -> None:
    """The capacity in `status`, with the default headroom and with a configured one."""
    memory, granule = gpu.memory(Location.DEVICE), gpu.device.granularity
    assert memory is not None
    kept = HEADROOM if headroom is None else 10 * GIB
    text = 'driver = "cuda"' + (f'\nheadroom = "{headroom}"' if headroom else "")
    with a_runtime_directory() as directory, by_command(directory, text) as status:
        books = status["locations"]["device"]
    assert books["capacity_bytes"] == (memory.total - kept - granule) // granule * granule
    assert (books["headroom_bytes"], books["device_total_bytes"]) == (kept, memory.total)


@contextmanager
def by_command(directory: Path, text: str, **environment: str) -> Iterator[dict[str, Any]]:
    """Run a daemon by its command line alone, and yield what `membroker status --json` shows."""
    config, log = directory / "c.toml", directory / "log"
    config.write_text(f'{text}\nruntime_directory = "{directory}"\n[metrics]\nport = 0\n')
    env = {**os.environ, **environment}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", DAEMON, "--config", str(config)], stderr=file, stdout=file, env=env
        )
    try:
        until(lambda: " ready " in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        (admin,) = (one for one in directory.glob("*/admin") if not one.parent.is_symlink())  # the number is a link
        yield json.loads(run(COMMAND, "status", "--admin", "--endpoint", str(admin), "--json").stdout)
        process.terminate()
        assert process.wait(DEADLINE_SECONDS) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_doctor_finds_the_gpu(gpu: CudaDriver) -> None:
    """`membroker doctor` says which GPU a daemon would own. Its status depends on what else it finds."""
    done = subprocess.run(
        [sys.executable, "-m", COMMAND, "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "MEMBROKER_ENDPOINT": ""},
        check=False,
    )
    (row,) = [each for each in json.loads(done.stdout) if each["name"] == "gpu"]
    assert row["status"] == "ok", row
    assert gpu.device.uuid in row["found"]
