"""What cannot be offloaded is refused before anything has changed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.client.pool.offload.pages import PAGES, pinned_bytes, sizes
from tests.support.fake_lender import PAGE, Lender

from membroker.errors import DeviceFailure, InvalidRequest, NotMapped
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm.driver import DriverError


def test_the_host_has_no_memory_to_pin(
    pool: VirtualMemoryPool, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second block is refused by the driver: the first is freed, and nothing is declared."""
    pin = lender.driver.pin

    def scarce(size: int) -> int:
        if pinned_bytes(lender):
            raise DriverError("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY", 2)
        return pin(size)

    monkeypatch.setattr(lender.driver, "pin", scarce)
    pool.allocate(0, 6 * PAGE)
    with pytest.raises(DeviceFailure, match="cuMemHostRegister"):
        pool.offload()
    assert sizes(pool) == (6, 0)
    assert lender.declared_bytes == pinned_bytes(lender) == 0


def test_a_pool_of_the_hosts_memory(lender: Lender) -> None:
    with VirtualMemoryPool(lender, PAGES * PAGE, PAGE, location="host") as pool:
        pool.allocate(0, PAGE)
        with pytest.raises(InvalidRequest):
            pool.offload()


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (PAGES * PAGE, None), (0, PAGES * PAGE + 1), (0, 0)])
def test_ranges_outside(pool: VirtualMemoryPool, offset: int, size: int | None) -> None:
    for call in (pool.offload, pool.restore):
        with pytest.raises(InvalidRequest):
            call(offset, size)


@pytest.mark.parametrize(("words", "message"), [({"progress": True}, "progress"), ({"to": "llama/kv"}, "'llama/kv'")])
def test_words_that_are_none(pool: VirtualMemoryPool, words: dict[str, Any], message: str) -> None:
    """As other libraries take them: a bar that is to be shown, a segment by its name. Nothing is copied."""
    pool.allocate(0, 4 * PAGE)
    with pytest.raises(InvalidRequest, match=message):
        pool.offload(**words)
    assert sizes(pool) == (4, 0)
    segment = words.get("to", "llama/kv")
    with pytest.raises(InvalidRequest, match=message):
        pool.restore_from(segment, progress=words.get("progress"))


def test_another_call_is_at_a_page(pool: VirtualMemoryPool, lender: Lender) -> None:
    """While one thread offloads, no other takes its pages away, brings them back, or offloads them again."""
    pool.allocate(0, 8 * PAGE)
    refused: list[str] = []

    def disturb(done: int, total: int) -> None:
        for call in (pool.offload, pool.restore, lambda: pool.deallocate(0, 8 * PAGE), lambda: pool.view(0, 1)):
            try:
                call()
            except NotMapped as error:
                refused.append(str(error))

    pool.offload(progress=disturb)
    assert len(refused) == 4 * 4 - 1  # when the last chunk has gone there is nothing left to offload
    assert all("another call" in told or "is offloaded" in told for told in refused)
    assert sizes(pool) == (0, 8)
