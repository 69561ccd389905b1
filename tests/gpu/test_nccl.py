"""NCCL over borrowed memory on two GPUs: a table shows which settings work.

NVLink multicast stays off in all of it (NCCL_NVLS_ENABLE=0): it needs its own kind of memory, which an
imported extent is not.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.daemons import Daemon
from tests.support.gpu import on_gpu, until_lendable
from tests.support.sizes import GIB
from tests.support.workers import ROOT

from membroker.vmm import DriverUnavailable
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.usefixtures("gpu")]

State = Callable[[str, str], None]
SECONDS = 60
PROGRAM = ROOT / "tests" / "gpu" / "nccl_all_reduce.py"
BASE = {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN"}
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "NCCL_CUMEM_ENABLE=0": {"NCCL_CUMEM_ENABLE": "0"},
    "NCCL_P2P_DIRECT_DISABLE=1": {"NCCL_P2P_DIRECT_DISABLE": "1"},
    "NCCL_P2P_DISABLE=1": {"NCCL_P2P_DISABLE": "1"},
    "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    "NCCL_GRAPH_REGISTER=0": {"NCCL_GRAPH_REGISTER": "0"},
}


@pytest.fixture(scope="module", autouse=True)
def _torch_with_nccl() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    if not torch.version.cuda or not torch.distributed.is_nccl_available():
        pytest.skip("this PyTorch is built without NCCL")


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[Daemon]]:
    """A broker for each of two GPUs."""
    with ExitStack() as stack:
        gpus = []
        for number in range(2):
            try:
                gpus.append(CudaDriver(number))
            except DriverUnavailable as error:
                pytest.skip(f"NCCL between GPUs needs two of them: {error}")
            stack.callback(gpus[-1].close)
        yield [stack.enter_context(on_gpu(each, {"capacity": 4 * GIB}, back=False)) for each in gpus]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def outcome(daemons: list[Daemon], settings: Mapping[str, str], *options: str) -> str:
    """Run the program, with a process for each broker or one for all; return `works`, or what failed and where."""
    endpoints = [str(daemon.endpoint()) for daemon in daemons]
    ranks = 1 if "--one-process" in options else len(daemons)
    command = [sys.executable, str(PROGRAM), *options, *endpoints]
    env = {**os.environ, **BASE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **settings}
    with tempfile.TemporaryDirectory(prefix="mb-") as directory, ExitStack() as stack:
        started = []
        for rank in range(ranks):
            log = stack.enter_context(Path(directory, f"{rank}").open("w+"))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            process = subprocess.Popen(command, env={**env, **own}, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append((process, log))
        wait_for([process for process, _ in started])
        said = [told(process.wait(), Path(log.name)) for process, log in started]
    for daemon in daemons:
        until_lendable(daemon)
    failed = sorted({each for each in said if each != "works"})
    return " / ".join(failed) or "works"


def wait_for(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all to end. Once one has failed, the others get little time, since they wait for it."""
    end = time.monotonic() + SECONDS
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + 5)
        if time.monotonic() > end:
            for process in processes:
                process.kill()
            return
        time.sleep(0.05)


def told(status: int, log: Path) -> str:
    """Return how one process ended: its last step, and the last line that looks like a reason."""
    lines = log.read_text(errors="replace").splitlines()
    if status == 0 and "all done" in lines:
        return "works"
    print(*lines[-60:], sep="\n")
    at = next((line.removeprefix("doing ") for line in reversed(lines) if line.startswith("doing ")), "the beginning")
    reasons = [line.strip() for line in lines if "Error" in line or "NCCL WARN" in line or "wrong sum" in line]
    return f"fails at {at}: {(reasons or [f'status {status}'])[-1][:160]}"


def table(daemons: list[Daemon], state: State, what: str, *options: str) -> dict[str, str]:
    """Try every setting, and torch's own memory with those that fail, and report all results."""
    found = {}
    for name, settings in SETTINGS.items():
        found[name] = outcome(daemons, settings, *options)
        state(f"NCCL, {what}, {name}", found[name])
        if found[name] != "works":
            own = outcome(daemons, settings, *options, "--own")
            state(f"NCCL, {what}, {name}, in torch's own memory", own)
    return found


def test_one_rank_on_one_gpu(gpu: CudaDriver, state: State) -> None:
    """A group of one: NCCL takes borrowed memory, in one extent and in several, and in a captured graph."""
    with on_gpu(gpu, back=False) as daemon:
        found = outcome([daemon], {})
        state("NCCL, one rank alone, default", found)
        assert found == "works"


def test_a_rank_on_each_of_two_gpus(daemons: list[Daemon], state: State) -> None:
    found = table(daemons, state, "a process for each GPU")
    assert "works" in found.values(), found


def test_one_process_at_both_brokers(daemons: list[Daemon], state: State) -> None:
    """One process with two GPUs, and a session at each GPU's broker."""
    found = table(daemons, state, "one process with both GPUs", "--one-process")
    assert "works" in found.values(), found
