"""Offloading under living views: a captured graph, or a tensor in a module, is there again after `restore`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.client.pool.offload.pages import PAGES
from tests.support.fake_lender import PAGE, Lender

from membroker.dlpack import export
from membroker.errors import Offloaded
from membroker.pool.pool import VirtualMemoryPool


def test_a_view_is_the_same_after_it(
    pool: VirtualMemoryPool, lender: Lender, random_bytes: Callable[[int], bytes]
) -> None:
    """The page's promise is that tensors stay valid; `tensor` of any page blocked `offload` until it was gone."""
    pool.allocate(0, PAGES * PAGE)
    data = random_bytes(PAGES * PAGE)
    pool.view(0, len(data))[:] = data
    view, exported = pool.view(0, 3 * PAGE), export(pool, "U8", (PAGE,), 5 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    with pytest.raises(BufferError, match="2 views"):
        pool.offload()
    assert pool.offload(despite_views=True) == len(data)
    assert lender.lent == {}
    with pytest.raises(Offloaded):
        pool.view(0, 1)
    pool.restore()
    assert ctypes.addressof(ctypes.c_char.from_buffer(view)) == address
    assert bytes(view) == data[: 3 * PAGE]
    assert bytes(pool.view(5 * PAGE, PAGE)) == data[5 * PAGE : 6 * PAGE]
    with pytest.raises(BufferError, match="1 view"):
        pool.deallocate(5 * PAGE, PAGE)
    del view, exported


def test_a_pool_that_is_closed_meanwhile(pool: VirtualMemoryPool, lender: Lender) -> None:
    """Its addresses stay until the view is gone, so nothing else comes to lie there; its bytes are dropped then."""
    pool.allocate(0, 2 * PAGE)
    view = pool.view(0, PAGE)
    pool.offload(despite_views=True)
    pool.close()
    assert lender.holdings
    del view
    lender.settle()
    assert not lender.holdings


def test_an_access_meanwhile_ends_the_process() -> None:
    """As the docstring says: it never reads what another program has there."""
    script = f"""
from tests.support.fake_lender import PAGE, Lender
from membroker.pool.pool import VirtualMemoryPool
pool = VirtualMemoryPool(Lender(), {PAGES} * PAGE, PAGE)
pool.allocate(0, PAGE)
view = pool.view(0, PAGE)
pool.offload(despite_views=True)
print(view[0])
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."})
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, b"")
