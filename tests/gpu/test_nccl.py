"""NCCL over borrowed memory on one GPU and on two, with its own settings.

NVLink multicast stays off in all of it (NCCL_NVLS_ENABLE=0): it needs its own kind of memory, which an
imported extent is not.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from subprocess import PIPE, STDOUT

import pytest
from tests.support.daemons import Daemon
from tests.support.gpu import on_gpu, until_lendable
from tests.support.sizes import GIB
from tests.support.workers import ROOT

from membroker.vmm import DriverUnavailable
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.usefixtures("gpu")]

PROGRAM = ROOT / "tests" / "gpu" / "nccl_all_reduce.py"


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


def all_reduce(daemons: list[Daemon], *options: str) -> None:
    """Run the program, with a process for each broker or one for all; each must say that all is done."""
    ranks = 1 if "--one-process" in options else len(daemons)
    command = [sys.executable, str(PROGRAM), *options, *(str(daemon.endpoint()) for daemon in daemons)]
    env = {**os.environ, "NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    with ExitStack() as stack:
        started = []
        for rank in range(ranks):
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = stack.enter_context(
                subprocess.Popen(command, env=own, stdout=PIPE, stderr=STDOUT, cwd=ROOT, text=True)
            )
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            said, _ = process.communicate(timeout=60)
            assert (process.returncode, "all done" in said.splitlines()) == (0, True), said
    for daemon in daemons:
        until_lendable(daemon)


def test_one_rank_on_one_gpu(gpu: CudaDriver) -> None:
    """A group of one: NCCL takes borrowed memory, in one extent and in several, and in a captured graph."""
    with on_gpu(gpu, back=False) as daemon:
        all_reduce([daemon])


def test_a_rank_on_each_of_two_gpus(daemons: list[Daemon]) -> None:
    all_reduce(daemons)


def test_one_process_at_both_brokers(daemons: list[Daemon]) -> None:
    all_reduce(daemons, "--one-process")
