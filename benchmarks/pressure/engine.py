"""One tenant's process: it serves sequences that grow page by page, like the cache of a language model.

It runs on any tree of membroker. Where the library knows recalls it waits for memory and answers recalls; else, and
when told so, it is refused and tries again. Every page is marked when it is borrowed and looked at before it is freed.
A line of JSON in, and one out at its end: counts, and times in nanoseconds.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import membroker
from membroker.errors import OutOfMemory

from ..harness.child import answering
from .trace import PhaseTrace

STEP_SECONDS = 0.005
WAIT_SECONDS = {"guaranteed": None, "share": 1.0, "beyond": 0.0}
"""How long a page may wait; a guaranteed one as long as the broker lets it."""
PREFILL_PAGES = 4
MARK_BYTES = 8


@dataclass(eq=False)
class PageSequence:
    """The addresses of a sequence's pages, how many it will have, and the number that marks them."""

    length: int
    mark: int
    pages: list[int] = field(default_factory=list)


class Engine:
    """The loop of one engine."""

    def __init__(self, options: SimpleNamespace) -> None:
        self.options = options
        self.page: int = options.page
        self.client = membroker.connect(Path(options.endpoint))
        self.model = self.client.model("llm")
        self.answers = options.recalls and hasattr(self.model, "on_recall")
        ahead = {"ahead": "auto"} if self.answers else {}
        # Twice the addresses: what is ready ahead is never short of them.
        self.pool = self.model.pool(virtual_capacity=2 * options.capacity, page_size=self.page, **ahead)
        self.driver: Any = self.model.driver
        self.sequences: list[PageSequence] = []
        self.marks = itertools.count(options.seed << 32)
        self.used = self.spare = 0
        self.counts = dict.fromkeys(("pages", "finished", "preempted", "wrong", "recalls"), 0)
        self.refused = {"guaranteed": 0, "share": 0, "beyond": 0}
        self.grown: list[int] = []
        self.waited: dict[str, list[int]] = {"guaranteed": [], "share": [], "beyond": []}
        if self.answers:
            self.model.on_recall(lambda _: membroker.DEFERRED)

    def run(self, begin: float) -> dict[str, Any]:
        """Serve from `begin`, on the monotonic clock, until the end of the trace, and return what happened."""
        trace = PhaseTrace(
            self.options.seed, self.options.tenant, self.options.seconds, self.options.capacity // self.page
        )
        step = time.monotonic()
        while (elapsed := time.monotonic() - begin) < self.options.seconds:
            self.answer_recall()
            self.serve(trace, trace.wanted(elapsed))
            self.spare = max(self.spare, self.pool.physical_usage_bytes - self.used * self.page)
            step = max(step + STEP_SECONDS, time.monotonic() - STEP_SECONDS)
            time.sleep(max(0.0, step - time.monotonic()))
        while self.sequences:
            self.drop(self.sequences[-1])
        self.client.close()
        return {**self.counts, "spare": self.spare, "refused": self.refused, "grown": self.grown, "waited": self.waited}

    def serve(self, trace: PhaseTrace, wanted: int) -> None:
        """Let each sequence grow by a page, end those that are done, and begin as many as are wanted."""
        for sequence in list(self.sequences):
            if sequence not in self.sequences:
                continue
            if len(sequence.pages) >= sequence.length or self.used > wanted + 64:
                self.drop(sequence)
                self.counts["finished"] += 1
            elif not self.grow(sequence, 1):
                self.drop(self.sequences[-1])
                self.counts["preempted"] += 1
                return
        if self.used + PREFILL_PAGES < wanted:
            sequence = PageSequence(trace.length(), next(self.marks))
            self.sequences.append(sequence)
            if not self.grow(sequence, PREFILL_PAGES):
                self.sequences.remove(sequence)

    def grow(self, sequence: PageSequence, count: int) -> bool:
        """Borrow pages for a sequence, one call for each. Return False when one is refused."""
        for _ in range(count):
            kind = self.kind()
            options = {"timeout": WAIT_SECONDS[kind]} if self.answers else {}
            began = time.perf_counter_ns()
            try:
                address = self.pool.allocate_anywhere(self.page, **options)
            except OutOfMemory:
                self.refused[kind] += 1
                self.take_back(sequence)
                return False
            took = time.perf_counter_ns() - began
            self.grown.append(took)
            self.waited[kind].append(took)
            self.used += 1
            self.counts["pages"] += 1
            sequence.pages.append(address)
            for end in self.ends(address):
                self.driver.write(end, sequence.mark.to_bytes(MARK_BYTES, "little"))
        return True

    def kind(self) -> str:
        """Return what the next page is: guaranteed, within the static share of the tenant, or beyond that."""
        after = (self.used + 1) * self.page
        if after <= self.options.guarantee:
            return "guaranteed"
        return "share" if after <= self.options.share else "beyond"

    def ends(self, address: int) -> tuple[int, int]:
        """Return the addresses of the marks of a page."""
        return address, address + self.page - MARK_BYTES

    def drop(self, sequence: PageSequence) -> None:
        """End a sequence, and release its pages."""
        self.sequences.remove(sequence)
        self.take_back(sequence)

    def take_back(self, sequence: PageSequence) -> None:
        """Look at the marks of a sequence's pages, and release these."""
        for address in sequence.pages:
            for end in self.ends(address):
                self.counts["wrong"] += self.driver.read(end, MARK_BYTES) != sequence.mark.to_bytes(8, "little")
            self.pool.free(address)
            self.used -= 1
        sequence.pages.clear()

    def answer_recall(self) -> None:
        """End the youngest sequences until what the broker asks for is released."""
        recall = self.model.pending_recall if self.answers else None
        if recall is None:
            return
        self.counts["recalls"] += 1
        while recall.remaining > 0 and self.sequences:
            self.drop(self.sequences[-1])
            self.counts["preempted"] += 1
        recall.done()


def main() -> None:
    """Connect as the first line says, and run as the second one does."""
    tell = answering()
    engine = Engine(SimpleNamespace(**json.loads(sys.stdin.readline())))
    tell({"connected": True})
    if line := sys.stdin.readline():
        tell(engine.run(**json.loads(line)))


if __name__ == "__main__":
    main()
