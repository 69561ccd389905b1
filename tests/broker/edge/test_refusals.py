"""What the log says of refused connections: one line a second for each reason, so that none is behind another."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from membrokerd.core.denied import Reason
from membrokerd.edge.acceptor import Refusals


def test_a_reason_is_told_also_in_the_second_of_another(caplog: pytest.LogCaptureFixture) -> None:
    """A client that is too new is found, while another one tries its old token again and again."""
    refusals = Refusals("red", Counter())
    with caplog.at_level(logging.INFO, "membrokerd"):
        refusals.note(Reason.TOKEN_REJECTED, pid=7)
        refusals.note(Reason.UNSUPPORTED_VERSION, pid=8)
    told: list[dict[str, Any]] = [vars(record)["fields"] for record in caplog.records]
    assert [(each["reason"], each["count"], each["pid"]) for each in told] == [
        ("TOKEN_REJECTED", 1, 7),
        ("UNSUPPORTED_VERSION", 1, 8),
    ]
    assert refusals.counter == {"TOKEN_REJECTED": 1, "UNSUPPORTED_VERSION": 1}
