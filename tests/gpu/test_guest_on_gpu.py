"""`membroker run --guest` on a real GPU: PyTorch programs that know nothing of membroker are suspended and restored."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.support.daemons import Daemon, until
from tests.support.gpu import CAPACITY, at_rest, near, on_gpu, used
from tests.support.sizes import GIB
from tests.system.cli.test_guest import Guest

from membroker.cli import main as cli
from membroker.vmm.cuda.driver import CudaDriver

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("gpu")]

NUMBERS = GIB // 4
"""What a program has on the GPU: 2 GiB of numbers whose sum it knows. With its context it uses less than 3 GiB."""
PROGRAM = f"""
import os, sys, torch
numbers = torch.arange({NUMBERS}, device="cuda")
graph, total = torch.cuda.CUDAGraph(), numbers.sum()
with torch.cuda.graph(graph):
    torch.sum(numbers, 0, out=total)
print("ready", os.getpid(), flush=True)
for line in sys.stdin:
    if line.startswith("exit"):
        sys.exit(int(line.split()[1]))
    graph.replay()
    is_right = int(total) == int(numbers.sum()) == {NUMBERS * (NUMBERS - 1) // 2}
    print("alive" if is_right else "wrong", flush=True)
"""
CONFIG: dict[str, Any] = {"tenants": {"red": {}}, "slice_seconds": 0.3, "recall_seconds": 600.0}


@contextmanager
def guests(gpu: CudaDriver) -> Iterator[Daemon]:
    """A daemon that lends 4 GiB: two of the programs do not fit."""
    with on_gpu(gpu, CONFIG) as daemon:
        yield daemon
        until(lambda: daemon.books().lent_bytes == 0)


def program(daemon: Daemon, model: str) -> Guest:
    return Guest(daemon, model, "--memory", "3GiB", program=[sys.executable, "-c", PROGRAM])


def test_two_programs_that_do_not_fit_take_turns(gpu: CudaDriver) -> None:
    """Their numbers and CUDA graphs are right after each turn, and what is lent is never above the capacity."""
    with guests(gpu) as daemon, program(daemon, "one") as one:
        one.ready()
        with program(daemon, "two") as two:
            two.ready()
            for _ in range(3):
                one.is_right()
                two.is_right()
                assert daemon.books().lent_bytes <= CAPACITY
            assert (one.end(), two.end()) == (7, 7)


def test_asleep_it_has_nothing_on_the_gpu(gpu: CudaDriver) -> None:
    """Its context is gone, too; and so is all of it when its command is killed while it sleeps."""
    with guests(gpu) as daemon:
        before = at_rest(lambda: used(gpu))
        with program(daemon, "one") as one:
            one.ready()
            assert used(gpu) >= before + 2 * GIB
            one.sleeps()
            until(lambda: near(used(gpu), before))
            assert cli.main(["wake", "one", "--endpoint", str(daemon.admin)]) == 0
            one.is_right()
            one.sleeps()
            one.process.kill()
            until(lambda: near(used(gpu), before))
