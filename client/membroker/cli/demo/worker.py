"""A worker of the demo: a real process that borrows, as told by lines of JSON on its standard input.

It serves a model with a paged cache, as an inference engine does: each request holds some pages, every page carries a
pattern of its own, and the pattern is checked before the page goes back. Its weights are a segment, which it makes or
attaches. It can work on its own, too: compute and borrow without an end, whatever becomes of the broker. Must never
know anything of the other workers.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import membroker

PAGE = 2 << 20
WEIGHTS = "weights"
COMPUTED, BORROWED = -1, -2
"""Requests of a worker that works on its own: it computes on the pages of the one, and the other comes and goes."""


class PageLost(Exception):
    """A page does not hold what was written into it."""


class Cache:
    """A paged cache over a pool: requests hold pages, wherever in the pool they are."""

    def __init__(self, pool: membroker.VirtualMemoryPool) -> None:
        self._pool = pool
        self._requests: dict[int, list[int]] = {}
        self._rounds: dict[int, int] = {}
        self._free = list(range(pool.capacity // PAGE - 1, -1, -1))
        self._releasing = threading.Lock()
        """A recall is answered in a thread of the library."""
        self.pages_checked: int = 0

    @property
    def held(self) -> int:
        """Bytes that are mapped."""
        with self._releasing:
            return self._pool.physical_usage_bytes

    def admit(self, request: int, pages: int) -> float:
        """Take a request: back its pages and write into each. Returns how many seconds it took to get the pages."""
        held: list[int] = []
        waited = 0.0
        self._requests[request] = held
        self._rounds[request] = 0
        for _ in range(pages):
            page = self._free.pop()
            begun = time.monotonic()
            try:
                self._pool.allocate(page * PAGE, PAGE)
            except BaseException:
                self._free.append(page)
                self.finish(request)
                raise
            waited += time.monotonic() - begun
            held.append(page)
            self._pool.view(page * PAGE, PAGE)[:] = _pattern(request, page)
        return waited

    def finish(self, request: int) -> None:
        """End a request: check its pages and release them."""
        for page in self._requests.pop(request):
            self._check(request, page)
            self.pages_checked += 1
            self._pool.free(page * PAGE, PAGE)
            self._free.append(page)

    def _check(self, request: int, page: int) -> None:
        """Compare a page with what was written into it last."""
        if self._pool.view(page * PAGE, PAGE) != _pattern(request, page, self._rounds[request]):
            raise PageLost(f"page {page} of request {request} does not hold what was written into it")

    def compute(self, request: int) -> None:
        """Make one round over the pages of a request: check each, and write something else into it. Asks no broker."""
        for page in self._requests[request]:
            self._check(request, page)
        self._rounds[request] += 1
        for page in self._requests[request]:
            self._pool.view(page * PAGE, PAGE)[:] = _pattern(request, page, self._rounds[request])

    def check_all(self) -> None:
        """Check every page that is held."""
        with self._releasing:
            for request, pages in self._requests.items():
                for page in pages:
                    self._check(request, page)

    def release(self, recall: membroker.Recall) -> None:
        """Answer a recall: end requests, the youngest first, until as much is released as the broker asks for."""
        with self._releasing:
            while recall.remaining and self._requests:
                self.finish(next(reversed(self._requests)))

    def finish_all(self) -> None:
        """End every request."""
        for request in list(self._requests):
            self.finish(request)


class DemoWeights:
    """A model's weights: one tensor in a segment, written here or by another worker."""

    def __init__(self, client: membroker.Client, model: membroker.Model) -> None:
        self._client = client
        self._model = model
        self._segment: membroker.Segment | None = None

    def publish(self, size: int) -> None:
        """Make the segment, write a pattern into its tensor, and seal it."""
        segment = self._segment = self._model.create_segment(WEIGHTS, size)
        room = size - PAGE // 2
        tensor = segment.lay_out({WEIGHTS: ("U32", (room // 4,))})[WEIGHTS]
        for offset in range(0, tensor.size, PAGE):
            segment.write(tensor.offset + offset, _pattern(0, offset)[: tensor.size - offset])
        segment.seal()

    def attach(self) -> None:
        """Attach what another worker has written."""
        self._segment = self._client.attach(f"{self._model.name}/{WEIGHTS}")

    def checksum(self) -> int:
        """Return the checksum of the tensor, found by its name in the segment itself."""
        assert self._segment is not None
        tensor = self._segment.index()[WEIGHTS]
        with self._segment.view() as view:
            return zlib.crc32(view[tensor.offset : tensor.offset + tensor.size])

    @property
    def size(self) -> int:
        """Bytes that are mapped here."""
        return 0 if self._segment is None or self._segment.closed else self._segment.size

    def close(self) -> None:
        """Unmap it here."""
        assert self._segment is not None
        self._segment.close()

    def delete(self) -> None:
        """End it, for everybody."""
        self._client.delete_segment(f"{self._model.name}/{WEIGHTS}")


class Work:
    """Computing and borrowing over and over, in a thread each. Times are of CLOCK_MONOTONIC, as the demo's."""

    def __init__(self, cache: Cache, pages: int) -> None:
        self._cache = cache
        self._over = False
        self._changed = threading.Condition()
        self._computed: list[tuple[float, float]] = []
        self._borrowed: list[tuple[float, float]] = []
        self._failure: Exception | None = None
        cache.admit(COMPUTED, pages)
        self._threads = [
            threading.Thread(target=self._go_on, args=(cache.compute, COMPUTED, self._computed)),
            threading.Thread(target=self._go_on, args=(self._borrow, BORROWED, self._borrowed)),
        ]
        for thread in self._threads:
            thread.start()
        self._wait_until(lambda: bool(self._computed and self._borrowed))

    def wait_for_a_round(self, dead: float) -> None:
        """Return when a round is computed that began after the broker was `dead`."""
        self._wait_until(lambda: self._computed[-1][0] >= dead)

    def end(self, dead: float, ready: float) -> dict[str, Any]:
        """Stop when a page was borrowed that was asked for after the broker was `dead`.

        Returns the rounds that were computed before the next one was `ready`, whole ones, and how many seconds nothing
        could be borrowed.
        """
        self._wait_until(lambda: self._borrowed[-1][0] >= dead)
        self._stop()
        rounds = sum(1 for begun, done in self._computed if begun >= dead and done <= ready)
        return {"rounds": rounds, "away": next(done for begun, done in self._borrowed if begun >= dead) - dead}

    def _borrow(self, request: int) -> None:
        self._cache.admit(request, 1)
        self._cache.finish(request)

    def _go_on(self, work: Callable[[int], None], request: int, times: list[tuple[float, float]]) -> None:
        try:
            while not self._over:
                begun = time.monotonic()
                work(request)
                with self._changed:
                    times.append((begun, time.monotonic()))
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - raised by the thread that is told to end the work
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure or holds())
        if self._failure is not None:
            self._stop()
            raise self._failure

    def _stop(self) -> None:
        self._over = True
        for thread in self._threads:
            thread.join()


def _pattern(request: int, page: int, round_: int = 0) -> bytes:
    seed = zlib.crc32(b"%d/%d/%d" % (request, page, round_))
    return seed.to_bytes(4, "little") * (PAGE // 4)


class DemoEngine:
    """What a worker has, and how it obeys an order."""

    def __init__(self, model: membroker.Model, cache: Cache, weights: DemoWeights) -> None:
        self._model = model
        self._cache = cache
        self._weights = weights
        self._work: Work | None = None

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what an order says, and return the answer to it."""
        cache, weights = self._cache, self._weights
        match order["do"]:
            case "publish":
                weights.publish(order["size"])
            case "attach":
                weights.attach()
            case "sum":
                return {"sum": weights.checksum()}
            case "let go":
                weights.close()
            case "delete":
                weights.delete()
            case "admit":
                return {"waited": cache.admit(order["request"], order["pages"])}
            case "finish":
                cache.finish(order["request"])
            case "answer recalls":
                self._model.on_recall(cache.release)
            case "check":
                cache.check_all()
            case "finish all":
                cache.finish_all()
            case "churn":
                _churn(cache, order["pages"])
            case "begin work":
                self._work = Work(cache, order["pages"])
            case "go on working":
                assert self._work is not None
                self._work.wait_for_a_round(order["dead"])
            case "end work":
                assert self._work is not None
                return self._work.end(order["dead"], order["ready"])
            case "finish work":
                cache.finish(COMPUTED)
            case "held":
                return {"held": cache.held + weights.size}
        return {"checked": cache.pages_checked}


def main() -> None:
    """Register a model at MEMBROKER_ENDPOINT and obey."""
    # That a broker is gone and is back is the demo's to say.
    logging.getLogger("membroker").addHandler(logging.NullHandler())
    name, virtual, limit = sys.argv[1:4]
    with membroker.connect(client=f"demo worker of {name}") as client:
        model = client.model(name, virtual_capacity=virtual, limit=limit or None)
        with model.pool(page_size=PAGE) as pool:
            engine = DemoEngine(model, Cache(pool), DemoWeights(client, model))
            _say(ready=True)
            for line in sys.stdin:
                try:
                    _say(**engine.obey(json.loads(line)))
                except membroker.OutOfMemory as error:
                    _say(refused=str(error), level=error.level, limit=error.limit_bytes)
                except (PageLost, membroker.MembrokerError) as error:
                    _say(lost=str(error))


def _churn(cache: Cache, pages: int) -> None:
    """Grow and shrink without an end, for a SIGKILL in mid-flight to find."""
    cache.admit(0, pages)
    _say(churning=True)
    request = 0
    while True:
        request += 1
        cache.admit(request, 4)
        cache.finish(request)


def _say(**what: Any) -> None:
    try:
        print(json.dumps(what), flush=True)
    except BrokenPipeError:
        # The demo was interrupted and has left: there is nobody to tell, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit()


if __name__ == "__main__":
    main()
