"""Connections that have not said Hello: how many there may be, and whose makes room for the next."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.support.daemons import DEADLINE_SECONDS

from membrokerd.edge.handoff.endpoint import HandoffEndpoint
from membrokerd.edge.handoff.listener import MAX_SILENT, Listener


def _serve(_: str, work: Callable[[], bool]) -> None:
    while work():
        pass


def test_the_user_with_the_most_silent_connections_makes_room(tmp_path: Path) -> None:
    """One user keeps connecting and says nothing. Another one, whose process is slow, has still not said its Hello.

    It was pushed out, as the oldest of the endpoint.
    """
    users: list[str] = []

    async def scene() -> None:
        turns = SimpleNamespace(put=_serve)
        endpoint = SimpleNamespace(
            name="default",
            dispatcher=SimpleNamespace(loop=SimpleNamespace(turns=turns)),
            tenant_of=lambda _: users.pop(0),
            refusals=SimpleNamespace(endpoint="default"),
            traffic=None,
            buffer=bytearray(1),
        )
        public = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        public.bind(str(tmp_path / "s"))
        public.listen(MAX_SILENT)
        public.setblocking(False)
        listener = Listener(public, cast(HandoffEndpoint, endpoint), frozenset())

        async def connect(user: str) -> socket.socket:
            users.append(user)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(str(tmp_path / "s"))
            sock.setblocking(False)
            async with asyncio.timeout(DEADLINE_SECONDS):
                while users:
                    await asyncio.sleep(0)
            return sock

        slow = await connect("uid-1")
        crowd = [await connect("uid-2") for _ in range(2 * MAX_SILENT)]
        assert [_is_open(sock) for sock in crowd] == [False] * (MAX_SILENT + 1) + [True] * (MAX_SILENT - 1)
        assert _is_open(slow)
        listener.close()
        for sock in (slow, *crowd):
            sock.close()

    asyncio.run(scene())


def _is_open(sock: socket.socket) -> Any:
    """Say whether the broker has not ended a connection on which it sends nothing."""
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True
