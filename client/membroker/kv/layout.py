"""`Layout`: which pages each block of a KV cache touches, and which blocks each page has.

Owns arithmetic on addresses, and nothing else: it maps no memory and knows no engine. It must never look at the shape
of a tensor. Block-major, layer-major, K and V apart, and MLA differ only in addresses, strides and sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import InvalidRequest
from ..vmm.sizes import MAX_BYTES, is_power_of_two, joined

MAX_BLOCKS = 1 << 24
MAX_PAGES = 1 << 22
"""The most that one layout describes. A terabyte of 2 MiB pages has 2^19, and a table of them takes a second."""


@dataclass(frozen=True, slots=True)
class Strided:
    """The blocks of one tensor: block `b` has the `size` bytes at `address + b * stride`.

    A tensor with K and V apart has two of these: one for its keys, and one for its values.
    """

    address: int
    stride: int
    size: int

    def end(self, blocks: int) -> int:
        """Return the address after the last byte of the last of so many blocks."""
        return self.address + (blocks - 1) * self.stride + self.size


class Layout:
    """`blocks` blocks of a KV cache in the pages of a pool at `base`. Immutable.

    A *page* is a page of the pool: `page_size` bytes, numbered from `base`. A *group* is a set of pages that are
    borrowed, mapped and released together, because the same blocks need them. If each layer has its own tensor
    (layer-major), a group is the same page of every tensor. If a block has the bytes of all layers side by side
    (block-major), a group is one page. Groups are numbered by the blocks in them, so a lower group has lower blocks.
    Every page of a tensor is in exactly one group.

    A block may touch several groups, and can be used only while all of them are mapped. Pages that no tensor reaches
    are in no group.

    Raises `InvalidRequest` for sizes that are not positive, a tensor below `base`, blocks that overlap, tensors that
    overlap, and more than `MAX_BLOCKS` blocks or `MAX_PAGES` pages.
    """

    def __init__(self, base: int, page_size: int, blocks: int, tensors: Iterable[Strided]):
        if not is_power_of_two(page_size) or base % page_size:
            raise InvalidRequest(f"pages of {page_size} bytes cannot begin at {base:#x}: give the pool's own figures")
        if not 0 < blocks <= MAX_BLOCKS:
            raise InvalidRequest(f"a cache has 1 to {MAX_BLOCKS} blocks, not {blocks}")
        self.base = base
        self.page_size = page_size
        self.blocks = blocks
        self.tensors: Sequence[Strided] = _joined(base, blocks, tensors)
        """By address. Those that interleave are one."""
        self.block_bytes: int = sum(tensor.size for tensor in self.tensors)
        """Bytes of one block in all tensors together."""
        self._pages, tables = _groups(base, page_size, blocks, self.tensors)
        self._touched = _touched(base, page_size, blocks, self.tensors, tables)
        self._members: list[list[int]] = [[] for _ in self._pages]
        for block, groups in enumerate(self._touched):
            for group in groups:
                self._members[group].append(block)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self._pages)

    def touched(self, block: int) -> tuple[int, ...]:
        """Return the groups that have bytes of a block, in ascending order."""
        return self._touched[block]

    def members(self, group: int) -> Sequence[int]:
        """Return the blocks that have bytes in a group, in ascending order."""
        return self._members[group]

    def ranges(self, group: int) -> list[tuple[int, int]]:
        """Return the pages of a group as ranges of the pool, (offset, size) in bytes, in ascending order."""
        return joined((page * self.page_size, self.page_size) for page in self._pages[group])

    def bytes_of(self, group: int) -> int:
        """Return the bytes of a group's pages: what is charged while it is mapped."""
        return len(self._pages[group]) * self.page_size

    def __repr__(self) -> str:
        return f"<membroker.kv.Layout of {self.blocks} blocks in {self.groups} groups>"


def _joined(base: int, blocks: int, tensors: Iterable[Strided]) -> list[Strided]:
    """Return the tensors by address, those that interleave as one, after checking them.

    The layers of a block-major cache are often given one by one: they have one stride, and lie within it.
    """
    found: list[Strided] = []
    for tensor in sorted(set(tensors), key=lambda tensor: (tensor.address, tensor.stride, tensor.size)):
        if tensor.address < base or not 0 < tensor.size <= tensor.stride <= MAX_BYTES or tensor.end(blocks) > MAX_BYTES:
            raise InvalidRequest(
                f"a cache at {base:#x} has no blocks like {tensor}: a block is at most its stride long"
            )
        last = found[-1] if found else None
        if last is None or tensor.address >= last.end(blocks):
            found.append(tensor)
            continue
        size = max(last.size, tensor.address + tensor.size - last.address)
        if tensor.stride != last.stride or size > last.stride:
            raise InvalidRequest(f"the blocks of {last} and of {tensor} overlap")
        found[-1] = Strided(last.address, last.stride, size)
    if not found:
        raise InvalidRequest("a cache has at least one tensor")
    return found


def _groups(base: int, size: int, blocks: int, tensors: Sequence[Strided]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the pages of each group, and for each tensor the group of each of its pages, from its first one on.

    A group begins with a page of the tensor that has the most blocks in a page. Each page joins the group that has the
    beginning of the first block which begins in it. A page with parts of two tensors joins the lower group.
    """
    lead = min(tensors, key=lambda tensor: tensor.stride)
    lead_within = (lead.address - base) % size
    reach = [range((tensor.address - base) // size, (tensor.end(blocks) - 1 - base) // size + 1) for tensor in tensors]
    if sum(map(len, reach)) > MAX_PAGES:
        raise InvalidRequest(f"the cache has more than {MAX_PAGES} pages of {size} bytes: take larger pages")
    keys: dict[int, int] = {}
    for tensor, pages in zip(tensors, reach, strict=True):
        within = (tensor.address - base) % size
        for number, page in enumerate(pages):
            begin = number * size - within
            first = max(0, -(-begin // tensor.stride))
            if first >= blocks or first * tensor.stride >= begin + size:
                first = min(begin // tensor.stride, blocks - 1)
            key = (lead_within + first * lead.stride) // size
            keys[page] = min(key, keys.get(page, key))
    numbers = {key: number for number, key in enumerate(sorted(set(keys.values())))}
    groups: list[list[int]] = [[] for _ in numbers]
    for page in sorted(keys):
        groups[numbers[keys[page]]].append(page)
    return groups, [[numbers[keys[page]] for page in pages] for pages in reach]


def _touched(
    base: int, size: int, blocks: int, tensors: Sequence[Strided], tables: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Return the groups of each block. Tensors whose pages have the same blocks and groups are looked at once."""
    alike = {
        ((tensor.address - base) % size, tensor.stride, tensor.size, tuple(table)): table
        for tensor, table in zip(tensors, tables, strict=True)
    }
    same: dict[tuple[int, ...], tuple[int, ...]] = {}
    found = []
    for block in range(blocks):
        groups: set[int] = set()
        for (within, stride, length, _), table in alike.items():
            begin = within + block * stride
            groups.update(table[begin // size : (begin + length - 1) // size + 1])
        key = tuple(sorted(groups))
        found.append(same.setdefault(key, key))  # most blocks share theirs with their neighbours
    return found
