"""transformers' continuous batching with an elastic KV cache on a real GPU: its tokens are the same.

A stray access would end the context, and an event that is looked at too early would let a page go under a kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from tests.support.gpu import on_gpu
from tests.support.gpu_work import torch_on_the_gpu
from tests.support.workers import ROOT

from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_the_tokens_are_the_same(mode: str, gpu: CudaDriver) -> None:
    """Bursts, rest, recalls amid steps and a tight limit: step by step, and with CUDA graphs and a step in flight."""
    if torch_on_the_gpu() is None or find_spec("transformers") is None:
        pytest.skip("PyTorch or transformers is not installed here, or sees no GPU")
    tenants = {"red": {}, "blue": {"guarantee": "96MiB"}}
    with on_gpu(gpu, {"capacity": "128MiB", "tenants": tenants, "recall_seconds": 30.0}) as daemon:
        command = [sys.executable, "-m", "tests.support.transformers_story"]
        done = subprocess.run(
            [*command, str(daemon.endpoint("red")), str(daemon.endpoint("blue")), mode],
            capture_output=True,
            text=True,
            timeout=550,
            check=False,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert (done.returncode, done.stdout) == (0, "the same tokens\n"), done.stderr[-8000:]
