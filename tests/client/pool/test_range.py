"""What an allocation of a pool returns: an int, the address, that knows the rest of the allocation."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable

import pytest
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect

from membroker.errors import InvalidRequest, NotMapped
from membroker.ext import PoolRange
from membroker.pool.pool import VirtualMemoryPool

WAYS: dict[str, Callable[[VirtualMemoryPool], PoolRange]] = {
    "allocate": lambda pool: pool.allocate(3 * PAGE + 8, "1MiB"),
    "allocate_anywhere": lambda pool: pool.allocate_anywhere("1MiB", 4 * PAGE),
    "grow": lambda pool: pool.grow("1MiB"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
class TestFacts:
    """The same for each call that allocates."""

    def test_it_knows_where_it_is(self, pool: VirtualMemoryPool, way: Callable[[VirtualMemoryPool], PoolRange]) -> None:
        """No program computes `address - pool.base_address`."""
        pool.allocate(0, PAGE)
        made = way(pool)
        assert made.address == made == pool.base_address + made.offset
        assert made.nbytes == 1 << 20
        assert pool.is_mapped(made.offset, made.nbytes)
        assert repr(made) == f"<membroker PoolRange of 1.0 MiB at {made:#x}, offset {made.offset}>"

    def test_it_is_an_int_for_everything_else(
        self, pool: VirtualMemoryPool, way: Callable[[VirtualMemoryPool], PoolRange]
    ) -> None:
        made = way(pool)
        number = made.address
        same = [made.address, made + 0, copy.deepcopy(made), pickle.loads(pickle.dumps(made))]
        assert [(type(one), one) for one in same] == [(int, number)] * 4
        assert (f"{made} {made:#x}", {number: 1}[made]) == (f"{number} {number:#x}", 1)

    @pytest.mark.parametrize("by_the_pool", [False, True])
    def test_it_is_freed_once(
        self, pool: VirtualMemoryPool, way: Callable[[VirtualMemoryPool], PoolRange], by_the_pool: bool
    ) -> None:
        """A second `free` would release what another call has allocated there meanwhile."""
        made = way(pool)
        if by_the_pool:
            pool.free(made)
        else:
            made.free()
        assert pool.physical_usage_bytes == 0
        pool.allocate(made.offset, made.nbytes)
        for again in (made.free, lambda: pool.free(made)):
            with pytest.raises(NotMapped, match="was freed already"):
                again()
        assert pool.is_mapped(made.offset)


class TestTensors:
    def test_an_array_over_it(self, pool: VirtualMemoryPool) -> None:
        pool.allocate(0, PAGE)
        made = pool.allocate(PAGE + 256, PAGE)
        array = made.tensor((2, 3), "float32", "numpy", offset=8)
        array[:] = 7
        assert bytes(pool.view(PAGE + 264, 4)) == array.tobytes()[:4]
        with pytest.raises(BufferError, match=r"1 view \(tensor\(\) at test_range\.py"):
            made.free()
        del array
        made.free()

    @pytest.mark.parametrize("offset", [-4, 8, 1 << 40])
    @pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
    def test_no_tensor_leaves_the_range(self, pool: VirtualMemoryPool, offset: int, framework: str) -> None:
        """The page behind it belongs to another allocation."""
        pytest.importorskip(framework)
        made = pool.allocate(0, "1MiB")
        with pytest.raises(InvalidRequest, match="do not lie in a range of 1048576 bytes"):
            made.tensor((1 << 18,), "float32", framework, offset=offset)


def test_it_keeps_the_pool(lender: Lender) -> None:
    """As a view does: an address of a pool that has gone would be one of nothing."""
    pool = VirtualMemoryPool(lender, 4 * PAGE, PAGE)
    made, gone = pool.grow(PAGE), weakref.ref(pool)
    del pool
    collect()
    assert gone() is not None
    assert lender.used_bytes == PAGE
    made.free()
