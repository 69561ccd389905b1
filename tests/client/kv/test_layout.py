"""Which pages a block touches: the layouts of real engines, and properties that hold for any addresses."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sizes import GIB, KIB, MIB

from membroker.errors import InvalidRequest
from membroker.kv.layout import MAX_BLOCKS, Layout, Strided

BASE = 1 << 40


def block_major(block: int, blocks: int, page: int) -> Layout:
    return Layout(BASE, page, blocks, [Strided(BASE, block, block)])


def layer_major(layers: int, block: int, blocks: int, page: int) -> Layout:
    """A tensor for each layer, each at a page of its own."""
    step = -(-block * blocks // page) * page
    return Layout(BASE, page, blocks, [Strided(BASE + n * step, block, block) for n in range(layers)])


def test_llama_block_major() -> None:
    """Llama-3.1-8B: a block is 2 MiB, so a page of 64 MiB has 32 of them and none straddles two pages."""
    layout = block_major(2 * MIB, 1024, 64 * MIB)
    assert (layout.groups, layout.block_bytes) == (32, 2 * MIB)
    assert list(layout.members(1)) == list(range(32, 64))
    assert layout.ranges(1) == [(64 * MIB, 64 * MIB)]
    assert layout.bytes_of(1) == 64 * MIB
    assert {len(layout.touched(block)) for block in range(1024)} == {1}


def test_qwen_block_major() -> None:
    """Qwen3-1.7B: a block is 1.75 MiB. Block 36 has bytes in pages 0 and 1, and is used once both are mapped."""
    layout = block_major(7 * MIB // 4, 1024, 64 * MIB)
    assert layout.touched(36) == (0, 1)
    assert (layout.members(0)[-1], layout.members(1)[0]) == (36, 36)
    straddling = [block for block in range(1024) if len(layout.touched(block)) == 2]
    assert len(straddling) == 27 - 3, "every boundary of the 28 pages, but for each seventh, where a block ends"


def test_layer_major() -> None:
    """28 layers by 2 MiB pages: a group is the same page of each of the 28 tensors, 512 tokens in 56 MiB."""
    layout = layer_major(28, 64 * KIB, 4096, 2 * MIB)
    assert layout.groups == 128
    assert layout.bytes_of(3) == 56 * MIB
    assert list(layout.members(3)) == list(range(96, 128))
    assert layout.ranges(3) == [(n * 256 * MIB + 6 * MIB, 2 * MIB) for n in range(28)]


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


def test_layers_of_two_sizes() -> None:
    """Half of the layers have blocks of twice the size: a group has two pages of those for one of the others."""
    blocks, page = 1024, 2 * MIB
    tensors = [Strided(BASE, 64 * KIB, 64 * KIB), Strided(BASE + GIB, 128 * KIB, 128 * KIB)]
    layout = Layout(BASE, page, blocks, tensors)
    assert layout.groups == 32
    assert layout.ranges(1) == [(2 * MIB, 2 * MIB), (GIB + 4 * MIB, 4 * MIB)]
    assert list(layout.members(1)) == list(range(32, 64))


def test_blocks_larger_than_a_page() -> None:
    """A block of 5 MiB by 2 MiB pages: a group has the pages from one block's beginning to the next one's."""
    layout = block_major(5 * MIB, 10, 2 * MIB)
    assert layout.groups == 10
    assert [layout.touched(block) for block in range(4)] == [(0, 1), (1,), (2, 3), (3,)]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"blocks": 0}, "1 to"),
        ({"blocks": MAX_BLOCKS + 1}, "1 to"),
        ({"page_size": 3 * MIB}, "pages of"),
        ({"base": BASE + 1}, "pages of"),
        ({"tensors": []}, "at least one tensor"),
        ({"tensors": [Strided(BASE - 1, 10, 10)]}, "no blocks like"),
        ({"tensors": [Strided(BASE, 10, 11)]}, "no blocks like"),
        ({"tensors": [Strided(BASE, 10, 0)]}, "no blocks like"),
        ({"tensors": [Strided(BASE, 1 << 62, 1 << 62)]}, "no blocks like"),
        ({"tensors": [Strided(BASE, 100, 100), Strided(BASE + 50, 100, 100)]}, "overlap"),
        ({"tensors": [Strided(BASE, 100, 50), Strided(BASE + 50, 200, 50)]}, "overlap"),
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
