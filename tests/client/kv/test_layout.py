"""Which pages a block touches: the layouts of real engines, and properties that hold for any addresses."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sizes import KIB, MIB

from membroker.errors import InvalidRequest
from membroker.kv.layout import MAX_BLOCKS, Layout, Strided

BASE = 1 << 40


def block_major(block: int, blocks: int, page: int) -> Layout:
    return Layout(BASE, page, blocks, [Strided(BASE, block, block)])


def test_layers_of_a_block_major_cache_given_one_by_one() -> None:
    """An engine registers a view for each layer of one buffer: the layout is that of the buffer."""
    layer, layers = 64 * KIB, 28
    views = [Strided(BASE + n * layer, layer * layers, layer) for n in range(layers)]
    random.Random(1).shuffle(views)
    layout, whole = Layout(BASE, 64 * MIB, 500, views), block_major(layer * layers, 500, 64 * MIB)
    assert layout.block_bytes == layer * layers
    assert [layout.touched(block) for block in range(500)] == [whole.touched(block) for block in range(500)]


def test_keys_and_values_apart() -> None:
    """One tensor per layer with all keys before all values, and the values begin in the middle of a page.

    That page has the last keys and the first values. It belongs to the first group, and the last blocks touch it too.
    """
    block, blocks, page = 32 * KIB, 288, 2 * MIB
    layout = Layout(BASE, page, blocks, [Strided(BASE, block, block), Strided(BASE + block * blocks, block, block)])
    assert layout.groups == 4
    assert layout.ranges(0) == [(0, 2 * MIB), (8 * MIB, 4 * MIB)]
    assert layout.ranges(3) == [(6 * MIB, 2 * MIB), (16 * MIB, 2 * MIB)]
    assert [layout.touched(block) for block in (0, 64, 95, 96, 287)] == [(0,), (0, 1), (0, 1), (1,), (0, 3)]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"blocks": MAX_BLOCKS + 1}, "1 to"),
        ({"page_size": 3 * MIB}, "pages of"),
        ({"tensors": []}, "at least one tensor"),
        ({"tensors": [Strided(BASE - 1, 10, 10)]}, "no blocks like"),
        ({"tensors": [Strided(BASE, 10, 11)]}, "no blocks like"),
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
