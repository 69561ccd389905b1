"""Runs of pages, as ranges of page numbers: made of single pages, and split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import groupby

from ..vmm.driver import AccessFlags


def single(page: int) -> range:
    """Return the run of one page."""
    return range(page, page + 1)


def as_runs(pages: Iterable[int]) -> list[range]:
    """Return ascending pages as runs."""
    runs: list[range] = []
    for page in pages:
        if runs and runs[-1].stop == page:
            runs[-1] = range(runs[-1].start, page + 1)
        else:
            runs.append(range(page, page + 1))
    return runs


def alike(pages: range, pinned: Set[int], restricted: Mapping[int, AccessFlags]) -> Iterator[range]:
    """Split a run at the boundaries of pins, and where the access changes."""
    if not (pinned or restricted):
        yield pages
        return
    for _, run in groupby(pages, lambda page: (page in pinned, restricted.get(page))):
        first, *rest = run
        yield range(first, first + len(rest) + 1)
