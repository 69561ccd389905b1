"""The KV cache of preempted requests in host memory, so that vLLM need not compute it again.

Owns the slots, each of one block, and what is in them (`Swap`, where vLLM schedules), and the copies (`SwapSpace`, on
each rank). Both kinds of copies are in the order of the engine's own stream: behind the steps before, and in front of
the step that they come with. So no request waits for a copy, and nothing is to be told back.

It relies on two things. vLLM schedules a preempted request again, or ends it. And no step resumes a request that it has
preempted. Of layers with a window a request has only its last blocks; recurrent states and drafts are not kept here.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
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
    """`slots` slots of host memory, and the requests whose contents are in them.

    `sizes` are the tokens of a block in each group of layers, and `skipped` returns how many of a request's first
    tokens a group needs no more when so many are computed.
    """

    def __init__(self, slots: int, sizes: Sequence[int], skipped: Callable[[int, int], int]) -> None:
        self._sizes, self._skipped = sizes, skipped
        self._unit = math.lcm(*sizes)
        self._free = list(range(slots))
        self._slots = slots
        self._tables: dict[str, list[list[int]]] = {}
        """The blocks of each request that runs, by group, and in the order of its tokens."""
        self._computed: dict[str, int] = {}
        """How many tokens of each have been scheduled."""
        self._kept: dict[str, tuple[int, list[dict[int, int]]]] = {}
        """How many tokens of a request are kept, and in each group the slot of each block, by its place."""
        self._saves: Copies = []
        self._loads: Copies = []

    def note(self, step: Any, requests: Mapping[str, Any]) -> None:
        """Keep what a step has preempted, and note the blocks that it has given to requests."""
        if not self._slots:
            return
        for name in [name for name in self._tables if name in (step.preempted_req_ids or ())]:
            self._save(requests[name], self._tables.pop(name), self._computed.pop(name, 0))
        for new in step.scheduled_new_reqs:
            self._tables[new.req_id] = [list(table) for table in new.block_ids]
        others = step.scheduled_cached_reqs
        for name, tables in zip(others.req_ids, others.new_block_ids, strict=True):
            if name in others.resumed_req_ids:
                self._tables[name] = [list(table) for table in tables]
            elif tables is not None and name in self._tables:
                for table, more in zip(self._tables[name], tables, strict=True):
                    table += more
        for name, tokens in step.num_scheduled_tokens.items():
            self._computed[name] = requests[name].num_computed_tokens + tokens

    def _save(self, request: Any, tables: Sequence[Sequence[int]], computed: int) -> None:
        """Keep what a request that was just preempted has in its blocks, from its beginning, as far as slots go.

        Its last block may not be full, and the last of its tokens was not computed yet. Of a window the blocks that it
        needs at a block's end may have gone already, with the next block begun: then nothing is kept.
        """
        tokens = min(computed, request.num_tokens - 1) // self._unit * self._unit
        groups = range(len(self._sizes))
        gone = [self._skipped(group, computed) // self._sizes[group] for group in groups]
        if not any(gone):
            each = sum(self._unit // size for size in self._sizes)
            tokens = min(tokens, len(self._free) // each * self._unit)
        first = [self._skipped(group, tokens) // self._sizes[group] for group in groups]
        last = [tokens // size for size in self._sizes]
        needed = sum(end - begin for begin, end in zip(first, last, strict=True))
        is_there = all(map(int.__le__, gone, first))
        if not (is_there and 0 < needed <= len(self._free)) or request.skip_reading_prefix_cache:
            return
        kept = []
        for table, begin, end in zip(tables, first, last, strict=True):
            kept.append({place: self._free.pop() for place in range(begin, end)})
            self._saves += [(table[place], slot) for place, slot in kept[-1].items()]
        self._kept[request.request_id] = tokens, kept

    def tokens(self, request: Any) -> int:
        """Return how many of a request's tokens are kept: fewer than it has."""
        kept, _ = self._kept.get(request.request_id, (0, []))
        return kept if kept < request.num_tokens else 0

    def load(self, request: Any, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """Put the last `tokens` of what is kept into the request's blocks, and keep nothing of it."""
        kept, groups = self._kept.pop(request.request_id)
        for size, table, slots in zip(self._sizes, tables, groups, strict=True):
            for place, slot in slots.items():
                if place * size >= kept - tokens and table[place]:
                    self._loads.append((table[place], slot))
                else:
                    self._free.append(slot)

    def drop(self, request_id: str) -> None:
        """Keep nothing of a request."""
        for slots in self._kept.pop(request_id, (0, []))[1]:
            self._free += slots.values()

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._tables.pop(request_id, None)
        self._computed.pop(request_id, None)
        self.drop(request_id)

    def clear(self) -> None:
        """Keep nothing of any request. Those that run are computed again."""
        self._tables.clear()
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

    def copy(self, copies: Copies, *, loads: bool) -> None:
        """Queue copies to slots, or with `loads` from slots to blocks, in the order of the current stream."""
        if not copies:
            return
        blocks, slots = torch.tensor(copies, dtype=torch.int64).T
        devices, hosts, sizes, within = [], [], [], 0
        for tensor in self._layout.tensors:
            devices.append(tensor.address + blocks * tensor.stride)
            hosts.append(self._address + within + slots * self._layout.block_bytes)
            sizes.append(torch.full_like(blocks, tensor.size))
            within += tensor.size
        source, target = (hosts, devices) if loads else (devices, hosts)
        self._copy(torch.cat(source), torch.cat(target), torch.cat(sizes))

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
