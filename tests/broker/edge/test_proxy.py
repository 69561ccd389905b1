"""The proxy in front of a gRPC server, which is a bare listener here: what it passes on, and when it reads no more."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import socket
import struct
import tempfile
import termios
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.broker.coroutines import played_by
from tests.support.daemons import DEADLINE_SECONDS, until_async
from tests.support.garbage import without_collections
from tests.support.http2 import CONTINUATION, DATA, HEADERS, PING, PREFACE, frame

from membrokerd.edge.acceptor import Refusals
from membrokerd.edge.rpc.proxy import UNREAD_BYTES, ProxiedConnection, Proxy
from membrokerd.system.turns import Turns, TurnSelector

_T = TypeVar("_T")
_BODY = frame(DATA, 0, 1, bytes(16_000))


class ProxiedServer:
    """A proxy, and a server behind it that does what a test says."""

    def __init__(self, directory: Path, turns: Turns) -> None:
        self.public, private = directory / "public", directory / "private"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(private))
        self._listener.listen()
        self._listener.setblocking(False)
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(self.public))
        sock.listen()
        sock.setblocking(False)
        self.refused: Counter[str] = Counter()
        self.tenant = "red"
        """Whose the next connection is."""
        self.turns = turns
        self._opened = [self._listener]
        self._io = asyncio.get_running_loop()
        refusals = Refusals("red", self.refused)
        self.proxy = Proxy(
            sock,
            private,
            tenant_of=lambda _: self.tenant,
            max_connections=4,
            turns=turns,
            refusals=refusals,
        )

    def close(self) -> None:
        """Close the proxy and every socket."""
        self.proxy.close()
        for sock in self._opened:
            sock.close()

    async def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return a peer's connection, and the server's end of it."""
        peer = await self.peer()
        server, _ = await self._within(self._io.sock_accept(self._listener))
        self._opened.append(server)
        return peer, server

    async def peer(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        self._opened.append(peer)
        peer.setblocking(False)
        await self._io.sock_connect(peer, str(self.public))
        return peer

    async def read(self, sock: socket.socket, count: int) -> bytes:
        """Return so many bytes, or fewer if the connection ends before."""
        data = b""
        while len(data) < count:
            try:
                more = await self._within(self._io.sock_recv(sock, count - len(data)))
            except ConnectionResetError:
                break
            if not more:
                break
            data += more
        return data

    async def fill(self, sock: socket.socket, data: bytes) -> int:
        """Send over and over until the socket takes nothing more for a hundred turns, and return how much it took."""
        sent = idle = 0
        while idle < 100:
            try:
                sent += sock.send(data[sent % len(data) :])
                idle = 0
            except BlockingIOError:
                idle += 1
            await asyncio.sleep(0)
            assert sent < 100 << 20, "everything is taken"
        return sent

    @staticmethod
    async def _within(work: Awaitable[_T]) -> _T:
        return await asyncio.wait_for(work, DEADLINE_SECONDS)


def play(scene: Callable[[ProxiedServer], Awaitable[None]]) -> None:
    """Run a scene beside a proxy."""
    turns = Turns()

    async def main(directory: str) -> None:
        server = ProxiedServer(Path(directory), turns)
        try:
            await scene(server)
        finally:
            server.close()

    with (
        tempfile.TemporaryDirectory() as directory,
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(TurnSelector(turns))) as runner,
    ):
        runner.run(main(directory))


@played_by(play)
async def test_little_waits_for_the_server(world: ProxiedServer) -> None:
    """gRPC serves its peers by one thread in turn, and reads all that one has sent before it looks at the next."""
    peer, server = await world.connect()
    peer.send(PREFACE)
    await world.fill(peer, frame(PING, 0, 0, bytes(8)) * 100)
    (unread,) = struct.unpack("i", fcntl.ioctl(server, termios.FIONREAD, bytes(4)))
    assert 0 < unread <= 2 * UNREAD_BYTES


