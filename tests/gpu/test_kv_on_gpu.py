"""An elastic KV cache on a real GPU: a small engine serves from it, and its tokens are the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.gpu import on_gpu
from tests.support.gpu_work import torch_on_the_gpu

from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ENGINE = Path(__file__).parents[1] / "support" / "small_engine.py"


def test_two_engines_in_turn(gpu: CudaDriver) -> None:
    """Events are the fences, and kernels run while pages come and go. A stray access would end the context."""
    if torch_on_the_gpu() is None:
        pytest.skip("PyTorch is not installed here, or sees no GPU")
    with on_gpu(gpu, {"capacity": "32MiB"}) as daemon:
        environment = {**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint())}
        done = subprocess.run(
            [sys.executable, str(ENGINE)], capture_output=True, text=True, timeout=200, check=False, env=environment
        )
        assert (done.returncode, done.stderr) == (0, "")
        found = re.findall(r"^(\w+): the same tokens: True; it borrowed ", done.stdout, re.MULTILINE)
        assert found == ["first", "second", "first", "second"], done.stdout
