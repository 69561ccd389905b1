"""What a first program meets: the numbers of a refusal, and `dir(model)`."""

from __future__ import annotations

import pickle

import pytest
from tests.support.sizes import MIB

import membroker
from membroker.errors import OutOfMemory
from membroker.memory.growable import GrowableBuffer
from membroker.pool.pool import VirtualMemoryPool

PUBLIC_NAMES = [
    *("allocate", "available", "create_segment", "declare", "defer_recalls", "driver", "growable_buffer"),
    *("host_limit", "leave", "limit", "limited", "name", "on_recall", "on_sleep", "peak_bytes"),
    *("pending_recall", "pool", "recall_callback", "resource_name", "say_sleep", "sleep_callback", "source"),
    *("sparse_array", "stats", "unregister", "used_bytes", "virtual_capacity"),
]


class TestRefusals:
    """20 MiB were asked for; a message that speaks of 64 MiB alone makes people look for a fault of their own."""

    def test_the_bytes_that_were_asked_for_and_the_rounding(self) -> None:
        with membroker.LocalSource("host", limit="96MiB") as source, VirtualMemoryPool(source, "1GiB", "64MiB") as pool:
            pool.allocate_anywhere("64MiB")
            for attempt in (pool.grow, pool.allocate_anywhere, lambda size: pool.allocate(64 * MIB, size)):
                with pytest.raises(OutOfMemory) as caught:
                    attempt("20MiB")
                assert str(caught.value).startswith(
                    "20.0 MiB (64.0 MiB in pages of 64.0 MiB) were asked for, 32.0 MiB are available: "
                )
                numbers = (caught.value.asked_bytes, caught.value.requested_bytes, caught.value.available_bytes)
                assert numbers == (20 * MIB, 64 * MIB, 32 * MIB)
                copy = pickle.loads(pickle.dumps(caught.value))
                assert (str(copy), copy.asked_bytes) == (str(caught.value), 20 * MIB)

    def test_of_a_buffer_and_of_one_that_grows(self) -> None:
        with membroker.LocalSource("host", limit="6MiB") as source:
            with pytest.raises(OutOfMemory, match=r"^7\.0 MiB \(8\.0 MiB .* 2\.0 MiB\) .* 6"):
                membroker.Buffer(source, "7MiB")
            buffer = GrowableBuffer(source, "4MiB", "64MiB", "4MiB")
            with pytest.raises(OutOfMemory, match=r"^1\.0 MiB \(4\.0 MiB .* 4\.0 MiB\) .* 2"):
                buffer.grow("1MiB")

    def test_what_needed_no_rounding_is_told_as_it_is(self) -> None:
        with membroker.LocalSource("host", limit="6MiB") as source, pytest.raises(OutOfMemory) as caught:
            membroker.Buffer(source, "8MiB")
        assert str(caught.value) == "the capacity of 6.0 MiB has 6.0 MiB left: 8.0 MiB more do not fit"
        assert caught.value.asked_bytes == caught.value.requested_bytes == 8 * MIB


def test_a_model_shows_what_a_user_uses() -> None:
    """Completion in a notebook lists these, and none of the library's plumbing."""
    assert [name for name in dir(membroker.Model) if not name.startswith("_")] == PUBLIC_NAMES
