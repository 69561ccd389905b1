"""What holds memory, in words: each refusal, and each repr, names the line of the program that made the view."""

from __future__ import annotations

import gc
import inspect

import pytest
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect

from membroker.dlpack import export
from membroker.memory.buffer import Buffer
from membroker.pool.pool import VirtualMemoryPool


def line() -> int:
    frame = inspect.currentframe()
    return frame.f_back.f_lineno


def test_a_pool_names_the_line(lender: Lender) -> None:
    with VirtualMemoryPool(lender, 4 * PAGE, PAGE) as pool:
        pool.allocate(0, 2 * PAGE)
        exported, at = export(pool, (4,), "F32"), line()
        for refused in (lambda: pool.free(0, PAGE), pool.offload):
            with pytest.raises(BufferError, match=rf"used by 1 view \(export\(\) at test_holders\.py:{at}\): release"):
                refused()
        view = pool.view(PAGE, PAGE)
        assert "2 views (export() at test_holders.py" in repr(pool)
        with pytest.raises(BufferError, match=rf"1 view \(view\(\) at test_holders\.py:{at + 4}\)"):
            pool.free(PAGE, PAGE)
        del view, exported
        assert repr(pool).endswith("backed>")


def test_a_closed_buffer_says_why_it_is_still_charged(lender: Lender) -> None:
    buffer = Buffer(lender, 100)
    views = [buffer.view() for _ in range(3)]
    buffer.close()
    assert "closed, kept by 3 views (view() at test_holders.py:" in repr(buffer)
    views.clear()
    collect()
    assert repr(buffer) == "<membroker.Buffer of 100 bytes, closed>"


def test_it_keeps_nothing_of_the_program(lender: Lender) -> None:
    """A frame would keep its variables: the line is text."""

    class Large:
        pass

    def make() -> memoryview:
        large = Large()
        assert large is not None
        return buffer.view()

    with Buffer(lender, 100) as buffer:
        view = make()
        assert not [one for one in gc.get_objects() if isinstance(one, Large)]
        del view
