"""Helpers for tests of segments in a program: their holders, what the kernel allows, and a driver that fails."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import membroker
from membroker.vmm.driver import DriverError, Handle, Location
from tests.support.fake_lender import FlakyDriver
from tests.support.processes import (
    EXTENT,
)
from tests.support.sizes import PAGE

one_transport = pytest.mark.parametrize("transport", ["handoff"])
"""Of tests in which the broker is not asked anything that others do not ask by both."""


def holders(client: membroker.Client) -> dict[str, int]:
    """Return how many sessions hold each segment, by its own name."""
    return {one.name.rpartition("/")[2]: one.sessions for one in client.segments()}


def protections() -> list[str]:
    """What the kernel allows with each extent that is mapped here."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if EXTENT in line]


def sealed(model: membroker.Model, name: str = "weights", size: int | str = PAGE, data: bytes = b"") -> None:
    """Make a segment that nobody holds."""
    with model.create_segment(name, size) as segment:
        segment.write(0, data)
        segment.seal()


class SickDriver(FlakyDriver):
    """A device that fails to import after `imports_left` more, or to reserve, or to write."""

    def __init__(self) -> None:
        super().__init__()
        self.imports_left: int | None = None
        self.reserves = True
        self.writes = True

    def import_extent(self, descriptor: int, size: int, location: Location = Location.DEVICE) -> Handle:
        if self.imports_left is not None:
            if not self.imports_left:
                raise DriverError("dup", "EIO", errno.EIO)
            self.imports_left -= 1
        return super().import_extent(descriptor, size, location)

    def reserve(self, size: int, alignment: int = 0) -> int:
        if not self.reserves:
            raise DriverError("mmap", "ENOMEM", errno.ENOMEM)
        return super().reserve(size, alignment)

    def write(self, address: int, data: bytes | memoryview) -> None:
        if not self.writes:
            raise DriverError("write", "EIO", errno.EIO)
        super().write(address, data)
