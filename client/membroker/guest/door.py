"""The door of a guest: a port that forwards bytes to the program's own port, and wakes the program for a connection.

A connection to a sleeping program waits until it is awake, and one to a program that still starts until it listens.
Bytes are forwarded untouched, so HTTP, streaming and WebSocket pass. Owns the connections; must never look into them.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

from ..ext import start_thread
from .keeper import Guest
from .settings import Ports

LOOK_SECONDS = 0.02
CONNECT_SECONDS = 0.1
"""How long to wait until a program that does not listen yet is tried again."""
_CHUNK = 1 << 16


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
    """Listens from the beginning, and lets connections in from `open` on. Raises `OSError` if the port is in use."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        family = socket.AF_INET6 if ":" in ports.address else socket.AF_INET
        self._listener = socket.create_server((ports.address, ports.port), family=family, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._closing = asyncio.Event()

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

        async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            guest.connected(1)
            try:
                await self._forward(guest, reader, writer)
            finally:
                guest.connected(-1)
                connections.discard(task)
                writer.close()

        async with await asyncio.start_server(enter, sock=self._listener):
            await self._closing.wait()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _forward(self, guest: Guest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not guest.is_awake:
            await asyncio.sleep(LOOK_SECONDS)
        while True:
            try:
                back, forth = await asyncio.open_connection("127.0.0.1", self._ports.program)
                break
            except OSError:
                await asyncio.sleep(CONNECT_SECONDS)
        try:
            await asyncio.gather(_copy(reader, forth), _copy(back, writer))
        finally:
            forth.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError, RuntimeError):
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()
        target.write_eof()
