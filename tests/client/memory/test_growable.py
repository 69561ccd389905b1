"""A growable buffer's promises, over a lender in this process and the host driver: no broker, the same code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.support.fake_lender import PAGE, Lender
from tests.support.sizes import MIB
from tests.support.threads import held_up, together

from membroker.errors import DeviceFailure, InvalidPageSize, InvalidRequest, OutOfMemory, OutOfVirtualMemory
from membroker.memory.growable import GrowableBuffer

CAPACITY = 64 * PAGE


@pytest.fixture
def buffer(lender: Lender) -> Iterator[GrowableBuffer]:
    with GrowableBuffer(lender, 0, CAPACITY, PAGE) as buffer:
        yield buffer


def state(buffer: GrowableBuffer, lender: Lender) -> tuple[object, ...]:
    """All that a refusal must leave as it was."""
    usage = buffer.physical_usage_bytes
    return buffer.size, buffer.address, usage, bytes(buffer.view()), dict(lender.lent), lender.used_bytes


class TestSize:
    def test_pages_come_and_go_with_the_bytes(self, buffer: GrowableBuffer, lender: Lender) -> None:
        """Whole pages are charged, and only those that a byte in use lies in."""
        for size, pages in ((1, 1), (PAGE, 1), (PAGE + 1, 2), (7 * PAGE, 7), (3 * PAGE + 1, 4), (3 * PAGE, 3), (0, 0)):
            buffer.resize(size)
            assert buffer.size == size == len(buffer.view())
            assert buffer.physical_usage_bytes == lender.lent_bytes == lender.used_bytes == pages * PAGE

    def test_within_a_page_nobody_is_asked(self, buffer: GrowableBuffer, lender: Lender) -> None:
        """A list that appends a few bytes at a time costs a call once in a page."""
        asked: list[int] = []
        lender.before_borrow = lambda: asked.append(buffer.size)
        for _ in range(8):
            buffer.grow(PAGE // 4)
        assert asked == [0, PAGE]
        waits: list[None] = []
        lender.driver.before_synchronize = lambda: waits.append(None)
        buffer.shrink(PAGE // 2)
        assert waits == [], "it waited for the device, and no page goes"

    def test_to_its_capacity_and_back(self, buffer: GrowableBuffer, lender: Lender) -> None:
        buffer.resize(CAPACITY)
        buffer.view()[-1] = 1
        with pytest.raises(OutOfVirtualMemory) as caught:
            buffer.grow(1)
        assert (caught.value.requested_bytes, caught.value.available_bytes) == (1, 0)
        buffer.resize(0)
        assert lender.used_bytes == 0


class TestBytes:
    def test_what_stays_is_not_touched(self, buffer: GrowableBuffer) -> None:
        """A view from before is the same bytes at the same address, whatever comes and goes behind it."""
        address = buffer.address
        buffer.resize(PAGE + 100)
        before = buffer.view()
        before[:] = bytes(range(256)) * (PAGE // 256) + b"x" * 100
        text = bytes(before)
        buffer.grow(5 * PAGE)
        assert buffer.address == address
        before[0] = 255
        assert buffer.view()[0] == 255
        before[0] = 0
        assert bytes(buffer.view()[: PAGE + 100]) == text
        buffer.resize(PAGE + 100)
        assert bytes(before) == bytes(buffer.view()) == text

    def test_what_comes_back_within_the_last_page_is_as_it_was(self, buffer: GrowableBuffer) -> None:
        """Shrinking clears nothing; only pages that are given back come back fresh, and those are zero."""
        buffer.resize(2 * PAGE)
        buffer.view()[:] = b"\x5a" * (2 * PAGE)
        buffer.resize(100)
        buffer.resize(2 * PAGE)
        assert bytes(buffer.view()) == b"\x5a" * PAGE + bytes(PAGE)

    @pytest.mark.parametrize("take", [GrowableBuffer.view, lambda buffer: buffer.span(0, buffer.size)])
    def test_a_living_view_keeps_what_it_sees(
        self, buffer: GrowableBuffer, lender: Lender, take: Callable[[GrowableBuffer], object]
    ) -> None:
        """Somebody computes on the last bytes: shrinking by a single one of them is refused, growing is not.

        It does not matter whether a page would go: the rule is by bytes, so it does not depend on the page size.
        """
        buffer.resize(PAGE + 100)
        seen = take(buffer)
        before = state(buffer, lender)
        for size in (0, PAGE, PAGE + 99):
            with pytest.raises(BufferError):
                buffer.resize(size)
            assert state(buffer, lender) == before
        buffer.grow(PAGE)
        buffer.shrink(PAGE)
        assert state(buffer, lender) == before
        del seen
        buffer.resize(0)


class TestRefused:
    def test_beyond_its_ends(self, buffer: GrowableBuffer, lender: Lender) -> None:
        """Sums that would overflow 64 bits are refused like any other size beyond the capacity."""
        buffer.resize(10)
        before = state(buffer, lender)
        for call, size, error in (
            (buffer.resize, CAPACITY + 1, OutOfVirtualMemory),
            (buffer.grow, CAPACITY - 9, OutOfVirtualMemory),
            (buffer.grow, 2**63 - 1, OutOfVirtualMemory),
            *(
                (call, size, InvalidRequest)
                for call in (buffer.resize, buffer.grow, buffer.shrink)
                for size in (-1, "", 1.5)
            ),
            (buffer.shrink, 11, InvalidRequest),
            (buffer.shrink, 2**63 - 1, InvalidRequest),
        ):
            with pytest.raises(error):
                call(size)
            assert state(buffer, lender) == before

    def test_spans_that_do_not_lie_in_it(self, buffer: GrowableBuffer) -> None:
        buffer.resize(10)
        for offset, size in ((0, 11), (11, 0), (-1, 1), (1, -1), (2**63 - 1, 2**63 - 1), (0.0, 1), (0, True)):
            with pytest.raises(InvalidRequest):
                buffer.span(offset, size)  # type: ignore[arg-type]
        assert buffer.span(10, 0).address == buffer.address + 10

    @pytest.mark.parametrize(
        ("wrong", "error"),
        [
            *(({"page_size": size}, InvalidPageSize) for size in (0, 3 * MIB, PAGE + 1, -PAGE, "a page")),
            *(({"capacity": size}, InvalidRequest) for size in (0, -1, 2**63 - 1, 2**63, "much")),
            ({"size": CAPACITY + 1}, InvalidRequest),
            ({"location": "moon"}, InvalidRequest),
            ({"capacity": 2**62}, DeviceFailure),
            ({"size": 2 * PAGE}, OutOfMemory),
        ],
    )
    def test_what_cannot_be_had(self, lender: Lender, wrong: dict[str, Any], error: type[Exception]) -> None:
        """Also more addresses than the processor has, more bytes than addresses, and more than there is."""
        lender.capacity = PAGE
        with pytest.raises(error):
            GrowableBuffer(lender, **({"size": 0, "capacity": CAPACITY, "page_size": PAGE} | wrong))
        assert lender.holdings == set()


class TestThreads:
    def test_many_threads_grow_at_once(self, buffer: GrowableBuffer, lender: Lender) -> None:
        """Sixteen threads append to one buffer: each gets its own range, and together they have no hole."""
        offsets: list[int] = []
        step = PAGE + 1000
        together([lambda: offsets.append(buffer.grow(step))] * 16)
        assert sorted(offsets) == [step * number for number in range(16)]
        assert (buffer.size, lender.lent_bytes) == (16 * step, 17 * PAGE)

    def test_no_lock_is_held_while_borrowing(self, buffer: GrowableBuffer, lender: Lender) -> None:
        """One thread waits for the broker: the others compute on what there is, and the next resize has its turn."""
        buffer.resize(PAGE)
        with held_up(lender, lambda: buffer.resize(3 * PAGE)) as first:
            assert (buffer.size, buffer.physical_usage_bytes) == (PAGE, PAGE)
            buffer.view()[:2] = b"ok"
            assert buffer.span(0, 2).size == 2
            second = threading.Thread(target=buffer.shrink, args=(PAGE,))
            second.start()
            first.go_on()
            second.join()
        assert (buffer.size, lender.lent_bytes) == (2 * PAGE, 2 * PAGE)

    def test_no_view_reaches_what_is_going(self, buffer: GrowableBuffer, lender: Lender) -> None:
        """A thread asks for a view while another, after its check, waits for the device to let go of the last pages."""
        buffer.resize(3 * PAGE)
        seen: list[int] = []

        def look() -> None:
            seen.extend((len(buffer.view()), buffer.size))
            with suppress(InvalidRequest):
                buffer.span(PAGE, 1)
                seen.append(PAGE)

        lender.driver.before_synchronize = look
        buffer.resize(PAGE)
        lender.driver.before_synchronize = lambda: None
        assert seen == [PAGE, PAGE]
