"""The pages of a pool in a segment: what offloading needs of one, and the header that says where each run lies.

Owns the names in that header. Another process may have written it, so it is checked before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Protocol, runtime_checkable

from ..errors import InvalidRequest
from ..safetensors import TensorIndex
from ..vmm.driver import Driver
from ..vmm.sizes import format_exact

_RUN = re.compile(r"offset-([0-9]{20})")


@runtime_checkable
class PageStore(Protocol):
    """The methods of a segment that offloading uses: bytes on the host at `address`, which a header describes."""

    @property
    def resource_name(self) -> str:
        """The name for messages."""
        ...

    @property
    def address(self) -> int:
        """The address of the first byte, in this process."""
        ...

    @property
    def driver(self) -> Driver:
        """The driver that mapped it."""
        ...

    @property
    def location(self) -> str:
        """`"device"` or `"host"`."""
        ...

    @property
    def writable(self) -> bool:
        """Whether this process created it and has not sealed it."""
        ...

    def lay_out(self, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> TensorIndex:
        """Write a header for these tensors, name -> (dtype, shape), and return it with the offset of each."""
        ...

    def index(self) -> TensorIndex:
        """Read the header."""
        ...

    def filled(self) -> AbstractContextManager[None]:
        """Keep it mapped and unsealed during the block."""
        ...

    def kept(self) -> AbstractContextManager[None]:
        """Keep it mapped during the block."""
        ...

    def seal(self) -> None:
        """Make it read-only for every process, and let others attach it."""
        ...


def shapes(runs: Sequence[range], page_size: int) -> dict[str, tuple[str, tuple[int]]]:
    """Return the entries of a segment's header: each run named by its offset in the pool, in the order of `runs`."""
    return {name_of(run, page_size): ("U8", (len(run) * page_size,)) for run in runs}


def name_of(run: range, page_size: int) -> str:
    """Return the name of a run in the header."""
    return f"offset-{run.start * page_size:020}"


def runs_in(segment: PageStore, page_size: int, capacity: int) -> dict[range, int]:
    """Return the runs of pages that a pool has offloaded to `segment`, each with its offset there, in bytes.

    Another process wrote the header, so all of it is checked. Raises `InvalidRequest` if it does not describe offloaded
    pages, or they do not fit a pool with this page size and capacity, and `InvalidTensorIndex`.
    """
    if segment.writable:
        raise InvalidRequest(f"{segment.resource_name} is not sealed: what is in it is not all there yet")
    found: dict[range, int] = {}
    for name, info in segment.index().items():
        match = _RUN.fullmatch(name)
        if match is None or info.dtype != "U8":
            raise InvalidRequest(f"{segment.resource_name} holds no offloaded pages, but a tensor {name[:80]!r}")
        offset, size = int(match[1]), info.size
        if offset % page_size or size % page_size or not size or offset >= capacity or size > capacity - offset:
            raise InvalidRequest(
                f"{size} bytes at offset {offset} are not whole pages of {format_exact(page_size)} in a pool of "
                f"{capacity} bytes: restore them into one like that from which they came"
            )
        found[range(offset // page_size, (offset + size) // page_size)] = info.offset
    runs = sorted(found, key=lambda run: run.start)
    # The offsets are names, so two runs cannot begin at the same page.
    if any(run.stop > after.start for run, after in pairwise(runs)):
        raise InvalidRequest(f"{segment.resource_name} has the same page twice")
    return {run: found[run] for run in runs}


def check_segment(segment: PageStore, driver: Driver) -> None:
    """Raise `InvalidRequest` unless it is a segment that `driver` has mapped."""
    if not isinstance(segment, PageStore):
        raise InvalidRequest(f"a pool's pages lie in a segment that is attached or written here, not {segment!r}")
    if segment.driver is not driver:
        raise InvalidRequest(f"{segment.resource_name} is another client's: attach it with the client of this pool")
