"""What `membroker run --guest` says."""

from __future__ import annotations

import os
import sys

import pytest

from membroker.guest.command import say


def test_it_waits_for_nobody_who_has_stopped_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """`less` at a full screen: the guest would answer no recall any more."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        say("one")
        os.set_blocking(writing, False)
        while True:
            try:
                os.write(writing, bytes(1 << 16))
            except BlockingIOError:
                break
        os.set_blocking(writing, True)
        say("two")
        full.close()
        said = reader.read()
    assert said.startswith(b"membroker: one\n")
    assert b"two" not in said
