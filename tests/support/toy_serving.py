"""A cache and a toy engine in one process: a lender that recalls as a broker does, and the steps of a scheduler."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from membroker.kv import ElasticCache, Layout, Strided
from membroker.pool.pool import VirtualMemoryPool
from membroker.session.recalls import DEFERRED
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_lender import PAGE, Lender
from tests.support.sizes import KIB
from tests.support.toy_engine import Memory, ToyEngine

BLOCKS = 64


class Recall:
    """A recall of `size` bytes, as the library shows it. `answers` counts the calls of `done`."""

    location, is_guaranteed = "device", False

    def __init__(self, lender: Recalled, size: int, seconds: float = 30.0) -> None:
        self.size, self.deadline = size, time.monotonic() + seconds
        self.model = lender
        self._lender, self._before = lender, lender.released_bytes
        self.answers = 0
        self.answered_at = 0.0

    @property
    def remaining(self) -> int:
        return max(0, self.size + self._before - self._lender.released_bytes)

    def done(self) -> None:
        self.answers += 1
        self.answered_at = time.monotonic()


class Urgent:
    """A recall of `size` bytes of a cache for a guarantee, which waits for no request. It begins at once."""

    location, is_guaranteed = "device", True

    def __init__(self, cache: ElasticCache, size: int) -> None:
        self.model, self.deadline = object(), time.monotonic() + DEADLINE_SECONDS
        self._groups, self._least = cache._groups, cache._groups.charged_bytes
        self._left = self._least - size
        assert cache.answer(self) is DEFERRED  # type: ignore[arg-type]

    @property
    def remaining(self) -> int:
        self._least = min(self._least, self._groups.charged_bytes)  # what comes later does not count
        return max(0, self._least - self._left)

    def done(self) -> None: ...


class Recalled(Lender):
    """A lender that asks for memory back, as the model of a broker."""

    resource_name = "tenants/red/models/m"

    def __init__(self) -> None:
        super().__init__()
        self.recall_callback: Callable[[object], object] | None = None
        self.released_bytes = 0

    def give_back(self, extent_ids: Sequence[int]) -> None:
        size = sum(self.lent.get(extent_id, 0) for extent_id in extent_ids)
        super().give_back(extent_ids)
        self.released_bytes += size  # last: who sees that a recall is answered sees that nothing more is lent

    def on_recall(self, callback: Callable[[object], object] | None) -> None:
        self.recall_callback = callback

    def recall(self, size: int, seconds: float = 30.0) -> Recall:
        one = Recall(self, size, seconds)
        assert self.recall_callback(one) is DEFERRED
        return one


@contextmanager
def serving(
    lender: Lender, engine: ToyEngine, *, block: int = 768 * KIB, layers: int = 1, **bounds: object
) -> Iterator[ElasticCache]:
    """Serve `engine` from a new pool: block-major, or with a tensor for each layer."""
    step = -(-block * BLOCKS // PAGE) * PAGE
    with VirtualMemoryPool(lender, layers * step, PAGE) as pool:
        tensors = [Strided(pool.base_address + n * step, block, block) for n in range(layers)]
        Memory(tensors, engine)
        with ElasticCache(pool, Layout(pool.base_address, PAGE, BLOCKS, tensors), **bounds) as cache:
            cache.attach(engine)
            yield cache


def an_engine(*, growth: float = 0.0, **kind: bool) -> ToyEngine:
    engine = ToyEngine(BLOCKS, random.Random(1), **kind)
    engine.growth = growth
    return engine


def step(cache: ElasticCache, engine: ToyEngine) -> None:
    cache.grow()
    engine.step()
    cache.turn()


def steps(cache: ElasticCache, engine: ToyEngine, state: Callable[[], object]) -> None:
    """Step until it is so."""

    def look() -> bool:
        step(cache, engine)
        return bool(state())

    until(look)
