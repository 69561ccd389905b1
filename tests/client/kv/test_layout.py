"""Which pages a block touches: properties that hold for any addresses, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import budget
from tests.support.sizes import MIB

from membroker.errors import InvalidRequest
from membroker.kv.layout import MAX_BLOCKS, Layout, Strided

BASE = 1 << 40


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"blocks": MAX_BLOCKS + 1}, "1 to"),
        ({"page_size": 3 * MIB}, "pages of"),
        ({"tensors": []}, "at least one tensor"),
        ({"tensors": [Strided(BASE - 1, 10, 10)]}, "no blocks like"),
        ({"tensors": [Strided(BASE, 100, 100), Strided(BASE + 50, 100, 100)]}, "overlap"),
        ({"tensors": [Strided(BASE, 1 << 40, 1 << 40)], "blocks": 100}, "more than"),
    ],
)
def test_what_is_refused(wrong: dict[str, object], why: str) -> None:
    right = {"base": BASE, "page_size": 2 * MIB, "blocks": 10, "tensors": [Strided(BASE, 100, 100)]}
    Layout(**right)
    with pytest.raises(InvalidRequest, match=why):
        Layout(**right | wrong)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, list[Strided]]:
    """Tensors of any sizes, strides and places that do not overlap, in small pages."""
    page = 1 << draw(st.integers(4, 8))
    blocks = draw(st.integers(1, 60))
    tensors, at = [], BASE
    for _ in range(draw(st.integers(1, 5))):
        at += draw(st.integers(0, 2 * page))
        parts = draw(st.lists(st.integers(1, 3 * page), min_size=1, max_size=3))
        stride = sum(parts) + draw(st.integers(0, page))
        within = 0
        for size in parts:
            tensors.append(Strided(at + within, stride, size))
            within += size
        at = tensors[-1].end(blocks)
    return Layout(BASE, page, blocks, draw(st.permutations(tensors))), tensors


@budget(100)
@given(layouts())
def test_any_layout(found: tuple[Layout, list[Strided]]) -> None:
    """A block touches the group of each of its bytes, each page is in one group, and both tables agree."""
    layout, tensors = found
    group_of: dict[int, int] = {}
    for group in range(layout.groups):
        ranges = layout.ranges(group)
        assert ranges == sorted(ranges)
        assert sum(size for _, size in ranges) == layout.bytes_of(group) > 0
        for offset, size in ranges:
            assert offset % layout.page_size == size % layout.page_size == 0
            for page in range(offset // layout.page_size, (offset + size) // layout.page_size):
                assert group_of.setdefault(page, group) == group
    reached = set()
    for block in range(layout.blocks):
        needed = set()
        for one in tensors:
            begin = one.address - BASE + block * one.stride
            pages = range(begin // layout.page_size, (begin + one.size - 1) // layout.page_size + 1)
            needed.update(group_of[page] for page in pages)
            reached.update(pages)
        assert needed <= set(layout.touched(block))
        assert list(layout.touched(block)) == sorted(set(layout.touched(block)))
        for group in range(layout.groups):
            assert (block in layout.members(group)) == (group in layout.touched(block))
    assert reached <= group_of.keys()
    assert all(layout.members(group) for group in range(layout.groups)), "no group is without a block"
    assert layout.block_bytes >= sum(one.size for one in tensors)
