"""A daemon's side of a mirror: keep files as a segment's extents, and read what a predecessor left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import pytest

from membroker.wire.descriptors import close_all
from membrokerd.restart import keeper_client as mirrors
from membrokerd.restart import keeper_connection
from membrokerd.restart.descriptor_store import Store, StoredDescriptors
from membrokerd.restart.keeper_client import open_keeper
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.keepers import content_of, memfd
from tests.support.processes import descriptors

_T = TypeVar("_T")
STUCK_SECONDS = 0.3
OWNER = "/run/membroker/host"


def play(story: Awaitable[_T]) -> _T:
    """Run a coroutine, and check that it has closed every descriptor that it opened.

    A keeper on a busy machine has longer than a daemon gives it: to start, and to answer.
    """

    async def main() -> _T:
        return await asyncio.wait_for(story, DEADLINE_SECONDS)

    before = descriptors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirrors, "PUT_SECONDS", DEADLINE_SECONDS)
        for bound in ("ANSWER_SECONDS", "START_SECONDS"):
            patch.setattr(keeper_connection, bound, DEADLINE_SECONDS)
        told = asyncio.run(main())
    assert descriptors() == before, "a descriptor is lost"
    return told


def keeping(store: Store, segment: int, contents: dict[int, bytes]) -> asyncio.Future[None]:
    """Keep files as a segment's extents. The future is done when the store calls back."""
    told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    files = [memfd(content) for content in contents.values()]

    def done(error: OSError | None) -> None:
        assert not told.done(), "done was called twice"
        if error is None:
            told.set_result(None)
        else:
            close_all(files)
            told.set_exception(error)

    store.keep("t", segment, list(contents), files, done)
    return told


def read(kept: StoredDescriptors) -> dict[int, dict[int, bytes]]:
    """Return the contents of the extents that a predecessor left, and close them all."""
    contents = {
        segment: {extent: content_of(descriptor) for extent, descriptor in extents.items()}
        for segment, extents in kept.segments.items()
    }
    close_all(descriptor for extents in kept.segments.values() for descriptor in extents.values())
    close_all([*kept.processes.values(), *kept.driver.values()])
    return contents


def keeping_not_long(store: Store, segment: int, contents: dict[int, bytes]) -> asyncio.Future[None]:
    """Keep files, with a shorter timeout for the mirror."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirrors, "PUT_SECONDS", STUCK_SECONDS)
        return keeping(store, segment, contents)


async def left_at(path: Path) -> StoredDescriptors:
    mirror, kept = await open_keeper(path, OWNER)
    mirror.close()
    return kept


def end(store: Store) -> None:
    close_all(store.close())
