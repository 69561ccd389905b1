"""What torch's C++ calls for memory, over the host driver and a real daemon.

The MemPool itself exists on a GPU only: tests/gpu/pytorch/test_mempool.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.sizes import MIB

import membroker
from membroker import Client

pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
adapter = pytest.importorskip("membroker.adapters.torch")
lendings = pytest.importorskip("membroker.adapters.torch.lending")

pytestmark = pytest.mark.shared_daemon


class TestLending:
    """What torch's C++ calls, called as it calls it: by address, from any thread, with C's types."""

    ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

    @pytest.fixture
    def alive(self) -> set[int]:
        """What torch says that it has."""
        return set()

    @pytest.fixture
    def lending(self, client: Client, alive: set[int]) -> Iterator[Any]:
        """With 8 MiB. A test may set `empty`, by which torch empties its cache."""
        self.empty: Callable[[], bool] = lambda: False
        self.model = client.model("lending", limit="8MiB")
        one = lendings.TorchLending(self.model, 0, lambda: set(alive), lambda: self.empty())
        self.allocate = lambda size, device=0: self.ALLOCATE(one.allocate_address)(size, device, None)
        yield one
        alive.clear()
        one.collect(ended=True)

    def test_lends_and_collects(self, daemon: Daemon, lending: Any, alive: set[int]) -> None:
        """A piece is lent whole, kept while torch has it, and released once it was seen and is no longer there."""
        with ThreadPoolExecutor(1) as thread:
            address = thread.submit(self.allocate, 4 * MIB).result()
        assert lending.owns(address, 4 * MIB)
        assert not lending.owns(address + 1, 4 * MIB)
        assert lending.lent == 4 * MIB == daemon.books().lent_bytes
        assert lending.collect() == 0, "torch has not taken it yet"
        alive.add(address)
        assert lending.collect() == 0
        self.FREE(lending.free_address)(address, 4 * MIB, 0, None)
        assert lending.lent == 4 * MIB, "the function that torch calls under its lock does nothing"
        alive.clear()
        assert lending.collect() == 4 * MIB
        assert lending.lent == 0
        until(lambda: daemon.books().lent_bytes == 0)

    def test_a_denial_first_empties_torchs_cache(self, lending: Any, alive: set[int]) -> None:
        """What torch only caches goes back, and the allocation is tried again; torch hears nothing of the refusal."""
        self.empty = lambda: alive.clear() is None
        alive.add(self.allocate(6 * MIB))
        address = self.allocate(4 * MIB)
        assert lending.owns(address, 4 * MIB)
        assert (lending.lent, lending.reclaimed_bytes, lending.refusals) == (4 * MIB, 6 * MIB, 0)
        assert lending.last_denial is None

    def test_what_came_and_went_between_two_looks(self, lending: Any, alive: set[int]) -> None:
        """A thread that calls again has finished its last allocation; until then that memory may be in use."""
        first, second = threading.Event(), threading.Event()

        def work() -> None:
            self.allocate(4 * MIB)
            first.set()
            assert second.wait(DEADLINE_SECONDS)
            alive.add(self.allocate(2 * MIB))

        thread = threading.Thread(target=work)
        thread.start()
        assert first.wait(DEADLINE_SECONDS)
        assert lending.collect() == 0, "torch may be taking it at this moment"
        second.set()
        thread.join()
        assert lending.collect() == 4 * MIB
        assert lending.lent == 2 * MIB
        alive.clear()
        assert lending.collect() == 2 * MIB

    def test_a_closed_client_keeps_what_torch_has(self, daemon: Daemon) -> None:
        """Unmapping under torch's tensors would end the process: it waits until torch has let go."""
        client = membroker.connect(daemon.endpoint())
        alive: set[int] = set()
        lending = lendings.TorchLending(client.model("lending"), 0, lambda: alive)
        address = self.ALLOCATE(lending.allocate_address)(2 * MIB, 0, None)
        alive.add(address)
        lending.collect()
        client.close()
        ctypes.memset(address, 7, 2 * MIB)
        assert self.ALLOCATE(lending.allocate_address)(2 * MIB, 0, None) is None
        assert isinstance(lending.last_denial, membroker.ClosedError)
        alive.clear()
        assert lending.collect() == 2 * MIB
        until(lambda: not daemon.sessions())

    def test_many_threads(self, daemon: Daemon, client: Client) -> None:
        """Threads that torch made, as they allocate while another collects: nothing is lent twice or lost."""
        alive: set[int] = set()
        taken: set[int] = set()
        lending = lendings.TorchLending(client.model("lending"), 0, lambda: set(alive))
        allocate, mine = self.ALLOCATE(lending.allocate_address), threading.Lock()

        def work() -> None:
            for _ in range(20):
                address = allocate(2 * MIB, 0, None)
                with mine:
                    assert address not in alive
                    alive.add(address)
                    taken.add(address)
                ctypes.memset(address, 1, 2 * MIB)
                with mine:
                    alive.discard(address)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            lending.collect()
        alive.update(taken)  # what came and went between two looks is seen once
        lending.collect()
        alive.clear()
        lending.collect()
        assert lending.lent == 0
        until(lambda: daemon.books().lent_bytes == 0)

    def test_there_is_no_mempool_on_the_host(self, client: Client) -> None:
        with pytest.raises(membroker.InvalidRequest):
            adapter.TorchMemory(client.model("lending"))
