"""A daemon that owns a part of a real GPU, for workers with PyTorch. Nothing else may use the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, find_root, running

from membroker.vmm.cuda.driver import CudaDriver


@pytest.fixture(scope="module", autouse=True)
def _a_gpu_and_torch(gpu: CudaDriver) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    if not torch.version.cuda:
        pytest.skip("this PyTorch is built without CUDA")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon that owns 4 GiB of the GPU, and 64 MiB of the host."""
    with running({"driver": "cuda", "capacity": "4GiB", "host_capacity": "64MiB"}) as found:
        yield find_root(found)


@pytest.fixture
def guaranteed() -> Iterator[Daemon]:
    """As `daemon`, and half of it is guaranteed to the tenant blue."""
    tenants = {"red": {}, "blue": {"guarantee": "2GiB"}}
    with running({"driver": "cuda", "capacity": "4GiB", "tenants": tenants, "recall_seconds": 30.0}) as found:
        yield find_root(found)
