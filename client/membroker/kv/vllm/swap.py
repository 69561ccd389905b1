"""The KV cache of preempted requests in host memory, so that vLLM need not compute it again.

Owns the slots, each of one block, and what is in them (`Swap`, where vLLM schedules), and the copies (`SwapSpace`, on
each rank). Both kinds of copies are in the order of the engine's own stream: behind the steps before, and in front of
the step that they come with. So no request waits for a copy, and nothing is to be told back.

It relies on three things. vLLM schedules a preempted request again, or ends it. A request that runs has computed all
tokens in its blocks but those in the last one. And no step resumes a request that it has preempted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import InvalidRequest
from ...ext import Source
from ...vmm import Location
from ...vmm.sizes import format_size
from ..layout import Layout

Copies = list[tuple[int, int]]
"""Pairs of a block and a slot."""


class Swap:
    """`slots` slots of host memory, and the requests whose contents are in them. A block has `block_tokens` tokens."""

    def __init__(self, slots: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._free = list(range(slots))
        self._kept: dict[str, list[int]] = {}
        """The slots of each request that is kept, in the order of its tokens."""
        self._saves: Copies = []
        self._loads: Copies = []

    def save(self, request: Any, blocks: Sequence[int]) -> None:
        """Keep what a request that was just preempted has in its `blocks`, from its beginning, as far as slots go.

        Its last block may not be full, and the last of its tokens was not computed yet.
        """
        full = min(len(blocks) - 1, (request.num_tokens - 1) // self._block_tokens, len(self._free))
        if full > 0 and not request.skip_reading_prefix_cache:
            slots = [self._free.pop() for _ in range(full)]
            self._kept[request.request_id] = slots
            self._saves += zip(blocks, slots, strict=False)

    def tokens(self, request: Any) -> int:
        """Return how many of a request's tokens are kept: fewer than it has."""
        kept = len(self._kept.get(request.request_id, ())) * self._block_tokens
        return kept if kept < request.num_tokens else 0

    def load(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """Put the last `tokens` of what is kept into the request's `blocks`, and keep nothing of it."""
        slots = self._kept.pop(request.request_id)
        first = len(slots) - tokens // self._block_tokens
        self._free += slots[:first]
        self._loads += zip(blocks[first:], slots[first:], strict=False)

    def drop(self, request_id: str) -> None:
        """Keep nothing of a request."""
        self._free += self._kept.pop(request_id, ())

    def clear(self) -> None:
        """Keep nothing of any request."""
        for request_id in list(self._kept):
            self.drop(request_id)

    def step(self) -> tuple[Copies, Copies]:
        """Return what is to be saved before a step, and what is to be loaded."""
        saves, loads = self._saves, self._loads
        self._saves, self._loads = [], []
        self._free += [slot for _, slot in loads]  # what is saved with the next step comes later
        return saves, loads


class SwapSpace:
    """Pinned host memory for the blocks of `layout`, as many as fit into `size` bytes. `source` is charged for it.

    Raises `OutOfMemory` if the broker does not lend so much host memory, and `DriverError` if there is not so much.
    """

    def __init__(self, source: Source, layout: Layout, size: int, *, on_gpu: bool) -> None:
        self._source, self._layout = source, layout
        self._copy = _copy_on_gpu if on_gpu else _copy_on_cpu
        self._size = slots_in(size, layout) * layout.block_bytes
        source.charge(self._size, Location.HOST)
        try:
            self._address = source.driver.pin(self._size)
        except BaseException:
            source.credit(self._size, Location.HOST)
            raise

    def save(self, copies: Copies) -> None:
        """Queue copies from blocks to slots, in the order of the current stream."""
        if copies:
            device, host, sizes = self._places(copies)
            self._copy(device, host, sizes)

    def load(self, copies: Copies) -> None:
        """Queue copies from slots to blocks, in the order of the current stream."""
        if copies:
            device, host, sizes = self._places(copies)
            self._copy(host, device, sizes)

    def _places(self, copies: Copies) -> tuple[Any, Any, Any]:
        """Return the addresses of all pieces of blocks, of the same in their slots, and the sizes."""
        blocks, slots = torch.tensor(copies, dtype=torch.int64).T
        devices, hosts, sizes, within = [], [], [], 0
        for tensor in self._layout.tensors:
            devices.append(tensor.address + blocks * tensor.stride)
            hosts.append(self._address + within + slots * self._layout.block_bytes)
            sizes.append(torch.full_like(blocks, tensor.size))
            within += tensor.size
        return torch.cat(devices), torch.cat(hosts), torch.cat(sizes)

    def close(self) -> None:
        """Wait for the copies, and free the memory."""
        self._source.driver.unpin(self._address)
        self._source.credit(self._size, Location.HOST)


def slots_in(size: int, layout: Layout) -> int:
    """Return how many blocks fit into `size` bytes. Raises `InvalidRequest` if none does."""
    if slots := size // layout.block_bytes:
        return slots
    raise InvalidRequest(
        f"swap_space is at least {format_size(layout.block_bytes)}, one block of this model, not {format_size(size)}"
    )


def _copy_on_gpu(source: Any, target: Any, sizes: Any) -> None:
    from vllm import _custom_ops

    # Not on the stream itself: it may be CUDA's default one, where a batch of copies is refused.
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        _custom_ops.swap_blocks_batch(source, target, sizes)
    current.wait_stream(stream)


def _copy_on_cpu(source: Any, target: Any, sizes: Any) -> None:
    for here, there, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(there, here, size)
