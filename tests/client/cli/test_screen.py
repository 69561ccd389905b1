"""What `membroker top` draws."""

from __future__ import annotations

import pytest

from membroker.cli import screen


@pytest.mark.parametrize("room", [8, 9, 20, 33])
def test_a_long_name_keeps_its_ends(room: int) -> None:
    """`Qwen2.5-Coder-7B-Instruct` and `…-14B-Instruct` looked the same when the end was cut off."""
    name = "chat/Qwen/Qwen2.5-Coder-7B-Instruct-GPTQ-Int4"
    shown = screen.cut(name, room)
    first, last = shown.split("…")
    assert len(shown) == room
    assert name.startswith(first)
    assert name.endswith(last)
    assert abs(len(first) - len(last)) <= 1
    assert screen.cut(name, len(name)) == name
