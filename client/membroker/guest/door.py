"""The door of a guest: a port that forwards bytes to the program's own port, and wakes the program for a connection.

A connection to a sleeping program waits until it is awake, and one to a program that still starts until it listens.
Bytes are forwarded untouched, so HTTP, streaming and WebSocket pass. One that ends without a byte, as a probe does,
wakes nobody; one that ends while it waits is forgotten. No more are open than this process has descriptors for: others
wait in the kernel's queue until some have ended. While one waits, the oldest that has carried no byte for FIRST_SECONDS
ends, so clients that say nothing keep nobody out. One whose client is silent after the program has closed is ended, and
so is one whose client has vanished, as a laptop that was shut: it would keep the program awake. What one side breaks
off is broken off for the other side, too.

Owns the connections; must never look into them.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from ..ext import start_thread
from .keeper import Guest
from .settings import Ports

LOOK_SECONDS = 0.02
"""How often it is looked whether the program is awake."""
CONNECT_SECONDS = 0.1
"""How long to wait until a program that does not listen yet is tried again."""
FIRST_SECONDS = 1.0
"""How long a connection may be silent before it wakes a program: in some protocols the server speaks first. It keeps
its place for as long, however many others wait for one."""
SILENT_SECONDS = 60.0
"""How long a client may be silent when the program has closed its side."""
MOST_CONNECTIONS = 512
KEPT_DESCRIPTORS = 128
"""Descriptors that the connections leave to the rest of this process."""
FULL_SECONDS = 60.0
"""How often at most it is said that clients wait because so many are connected."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""A client that answers nothing for two minutes has vanished."""
_CHUNK = 1 << 14
"""The most that is read at once. Each direction of a connection keeps at most six of them, besides the kernel."""
_ENDED = (7, 8)
"""The states CLOSE and CLOSE_WAIT of a connection, in which TCP_INFO begins (linux/tcp.h)."""
_ADDRESSES = ("127.0.0.1", "::1")


