"""How the daemon starts on a real GPU: without a context, and with the GPU that `membroker doctor` finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.support.daemons import until
from tests.support.gpu import at_rest, borrow, enter, on_gpu, until_lendable, used
from tests.support.sizes import GIB, MIB
from tests.support.workers import worker

from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), pytest.mark.usefixtures("gpu")]

State = Callable[[str, str], None]
WITHOUT_CONTEXT = 5 * MIB


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


def test_the_doctor_finds_the_gpu(gpu: CudaDriver) -> None:
    """`membroker doctor` says which GPU a daemon would own. Its status depends on what else it finds."""
    done = subprocess.run(
        [sys.executable, "-m", "membroker.cli.main", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "MEMBROKER_ENDPOINT": ""},
        check=False,
    )
    (row,) = [each for each in json.loads(done.stdout) if each["name"] == "gpu"]
    assert row["status"] == "ok", row
    assert gpu.device.uuid in row["found"]
