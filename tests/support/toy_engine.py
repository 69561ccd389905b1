"""An engine that serves made-up requests from a block table, as vLLM's scheduler does: for tests of `membroker.kv`.

It computes nothing. It allocates, reads and frees blocks, finds cached prefixes, preempts its youngest request when no
block is free, and answers the verbs of `membroker.kv.Engine`. `look` is called with each block that a request touches.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from membroker.kv import Strided


@dataclass(eq=False)
class Request:
    """`blocks_left` more blocks are to be written. `prefix` names cached contents that other requests share.

    `mark` is what the request leaves in its blocks. It is another one after each preemption.
    """

    blocks_left: int
    prefix: int = 0
    blocks: list[int] = field(default_factory=list)
    decode_left: int = 4
    mark: int = field(default_factory=partial(next, itertools.count(1)))


class Fence:
    """Passed when the test says so, or at once."""

    def __init__(self, passed: bool = True) -> None:
        self.passed = passed
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.passed


class ToyEngine:
    """`caches` says whether freed blocks keep their contents, `preempts` whether requests can be preempted."""

    def __init__(
        self, blocks: int, rng: random.Random, *, caches: bool = False, preempts: bool = True, reserved: int = 1
    ) -> None:
        self.rng, self.caches, self.preempts = rng, caches, preempts
        self.free = list(range(reserved, blocks))
        self.total = blocks - reserved
        self.held: set[int] = set()
        self.used: dict[int, Request] = {}
        self.contents: dict[int, tuple[int, float]] = {}
        """Of a free block: the prefix that is cached there, and when it was last used."""
        self.clock = 0.0
        self.growth = 0.3
        """How likely a running request writes one more block in a step."""
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.finished = 0
        self.preempted = 0
        self.look: Callable[[int], None] = lambda block: None
        self.fences: list[Fence] = []
        self.make_fence: Callable[[], Fence] = Fence

    # The verbs

    def need(self) -> int:
        return 1 + len(self.used) + len(self.running) + sum(request.blocks_left for request in self.waiting)

    def unused(self, blocks: Sequence[int]) -> Collection[int]:
        return [block for block in blocks if block not in self.used]

    def warmth(self, blocks: Sequence[int]) -> float:
        return max((self.contents[block][1] for block in blocks if block in self.contents), default=0.0)

    def cost(self, blocks: Sequence[int]) -> float:
        return len(blocks) - len(self.unused(blocks))

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.free.remove(block)
            self.contents.pop(block, None)
            self.held.add(block)

    def release(self, blocks: Sequence[int]) -> None:
        self.held.difference_update(blocks)
        self.free.extend(blocks)

    def fence(self) -> Fence:
        self.fences.append(self.make_fence())
        return self.fences[-1]

    def preempt(self, blocks: Sequence[int]) -> bool:
        if self.preempts:
            for block in blocks:
                if block in self.used:
                    self._preempt(self.used[block])
        return self.preempts

    # Serving

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> None:
        """Admit what fits, in order, and let each running request write a block or finish."""
        self.clock += 1
        while self.waiting and len(self.free) >= self.waiting[0].blocks_left + len(self.running):
            request = self.waiting.pop(0)
            self.running.append(request)
            while request.blocks_left:
                self._write(request)
        for request in list(self.running):
            if request not in self.running:  # preempted by one before it
                continue
            for block in request.blocks:
                self.look(block)
            request.decode_left -= 1
            if request.decode_left <= 0:
                self._finish(request)
            elif self.rng.random() < self.growth:
                while not self.free and self.running[-1] is not request:
                    self._preempt(self.running[-1])
                if self.free:
                    request.blocks_left += 1
                    self._write(request)
                else:
                    self._preempt(request)
        assert len(self.free) + len(self.held) + len(self.used) == self.total, "a block is lost, or there twice"

    def _write(self, request: Request) -> None:
        block = self.free.pop(0)
        self.contents.pop(block, None)
        assert block not in self.used
        self.used[block] = request
        request.blocks.append(block)
        request.blocks_left -= 1
        self.look(block)

    def _give(self, request: Request) -> None:
        for block in request.blocks:
            del self.used[block]
            if self.caches and request.prefix:
                self.contents[block] = (request.prefix, self.clock)
                self.free.append(block)
            else:
                self.free.insert(0, block)  # as vLLM does with blocks that cache nothing
        self.running.remove(request)

    def _finish(self, request: Request) -> None:
        self._give(request)
        self.finished += 1

    def _preempt(self, request: Request) -> None:
        self._give(request)
        request.blocks_left, request.blocks = request.blocks_left + len(request.blocks), []
        request.mark = Request(0).mark
        self.waiting.insert(0, request)
        self.preempted += 1


class Memory:
    """The bytes of the blocks: each request leaves its mark in its blocks, and finds it there again."""

    def __init__(self, tensors: Sequence[Strided], engine: ToyEngine) -> None:
        self._tensors, self._engine = tensors, engine
        self.marks: dict[int, int] = {}
        engine.look = self.look

    def look(self, block: int) -> None:
        mark = self._engine.used[block].mark
        for one in self._tensors:
            at = one.address + block * one.stride
            for address in (at, at + one.size - 4):
                word = ctypes.c_uint32.from_address(address)
                if self.marks.get(block) == mark:
                    assert word.value == mark, f"block {block} lost its bytes"
                word.value = mark
        self.marks[block] = mark
