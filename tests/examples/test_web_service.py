"""The FastAPI program of docs/web-service.md, spoken to as its server speaks to it (ASGI), in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.docs.test_docs import BLOCK
from tests.support.daemons import DEADLINE_SECONDS, running
from tests.support.sizes import MIB

PAGE = Path(__file__).parents[2] / "docs" / "web-service.md"
CAPACITY = 128 * MIB
Message = MutableMapping[str, Any]


@pytest.fixture
def app() -> Any:
    """The program, as the page has it."""
    pytest.importorskip("fastapi")
    (code,) = [block[2] for block in BLOCK.finditer(PAGE.read_text()) if "fastapi" in block[1]]
    program: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), program)
    return program["app"]


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[None]:
    """Let the program start up, and shut it down at the end."""
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    outgoing: asyncio.Queue[Message] = asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, incoming.get, outgoing.put))
    await incoming.put({"type": "lifespan.startup"})
    assert (await outgoing.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        await incoming.put({"type": "lifespan.shutdown"})
        assert (await outgoing.get())["type"] == "lifespan.shutdown.complete"
        await life


async def post(app: Any, path: str) -> tuple[int, Any]:
    """Make a request, and return its status and document."""
    scope = {"type": "http", "http_version": "1.1", "scheme": "http", "method": "POST", "path": path}
    scope |= {"asgi": {"version": "3.0"}, "root_path": "", "query_string": b"", "headers": []}
    sent: list[Message] = []
    body = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if not body:
            await asyncio.Event().wait()
        return body.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def test_forty_requests_at_once(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is there for two of them at a time: the others wait for their turn, and all are answered."""

    async def main() -> None:
        async with served(app):
            answers = await asyncio.gather(*(post(app, "/work") for _ in range(40)))
            assert answers == [(200, {"bytes": 64 * MIB})] * 40

    with running({"capacity": CAPACITY}) as daemon:
        monkeypatch.setenv("MEMBROKER_ENDPOINT", str(daemon.endpoint()))
        asyncio.run(asyncio.wait_for(main(), DEADLINE_SECONDS))
        assert daemon.books().lent_bytes == 0
