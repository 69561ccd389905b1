"""Runs of pages, as ranges of page numbers: made of single pages, split, and turned into offsets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import overload

from ..vmm.driver import AccessFlags


class Offsets(Sequence[int]):
    """The offsets of the pages of some runs, without a list: a request may be far larger than the device."""

    def __init__(self, runs: Sequence[range], page_size: int) -> None:
        self._runs = [range(run.start * page_size, run.stop * page_size, page_size) for run in runs]

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            return self[index : index + 1][0]
        first, stop, _ = index.indices(len(self))
        found: list[int] = []
        for run in self._runs:
            found += run[max(0, first) : max(0, stop)]
            first, stop = first - len(run), stop - len(run)
        return found


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
