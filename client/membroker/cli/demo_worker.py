"""A worker of the demo: a real process that borrows, as told by lines of JSON on its standard input.

It serves a model with a paged cache, as an inference engine does: each request holds some pages, every page carries a
pattern of its own, and the pattern is checked before the page goes back. Its weights are a segment, which it makes or
attaches. Must never know anything of the other workers.
"""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

import membroker

PAGE = 2 << 20
WEIGHTS = "weights"


class PageLost(Exception):
    """A page does not hold what was written into it."""


class Cache:
    """A paged cache over a pool: requests hold pages, wherever in the pool they are."""

    def __init__(self, pool: membroker.VirtualMemoryPool) -> None:
        self._pool = pool
        self._requests: dict[int, list[int]] = {}
        self._free = list(range(pool.capacity // PAGE - 1, -1, -1))
        self.pages_checked = 0

    def admit(self, request: int, pages: int) -> None:
        """Take a request: back its pages and write into each."""
        held: list[int] = []
        self._requests[request] = held
        for _ in range(pages):
            page = self._free.pop()
            try:
                self._pool.allocate(page * PAGE, PAGE)
            except BaseException:
                self._free.append(page)
                self.finish(request)
                raise
            held.append(page)
            self._pool.view(page * PAGE, PAGE)[:] = _pattern(request, page)

    def finish(self, request: int) -> None:
        """End a request: check its pages and give them back."""
        for page in self._requests.pop(request):
            self.check(request, page)
            self._pool.deallocate(page * PAGE, PAGE)
            self._free.append(page)

    def check(self, request: int, page: int) -> None:
        """Compare a page with what was written into it."""
        if self._pool.view(page * PAGE, PAGE) != _pattern(request, page):
            raise PageLost(f"page {page} of request {request} does not hold what was written into it")
        self.pages_checked += 1

    def check_all(self) -> None:
        """Check every page that is held."""
        for request, pages in self._requests.items():
            for page in pages:
                self.check(request, page)

    def finish_all(self) -> None:
        """End every request."""
        for request in list(self._requests):
            self.finish(request)


class Weights:
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

    def close(self) -> None:
        """Unmap it here."""
        assert self._segment is not None
        self._segment.close()

    def delete(self) -> None:
        """End it, for everybody."""
        self._client.delete_segment(f"{self._model.name}/{WEIGHTS}")


def _pattern(request: int, page: int) -> bytes:
    seed = zlib.crc32(b"%d/%d" % (request, page))
    return seed.to_bytes(4, "little") * (PAGE // 4)


def main() -> None:
    """Register a model at MEMBROKER_ENDPOINT and obey."""
    name, virtual, limit = sys.argv[1:4]
    with membroker.connect(client=f"demo worker of {name}") as client:
        model = client.register_model(name, virtual_capacity=virtual, limit=limit or None)
        with model.pool(page_size=PAGE) as pool:
            cache, weights = Cache(pool), Weights(client, model)
            _say(ready=True)
            for line in sys.stdin:
                try:
                    _say(**_obey(cache, weights, json.loads(line)))
                except membroker.OutOfMemory as error:
                    _say(refused=str(error), level=error.level, limit=error.limit)
                except PageLost as error:
                    _say(lost=str(error))


def _obey(cache: Cache, weights: Weights, order: dict[str, Any]) -> dict[str, Any]:
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
            cache.admit(order["request"], order["pages"])
        case "finish":
            cache.finish(order["request"])
        case "check":
            cache.check_all()
        case "finish all":
            cache.finish_all()
        case "churn":
            _churn(cache, order["pages"])
    return {"checked": cache.pages_checked}


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
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
