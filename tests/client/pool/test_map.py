"""What `print(pool)` and a notebook draw."""

from __future__ import annotations

from tests.support.fake_lender import PAGE, Lender

from membroker.pool.pool import VirtualMemoryPool


def test_a_cell_for_each_page(lender: Lender) -> None:
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=1) as pool:
        assert str(pool) == f"{pool!r}\nnothing is allocated"
        pool.allocate(PAGE, 5 * PAGE)
        pool.offload(2 * PAGE, PAGE)
        pool.free(5 * PAGE, PAGE)
        span = pool.span(3 * PAGE, 1)
        assert str(pool).splitlines() == [
            repr(pool),
            "|.#oP#s| # used, P pinned, s spare, o offloaded; a cell is 2.0 MiB",
        ]
        assert pool._repr_html_().count("<rect") == 5
        del span
    assert str(pool) == repr(pool)
