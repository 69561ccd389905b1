"""Tensors that move to a pool: the same objects, contents and sharing, and their memory comes and goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.fake_lender import PAGE, Lender

torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")

from membroker.adapters.torch import move_to_pool  # noqa: E402
from membroker.errors import InvalidRequest  # noqa: E402


@pytest.fixture
def lender() -> Iterator[Lender]:
    lender = Lender()
    yield lender
    lender.driver.close()
    lender.device.close()


def test_tensors_stay_what_they_are_and_their_memory_goes_and_comes(lender: Lender) -> None:
    """Parameters, one that is tied, a transposed view of a storage, an empty one, and several dtypes."""
    module = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300).to(torch.bfloat16))
    module[1].register_parameter("tied", module[0].weight)
    turned = torch.nn.Parameter(torch.arange(60_000.0).view(200, 300).t())
    beside = torch.nn.Parameter(turned.data.t()[:5])
    empty = torch.empty(0)
    tensors = [*module.parameters(), turned, beside, empty]
    before = [(one, one.clone(), one.stride()) for one in tensors]
    pool = move_to_pool(tensors, lender)
    assert lender.lent_bytes == PAGE
    for _ in range(2):
        addresses = [one.data_ptr() for one in tensors if one.numel()]
        assert all(pool.base_address <= one < pool.base_address + PAGE for one in addresses)
        assert all(one % 256 == 0 for one in addresses)
        assert module[1].tied is module[0].weight
        assert turned.data_ptr() == beside.data_ptr()
        for one, contents, stride in before:
            assert torch.equal(one, contents)
            assert one.stride() == stride
        assert pool.offload() == PAGE
        assert lender.lent_bytes == 0
        pool.restore()
        assert [one.data_ptr() for one in tensors if one.numel()] == addresses
    pool.close()


def test_a_second_reference_is_refused(lender: Lender) -> None:
    """It would keep a second copy in memory."""
    one = torch.ones(1000)
    alias = one.view(10, 100)
    with pytest.raises(InvalidRequest, match="1 of 1 weights are referred to twice"):
        move_to_pool([one], lender)
    assert torch.equal(alias, torch.ones(10, 100))