@played_by(play)
async def test_a_server_that_is_gone_is_no_lack_of_descriptors(world: ProxiedServer) -> None:
    """As when somebody has removed the daemon's directory: its limit of open files would be looked at in vain."""
    world.public.with_name("private").unlink()
    assert await world.read(await world.peer(), 1) == b""
    assert world.refused == {"INTERNAL": 1}


@played_by(play)
async def test_what_is_passed_on_takes_the_time_of_the_peers_tenant(world: ProxiedServer) -> None:
    """Also what the server answers. To accept a connection takes that of the endpoint."""
    served, put = list[str](), world.turns.put

    def noted(tenant: str, work: Callable[[], bool]) -> None:
        served.append(tenant)
        put(tenant, work)

    world.turns.put, world.tenant = noted, "blue"  # type: ignore[method-assign]
    peer, server = await world.connect()
    assert set(served) == {"red"}
    for source, sink in ((peer, server), (server, peer)):
        served.clear()
        source.send(PREFACE)
        assert await world.read(sink, len(PREFACE)) == PREFACE
        assert "blue" in served


@played_by(play)
async def test_a_block_that_never_ends_ends_the_connection(world: ProxiedServer) -> None:
    """The server has seen nothing of it."""
    peer, server = await world.connect()
    peer.send(PREFACE + frame(HEADERS, 0, 1, bytes(9_000)) + frame(CONTINUATION, 0, 1, bytes(9_000)))
    assert await world.read(peer, 1) == b""
    assert await world.read(server, 1_000) == b""
    assert world.refused == {"PROTOCOL_VIOLATION": 1}


@played_by(play)
async def test_a_peer_that_reads_nothing_is_not_read(world: ProxiedServer) -> None:
    """The server has more to say than the peer's socket takes. What the peer asks then does not come through."""
    peer, server = await world.connect()
    peer.send(PREFACE)
    assert await world.read(server, len(PREFACE)) == PREFACE
    said = await world.fill(server, bytes(50_000))
    asked = await world.fill(peer, _BODY)
    with pytest.raises(BlockingIOError):
        server.recv(1)
    assert len(await world.read(peer, said)) == said
    assert len(await world.read(server, asked)) == asked


@played_by(play)
async def test_a_server_that_reads_nothing_stops_the_peer(world: ProxiedServer) -> None:
    """The proxy keeps what it has read at once, and no more. What the server says passes meanwhile."""
    peer, server = await world.connect()
    peer.send(PREFACE)
    sent = await world.fill(peer, _BODY)
    server.send(b"anything")
    assert await world.read(peer, 8) == b"anything"
    assert await world.read(server, len(PREFACE) + sent) == PREFACE + (_BODY * (sent // len(_BODY) + 1))[:sent]


@played_by(play)
async def test_a_tenant_with_most_connections_makes_room_for_others(world: ProxiedServer) -> None:
    """Red has all four. Blue gets one for each of red's newest, until it has as many; then both are refused.

    When a connection has gone, there is room again.
    """
    reds = [await world.connect() for _ in range(4)]
    assert await world.read(await world.peer(), 1) == b""
    world.tenant = "blue"
    for red, _ in reversed(reds[2:]):
        await world.connect()
        assert await world.read(red, 1) == b""
    for tenant in ("blue", "red"):
        world.tenant = tenant
        assert await world.read(await world.peer(), 1) == b""
    for red, server in reds[:2]:
        red.send(PREFACE)
        assert await world.read(server, len(PREFACE)) == PREFACE
    red.close()
    assert await world.read(server, 1) == b""
    await world.connect()


@pytest.mark.parametrize("unsent", [False, True])
def test_a_connection_that_has_ended_is_freed_with_its_last_reference(*, unsent: bool) -> None:
    """No garbage collection is needed: those of the daemon exclude what lives long. `unsent`: its peer did not read."""

    def connections() -> int:
        return sum(isinstance(one, ProxiedConnection) for one in gc.get_objects())

    async def story(world: ProxiedServer) -> None:
        before = connections()
        peer, server = await world.connect()
        assert connections() == before + 1
        if unsent:
            await world.fill(server, _BODY)
        peer.close()
        await world.read(server, 1)
        await until_async(lambda: connections() <= before)

    with without_collections():
        play(story)
