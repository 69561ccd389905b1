"""Growable buffers and sparse arrays on a real GPU: what stays is not touched, also while a kernel uses it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.sizes import PAGE

from membroker.dlpack import export
from membroker.model import Model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LONG_CYCLES = 400_000_000
"""What torch's sleeping kernel is given: some 200 ms on an H200."""


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is installed here without CUDA")
    return torch


def warm_up(torch: Any, tensor: Any) -> None:
    """Load the kernels: the first launch of each waits for all that runs."""
    torch.cuda._sleep(1)
    tensor.add_(0)
    torch.cuda.synchronize()


class TestGrowableBuffer:
    def test_it_grows_beside_a_kernel(self, model: Model, torch: Any) -> None:
        """A kernel works on the beginning while the end grows: it does not wait, and no byte is lost."""
        with model.growable_buffer(PAGE, "1GiB", PAGE) as buffer:
            first = torch.from_dlpack(export(buffer, (PAGE // 4,), "F32"))
            warm_up(torch, first)
            torch.cuda._sleep(LONG_CYCLES)
            first.add_(1)
            buffer.resize(64 * PAGE)
            every = torch.from_dlpack(export(buffer, (16 * PAGE,), "F32"))
            every.add_(1)
            assert (first.double().sum().item(), every.double().sum().item()) == (PAGE // 2, PAGE // 4 + 16 * PAGE)
            del first, every
