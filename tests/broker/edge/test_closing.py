"""How peers' sockets are closed: the last answer is heard, and nobody waits for what was passed and never taken."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest
from tests.broker.coroutines import played_by
from tests.support.daemons import DEADLINE_SECONDS, until_async
from tests.support.lingering import pass_lingering

from membroker.wire.descriptors import send
from membrokerd.edge.closing import MOST_THREADS, MOST_WAITING, SocketCloser


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.settimeout(DEADLINE_SECONDS)
    return ours, theirs


def threads() -> int:
    """Return how many threads close sockets now. Other tests of this process may have left some of another kind."""
    return sum(thread.name == "closing" for thread in threading.enumerate())


def play(story: Callable[[SocketCloser], Awaitable[None]]) -> None:
    async def main() -> None:
        await story(SocketCloser())

    asyncio.run(main())


async def until_done() -> None:
    """Wait until the threads that close are done."""
    await until_async(lambda: not threads())


@played_by(play)
async def test_hanging_up_lets_the_last_word_be_read(closer: SocketCloser) -> None:
    """Unread bytes would make the peer's next read fail before it sees our answer."""
    ours, theirs = pair()
    with closing(theirs):
        for _ in range(5):
            theirs.send(b"unread")
        ours.send(b"the answer")
        closer.hang_up(ours)
        assert ours.fileno() == -1
        assert theirs.recv(100) == b"the answer"
        assert theirs.recv(100) == b""


@pytest.mark.parametrize("before", [[], [b"a frame"], [b""], [b""] * 9], ids=str)
@pytest.mark.parametrize("is_gone", [False, True])
@played_by(play)
async def test_what_lingers_is_closed_on_a_thread(closer: SocketCloser, before: list[bytes], *, is_gone: bool) -> None:
    """Also behind a packet of 0 bytes, which is read like the end of the connection; and all of it is closed."""
    ours, theirs = pair()
    for data in before:
        theirs.send(data)
    with pass_lingering(theirs, b"x"):
        if is_gone:
            ours.send(b"never read")
            theirs.close()
        closer.hang_up(ours)
        assert threads() == 1
        await until_done()
    theirs.close()


@played_by(play)
async def test_many_that_linger_have_a_few_threads(closer: SocketCloser) -> None:
    """They are interrupted for each, and all are closed. Many are a crowd: the endpoint accepts no more then."""
    pairs = [pair() for _ in range(MOST_THREADS + MOST_WAITING)]
    ends = []
    for ours, theirs in pairs:
        ends.append(pass_lingering(theirs, b"x"))
        assert not closer.is_crowded
        closer.hang_up(ours)
    assert closer.is_crowded
    assert threads() == MOST_THREADS
    await until_async(lambda: all(ours.fileno() < 0 for ours, _ in pairs))
    assert not closer.is_crowded
    await until_done()
    for sock in [*ends, *(theirs for _, theirs in pairs)]:
        sock.close()


@played_by(play)
async def test_of_many_packets_with_descriptors_one_is_read(closer: SocketCloser) -> None:
    """Each read may need a signal of its own, and one close has one for all that is left."""
    read: list[bytes] = []

    class Counted(socket.socket):
        def recv(self, *args: int) -> bytes:
            read.append(super().recv(*args))
            return read[-1]

    ours, theirs = pair()
    reader, writer = os.pipe()
    for _ in range(20):
        send(theirs, b"x", [writer])
    closer.hang_up(Counted(fileno=ours.detach()))
    await until_done()
    for end in (reader, writer):
        os.close(end)
    theirs.close()
    assert read == [b"x"]


@played_by(play)
async def test_without_a_new_thread_it_is_closed_later(closer: SocketCloser, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have as many threads as it can. The event loop does not wait instead."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = pair()
    reader, writer = os.pipe()
    send(theirs, b"x", [writer])
    os.close(writer)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        closer.hang_up(ours)
    assert ours.fileno() >= 0
    os.set_blocking(reader, False)
    await until_async(lambda: select.select([reader], [], [], 0)[0])  # nobody has the writer any more
    assert os.read(reader, 1) == b""
    os.close(reader)
    theirs.close()
