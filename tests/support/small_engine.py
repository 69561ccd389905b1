"""A small inference engine whose KV cache is as large as its requests need: continuous batching over a block table.

It needs PyTorch and a broker, and runs on the host driver too:

    membrokerd --driver host --capacity 32MiB &
    python tests/support/small_engine.py

Two engines serve in turn over one broker. Each needs more than half of the broker's memory, and releases it when it is
done. The tokens are the same as those of an engine that has all of its memory from the beginning. docs/kv.md explains
the protocol.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext

import torch

import membroker
from membroker.adapters.torch import device_of
from membroker.kv import ElasticCache, Layout, Sleeper
from membroker.kv.capture import Capture, strided

LAYERS, HEADS, DIM, VOCABULARY = 2, 4, 64, 128
BLOCKS, BLOCK_TOKENS = 512, 16  # 128 KiB a block, 64 MiB in all


class Model:
    """A transformer with random weights that keeps its keys and values in blocks."""

    def __init__(self, device: torch.device) -> None:
        generator, width = torch.Generator().manual_seed(0), HEADS * DIM

        def weights(*shape: int) -> torch.Tensor:
            # In 64 bits, so that a preempted request that is computed again gets the same tokens.
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5).to(device)

        self.embed, self.places = weights(VOCABULARY, width), weights(4096, width)
        self.layers = [(weights(width, 3 * width), weights(width, width)) for _ in range(LAYERS)]

    def weights(self) -> list[torch.Tensor]:
        """Return all weights."""
        return [self.embed, self.places, *(one for layer in self.layers for one in layer)]

    def next_token(self, tokens: Sequence[int], start: int, blocks: Sequence[int], cache: torch.Tensor) -> int:
        """Compute the tokens from position `start` on, keep their keys and values, and return the next one."""
        at = torch.arange(start, len(tokens), device=cache.device)
        table = torch.tensor(blocks, device=cache.device)
        state = self.embed[torch.tensor(tokens[start:], device=cache.device)] + self.places[at]
        hidden = torch.arange(len(tokens), device=cache.device) > at[:, None]
        for layer, (inner, outer) in enumerate(self.layers):
            query, key, value = (state @ inner).view(len(at), 3, HEADS, DIM).unbind(1)
            cache[table[at // BLOCK_TOKENS], layer, 0, at % BLOCK_TOKENS] = key
            cache[table[at // BLOCK_TOKENS], layer, 1, at % BLOCK_TOKENS] = value
            keys, values = cache[table, layer].transpose(0, 1).reshape(2, -1, HEADS, DIM)[:, : len(tokens)]
            scores = torch.einsum("qhd,khd->hqk", query, keys) / DIM**0.5
            mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
            state = torch.nn.functional.layer_norm(state + mixed.reshape(len(at), -1) @ outer, state.shape[1:])
        return int((state[-1] @ self.embed.T).argmax())


class Request:
    """A prompt, and the length of the prompt and its answer together."""

    def __init__(self, prompt: Sequence[int], answer: int) -> None:
        self.tokens, self.end = list(prompt), len(prompt) + answer
        self.computed, self.blocks = 0, list[int]()

    def missing(self) -> int:
        """Return how many more blocks the request needs for its tokens."""
        return -(-len(self.tokens) // BLOCK_TOKENS) - len(self.blocks)


class Done:
    """The fence of a device, such as a CPU, whose work is done when a call returns."""

    def query(self) -> bool:
        """Return whether the work is over."""
        return True


class Engine:
    """Requests, a free list of blocks, and the verbs through which `ElasticCache` takes and returns blocks."""

    def __init__(self, model: Model, cache: torch.Tensor) -> None:
        self.model, self.cache = model, cache
        self.free = deque(range(1, BLOCKS))  # block 0 is for padding in real engines
        self.users: dict[int, Request] = {}
        self.waiting, self.running = deque[Request](), list[Request]()

    def need(self) -> int:
        """Return the blocks in use, plus one for each running request, plus those that waiting requests need."""
        return 1 + len(self.users) + len(self.running) + sum(request.missing() for request in self.waiting)

    def unused(self, blocks: Sequence[int]) -> Collection[int]:
        """Return the blocks without a request."""
        return [block for block in blocks if block not in self.users]

    def warmth(self, blocks: Sequence[int]) -> float:
        """Return 0: no prefix is cached here."""
        return 0.0

    def cost(self, blocks: Sequence[int]) -> float:
        """Return how many requests use these blocks, and would begin again without them."""
        return len({self.users[block] for block in blocks if block in self.users})

    def hold(self, blocks: Sequence[int]) -> None:
        """Take blocks out of the free list."""
        held = set(blocks)
        self.free = deque(block for block in self.free if block not in held)

    def release(self, blocks: Sequence[int]) -> None:
        """Put blocks into the free list."""
        self.free.extend(blocks)

    def fence(self) -> Done | torch.cuda.Event:
        """Record an event after the work of all steps."""
        if not self.cache.is_cuda:
            return Done()
        event = torch.cuda.Event()
        event.record()
        return event

    def preempt(self, blocks: Sequence[int]) -> bool:
        """Let the requests that use these blocks begin again later."""
        for request in {self.users[block] for block in blocks if block in self.users}:
            self.end(request)
            self.waiting.appendleft(request)
        return True

    def end(self, request: Request) -> None:
        """Take the blocks of a running request. If it runs again, it is computed from its beginning."""
        self.running.remove(request)
        for block in request.blocks:
            del self.users[block]
        self.free.extend(request.blocks)
        request.blocks, request.computed = [], 0

    def give(self, request: Request) -> None:
        """Give a request the blocks that it still needs."""
        for _ in range(request.missing()):
            request.blocks.append(self.free.popleft())
            self.users[request.blocks[-1]] = request

    def step(self) -> None:
        """Admit requests that have room, and compute one token of each running request."""
        while self.waiting and self.waiting[0].missing() <= len(self.free) - len(self.running):
            self.running.append(self.waiting.popleft())
            self.give(self.running[-1])
        for request in list(self.running):
            while request in self.running and request.missing() > len(self.free):
                self.preempt(self.running[-1].blocks)  # the youngest
            if request in self.running:
                self.give(request)
                token = self.model.next_token(request.tokens, request.computed, request.blocks, self.cache)
                request.computed = len(request.tokens)
                request.tokens.append(token)
                if len(request.tokens) >= request.end:
                    self.end(request)


def serve(engine: Engine, elastic: ElasticCache | None = None, sleeper: Sleeper | None = None) -> list[list[int]]:
    """Serve some requests, and return their tokens. An engine that sleeps wakes first."""
    requests = [Request([(7 * n + at) % VOCABULARY for at in range(200 + 20 * n)], 12) for n in range(8)]
    with sleeper.awake() if sleeper is not None else nullcontext():
        return run(engine, requests, elastic)


def run(engine: Engine, requests: Sequence[Request], elastic: ElasticCache | None = None) -> list[list[int]]:
    """Serve these requests, and return their tokens."""
    engine.waiting.extend(requests)
    while engine.waiting or engine.running:
        if elastic is not None:
            elastic.grow()  # reports what the engine needs, and puts blocks that have memory now into the free list
        engine.step()
        if elastic is not None:
            elastic.turn()  # takes blocks that will lose their memory out of the free list
        if not engine.running:
            time.sleep(0.001)
    if elastic is not None:
        elastic.rest()
    return [request.tokens for request in requests]


def kv_tensor(device: torch.device) -> torch.Tensor:
    """Allocate the cache as engines do: all of it at once."""
    return torch.zeros(BLOCKS, LAYERS, 2, BLOCK_TOKENS, HEADS, DIM, dtype=torch.float64, device=device)


def elastic_engine(lender: membroker.Model, model: Model, device: torch.device) -> tuple[Engine, ElasticCache]:
    """Return an engine whose cache borrows from `lender`."""
    pool = lender.pool(page_size="2MiB")
    with Capture(pool):
        tensor = kv_tensor(device)  # addresses, and no memory yet
    layout = Layout(pool.base_address, pool.page_size, BLOCKS, strided(tensor, 0))
    engine, elastic = Engine(model, tensor), ElasticCache(pool, layout, ahead="4MiB")
    elastic.attach(engine)
    return engine, elastic


def main() -> None:
    """Serve with all memory from the beginning, then with two engines that share the broker's memory."""
    with membroker.connect() as client:
        lenders = [client.model(name, virtual_capacity="64MiB") for name in ("first", "second")]
        device = device_of(lenders[0].driver.device)
        model = Model(device)
        expected = serve(Engine(model, kv_tensor(device)))
        served = [(lender.name, *elastic_engine(lender, model, device)) for lender in lenders]
        for name, engine, elastic in served * 2:
            before = elastic.stats().grants
            same = serve(engine, elastic) == expected
            borrowed = 2 * (elastic.stats().grants - before)
            print(f"{name}: the same tokens: {same}; it borrowed {borrowed} MiB for them")
            while elastic.stats().charged_bytes > 8 << 20:
                time.sleep(0.01)
        for _, _, elastic in served:
            elastic.close()


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