def most_connections() -> int:
    """Return how many connections may be open: each has two descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, (limit - KEPT_DESCRIPTORS) // 2))


def is_listening(port: int) -> bool:
    """Say whether a program on this machine listens at a port."""
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(file) as lines:
            for line in lines:
                fields = line.split()
                if fields[3] == "0A" and fields[1].endswith(f":{port:04X}"):
                    return True
    return False


class Door:
    """Listens from the beginning, and lets connections in from `open` on. Raises `OSError` if the port is in use.

    `say` tells the guest's user, in a thread of the door.
    """

    def __init__(self, ports: Ports, say: Callable[[str], object]) -> None:
        self._ports = ports
        self._say = say
        family = socket.AF_INET6 if ":" in ports.address else socket.AF_INET
        self._listener = socket.create_server((ports.address, ports.port), family=family, backlog=1024)
        self._listener.setblocking(False)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit it
        for option, value in _KEEPALIVE:
            self._listener.setsockopt(socket.IPPROTO_TCP, option, value)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._closing = asyncio.Event()
        self._awake = asyncio.Event()
        self._connecting = asyncio.Lock()
        self._silent: dict[asyncio.Task[None], float] = {}
        """The connections that have carried no byte, the oldest first, and when they came."""
        self._listens = False
        """Whether the last connection has reached the program: then the next ones need not wait for each other."""

    def open(self, guest: Guest) -> None:
        """Let connections in."""
        self._thread = start_thread(lambda: self._loop.run_until_complete(self._serve(guest)), "membroker-door")

    def close(self) -> None:
        """End all connections."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
        self._listener.close()
        self._loop.close()

    async def _serve(self, guest: Guest) -> None:
        connections: set[asyncio.Task[None]] = set()
        tasks = [self._loop.create_task(self._watch(guest)), self._loop.create_task(self._accept(guest, connections))]
        await self._closing.wait()
        for task in (*tasks, *connections):
            task.cancel()
        await asyncio.gather(*tasks, *connections, return_exceptions=True)

    async def _watch(self, guest: Guest) -> None:
        """Know whether the program is awake: one look for all connections."""
        while True:
            (self._awake.set if guest.is_awake else self._awake.clear)()
            await asyncio.sleep(LOOK_SECONDS)

    async def _accept(self, guest: Guest, connections: set[asyncio.Task[None]]) -> None:
        most, say_at = most_connections(), 0.0
        places = asyncio.Semaphore(most)

        def ended(task: asyncio.Task[None]) -> None:
            connections.discard(task)
            self._silent.pop(task, None)
            places.release()

        while True:
            try:
                client, _ = await self._loop.sock_accept(self._listener)
            except OSError:  # it has gone already, or there is no descriptor left
                await asyncio.sleep(CONNECT_SECONDS)
                continue
            with ExitStack() as undo:
                undo.callback(client.close)
                if places.locked() and self._loop.time() >= say_at:
                    self._say(
                        f"its {most} connections are all in use: other clients wait until one ends (see `ulimit -n`)"
                    )
                    say_at = self._loop.time() + FULL_SECONDS
                await self._take_place(places)
                undo.pop_all()
            task = self._loop.create_task(self._enter(guest, client))
            self._silent[task] = self._loop.time()
            connections.add(task)
            task.add_done_callback(ended)

    async def _take_place(self, places: asyncio.Semaphore) -> None:
        """Wait for a place. While there is no other, the oldest silent connection ends."""
        while True:
            oldest, since = next(iter(self._silent.items()), (None, 0.0))
            if oldest is not None and places.locked() and self._loop.time() - since >= FIRST_SECONDS:
                del self._silent[oldest]
                oldest.cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(places.acquire(), LOOK_SECONDS)
                return

    async def _enter(self, guest: Guest, client: socket.socket) -> None:
        """Serve one connection until it ends."""
        try:
            reader, writer = await _opened(sock=client)
        except OSError:
            client.close()
            return
        is_closed = False
        try:
            with suppress(OSError):
                early = bytearray()
                if self._awake.is_set() or await self._has_come(reader, early):
                    guest.connected(1)
                    task = asyncio.current_task()
                    assert task is not None
                    try:
                        await self._forward(reader, writer, early, partial(self._silent.pop, task, None))
                    finally:
                        guest.connected(-1)
            writer.close()
            with suppress(OSError, TimeoutError):  # a client may not read what it was sent
                await asyncio.wait_for(writer.wait_closed(), SILENT_SECONDS)
                is_closed = True
        finally:
            if not is_closed:  # asyncio fails to abort one that closed once it had sent all
                writer.transport.abort()

    async def _has_come(self, reader: asyncio.StreamReader, early: bytearray) -> bool:
        """Wait for the first bytes, or for long enough. Say whether somebody is there: it may end first."""
        try:
            early += await asyncio.wait_for(reader.read(_CHUNK), FIRST_SECONDS)
        except TimeoutError:
            return True
        return bool(early)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, early: bytearray, heard: _Heard
    ) -> None:
        program, side = self._loop.create_task(self._connect()), None
        try:
            if early:
                heard()
            while not program.done():  # so much is read, to see whether the client goes away
                if len(early) >= _CHUNK:  # no more is read, so its end is not either
                    await asyncio.wait([program], timeout=CONNECT_SECONDS)
                    if not program.done() and _has_gone(writer):
                        return
                    continue
                read = self._loop.create_task(reader.read(_CHUNK - len(early)))
                await asyncio.wait([program, read], return_when=asyncio.FIRST_COMPLETED)
                if not read.done():
                    read.cancel()
                    await asyncio.wait([read])
                if not read.cancelled():
                    early += read.result()
                    if read.result():
                        heard()
                    elif not program.done():
                        return
            back, forth = side = await program
        finally:
            # The door may be closed at the moment at which this connection has been made.
            if side is None and not program.cancel() and not program.cancelled() and program.exception() is None:
                program.result()[1].transport.abort()
        try:
            forth.write(early)
            await _exchange((reader, writer), (back, forth), heard)
        except OSError:
            _break_off(writer)
            _break_off(forth)
        finally:
            forth.close()

    async def _connect(self) -> _Side:
        """Wait until the program is awake and listens. One connection tries it for all that wait."""
        if self._listens and self._awake.is_set() and (side := await self._reach()):
            return side
        async with self._connecting:
            while True:
                await self._awake.wait()
                if side := await self._reach():
                    return side
                await asyncio.sleep(CONNECT_SECONDS)

    async def _reach(self) -> _Side | None:
        for address in _ADDRESSES:
            with suppress(OSError):
                side = await _opened(host=address, port=self._ports.program)
                self._listens = True
                return side
        self._listens = False
        return None


_Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Heard = Callable[[], object]
"""Notes that a connection has carried a byte."""


async def _opened(**where: Any) -> _Side:
    """Open a connection, as `asyncio.open_connection`, that keeps little. By default it reads 256 KiB at once."""
    reader, writer = await asyncio.open_connection(**where, limit=_CHUNK)
    writer.transport.set_write_buffer_limits(_CHUNK)
    writer.transport.max_size = _CHUNK  # type: ignore[attr-defined]
    return reader, writer


async def _exchange(client: _Side, program: _Side, heard: _Heard) -> None:
    """Copy in both directions. An error of one side ends both; the end of one direction lets the other one go on."""
    there = asyncio.ensure_future(_copy(client[0], program[1], heard))
    back = asyncio.ensure_future(_copy(program[0], client[1], heard))
    try:
        await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        for direction in (there, back):
            if direction.done():
                direction.result()
        if back.done() and not there.done():
            there.cancel()
            await asyncio.wait([there])
            await _copy(client[0], program[1], heard, SILENT_SECONDS)
        else:
            await back
    finally:
        there.cancel()
        back.cancel()
        await asyncio.gather(there, back, return_exceptions=True)


def _has_gone(writer: asyncio.StreamWriter) -> bool:
    """Say whether the other side has closed the connection or broken it off, as the kernel knows."""
    info: bytes = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return info[0] in _ENDED


def _break_off(writer: asyncio.StreamWriter) -> None:
    """End a connection by a reset after what is on its way: its end would say that this was all."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def _copy(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, heard: _Heard, silent: float | None = None
) -> None:
    """Copy until the end; with `silent`, until nothing has come for so many seconds."""
    with suppress(TimeoutError):
        while data := await asyncio.wait_for(source.read(_CHUNK), silent):
            heard()
            target.write(data)
            await target.drain()
    with suppress(OSError, RuntimeError):
        target.write_eof()
