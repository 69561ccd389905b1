"""The library against a real daemon: real sockets, descriptors, processes and signals, over both transports."""

from __future__ import annotations

import os

import pytest
from tests.support.daemons import Daemon, until
from tests.support.fake_broker import Caller
from tests.support.garbage import collect
from tests.support.processes import descriptors, is_settled, mapped_extents
from tests.support.segments import one_transport
from tests.support.sizes import PAGE

import membroker
from membroker.session import rpc


class TestMainJob:
    @one_transport
    def test_many_packets(self, daemon: Daemon, client: membroker.Client) -> None:
        """128 pages are two packets of the window; each page is its own memory, in order."""
        with client.model("m").pool(page_size=PAGE) as pool:
            pool.allocate(0, 128 * PAGE)
            for page in range(128):
                pool.view(page * PAGE, 8)[:] = page.to_bytes(8, "little")
            assert [int.from_bytes(pool.view(page * PAGE, 8), "little") for page in range(128)] == [*range(128)]
            pool.free(PAGE, 126 * PAGE)
            until(lambda: daemon.books().lent_bytes == 2 * PAGE)

    def test_listings_in_pages(self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
        """More models than one answer may have; the user sees one list."""
        monkeypatch.setattr(rpc, "MAX_PAGE_ROWS", 2)
        with membroker.connect(daemon.endpoint()) as client, membroker.connect(daemon.endpoint()) as other:
            names = [client.model(f"m{number}").resource_name for number in range(5)]
            assert [model.name for model in client.models()] == names
            assert [session.name for session in client.sessions()] == [client.session, other.session]
            assert client.sessions()[0].models == tuple(names)


class TestThreads:
    def test_closed_while_others_work(self, daemon: Daemon, transport: str) -> None:
        """The server shuts down with requests under way: they raise, and nothing stays mapped."""
        client = membroker.connect(daemon.endpoint(), transport=transport)
        model = client.model("m")

        def work() -> None:
            while True:
                model.allocate(1).close()

        workers = [Caller(work) for _ in range(4)]
        until(lambda: model.stats().allocations_total > 20)
        client.close()
        assert [type(one.end().error) for one in workers] == [membroker.ClosedError] * 4
        until(lambda: is_settled(daemon) and not daemon.sessions())
        assert mapped_extents() == 0


class TestGarbage:
    @one_transport
    @pytest.mark.parametrize("closes", [False, True])
    def test_a_view_keeps_a_client(self, daemon: Daemon, transport: str, closes: bool) -> None:
        """A function returns an array over borrowed memory, and everything else of its own is garbage, or closed."""

        def borrow() -> memoryview:
            client = membroker.connect(daemon.endpoint(), transport=transport)
            view = client.model("m").allocate(PAGE).view()
            if closes:
                client.close()
            return view

        view = borrow()
        collect()
        view[:5] = b"hello"
        assert daemon.books().lent_bytes == PAGE
        assert len(daemon.sessions()) == 1
        del view
        collect()
        until(lambda: is_settled(daemon) and not daemon.sessions())
        until(lambda: mapped_extents() == 0)

    @one_transport
    def test_a_forgotten_client(self, daemon: Daemon, transport: str) -> None:
        """A program that loses its client without closing it ends its session, and its descriptors are closed."""
        before = descriptors()
        for _ in range(3):
            membroker.connect(daemon.endpoint(), transport=transport).model("m").allocate(1)
        collect()
        until(lambda: not daemon.sessions())
        until(lambda: descriptors() <= before + 8)

    def test_no_descriptor_is_left_behind(self, client: membroker.Client) -> None:
        """A leak of one descriptor a call killed another broker's clients at call 1,007."""
        pool = client.model("m", limit="16MiB").pool(page_size=PAGE, virtual_capacity="64MiB")
        pool.allocate(0, 1)
        pool.free(0, 1)

        def opened() -> int:  # gRPC has a channel open, so its threads are not waited for
            return len(os.listdir("/proc/self/fd"))

        counts = []
        for _ in range(100):
            pool.allocate(0, 2 * PAGE)
            with pytest.raises(membroker.OutOfMemory):
                pool.grow("16MiB")
            pool.free(0, 2 * PAGE)
            counts.append(opened())  # a client of an earlier test may be closing its own meanwhile
        until(lambda: opened() <= min(counts))
