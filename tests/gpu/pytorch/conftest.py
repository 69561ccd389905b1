"""A daemon that owns a part of a real GPU, for workers with PyTorch. Nothing else may use the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, running

from membroker.vmm import DriverUnavailable
from membroker.vmm.cuda.driver import CudaDriver


@pytest.fixture(scope="module", autouse=True)
def _a_gpu_and_torch() -> None:
    try:
        CudaDriver().close()
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA GPU to test on: {error}")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    if not torch.version.cuda:
        pytest.skip("this PyTorch is built without CUDA")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon that owns 4 GiB of the GPU, and 64 MiB of the host."""
    with running({"driver": "cuda", "capacity": "4GiB", "host_capacity": "64MiB"}) as found:
        (found.root,) = (found.directory / "run").glob("gpu-*")
        yield found


@pytest.fixture
def guaranteed() -> Iterator[Daemon]:
    """As `daemon`, and half of it is guaranteed to the tenant blue."""
    tenants = {"red": {}, "blue": {"guarantee": "2GiB"}}
    with running({"driver": "cuda", "capacity": "4GiB", "tenants": tenants, "recall_seconds": 30.0}) as found:
        (found.root,) = (found.directory / "run").glob("gpu-*")
        yield found
