"""A journal as a killed daemon leaves it, and as the next one reads it."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from membrokerd.core import facts as ft
from membrokerd.core.names import ModelName
from membrokerd.restart.journal import Binding, Journal

BINDING = Binding("boot-1", "GPU-1")
NAME = ModelName("acme", "llama-7b")
SESSION = 1 << 40
BEGAN = [ft.ModelBegan(NAME, None, {"device": 1 << 30}), ft.ModelEnded(NAME)]
SESSIONS: list[ft.Fact] = [ft.SessionEnded(number, 0) for number in range(400)]
STEPS = [[ft.Debited(SESSION, NAME, "device", 2 << 20, SESSION + number, 1)] for number in range(1, 6)]


def write(path: Path, *steps: list[ft.Fact], story: list[ft.Fact] | None = None) -> None:
    """Act as a daemon that began with a story, recorded these steps, and was killed."""
    journal = Journal(path, BINDING)
    journal.begin(story or [])
    assert all(journal.append(step) for step in steps)
    assert not journal.full
    journal.close()


def read(path: Path, binding: Binding = BINDING) -> tuple[list[ft.Fact], list[str]]:
    return Journal(path, binding).read(list)


def record(content: Any) -> bytes:
    """Return a record, with the format written out a second time."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<II", len(data), zlib.crc32(data)) + data


def ends(data: bytes) -> Iterator[int]:
    """Yield the offset at which each record ends."""
    at = 0
    while data[at : at + 4].strip(b"\0"):
        at += 8 + int.from_bytes(data[at : at + 4], "little")
        yield at


def steps(count: int) -> list[ft.Fact]:
    return [ft.SessionMoved(number, "x" * 1_000, 0) for number in range(1, count + 1)]
