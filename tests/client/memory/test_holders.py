"""What holds memory, in words: each refusal, and each repr, names the line of the program that made the view."""

from __future__ import annotations

import gc
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect

from membroker.dlpack import export
from membroker.memory.buffer import Buffer
from membroker.memory.growable import GrowableBuffer
from membroker.memory.sparse import SparseArray
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


def test_many_views_are_counted_and_few_are_named(lender: Lender) -> None:
    with GrowableBuffer(lender, 2 * PAGE, 4 * PAGE, PAGE) as buffer:
        views = [buffer.view() for _ in range(3)]
        with pytest.raises(BufferError, match=r"3 views \(view\(\) at test_holders\.py:\d+, …\)"):
            buffer.shrink(PAGE)
        views.append(buffer.view()[:3])
        del views


def test_a_sparse_array_names_it(lender: Lender) -> None:
    with SparseArray(lender, (10, 256), "F32") as table:
        table.write(0, b"\1" * 1024)
        span, at = table.span(0, 4), line()
        with pytest.raises(BufferError, match=rf"still used by .*span\(\) at test_holders\.py:{at}"):
            table.drop(0)
        assert f"kept by 1 view (span() at test_holders.py:{at})" in repr(table)
        del span


def test_a_closed_buffer_says_why_it_is_still_charged(lender: Lender) -> None:
    buffer = Buffer(lender, 100)
    view, at = buffer.view(), line()
    buffer.close()
    assert repr(buffer) == f"<membroker.Buffer of 100 bytes, closed, kept by 1 view (view() at test_holders.py:{at})>"
    del view
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


def test_a_view_that_no_line_made(lender: Lender) -> None:
    """The first function of a thread is the library's; below it is the interpreter's own."""
    views: list[memoryview] = []
    with Buffer(lender, 100) as buffer:
        thread = threading.Thread(target=lambda: views.append(buffer.view()))
        thread.start()
        thread.join()
        assert "1 view (view() at test_holders.py" in repr(buffer)
        views.clear()
        with ThreadPoolExecutor(1) as pool:
            views.append(pool.submit(buffer.view).result())
        assert "1 view (view() at thread.py:" in repr(buffer)
        views.clear()
