"""Ctrl-C anywhere in the calls of `membroker.vmm`: nothing deadlocks, and what is left is what docs/vmm.md says.

Each call is struck at points that a seed draws, on the host driver. `MEMBROKER_SEED` repeats a run.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.forks import in_a_child
from tests.support.interrupts import interrupted_at, sampled

from membroker import MembrokerError
from membroker.vmm import AccessFlags, AddressRange, DriverError, Location, MappedRange, PhysicalMemory
from membroker.vmm.host.driver import HostDriver

pytestmark = pytest.mark.deep

PAGE = 2 << 20
POINTS = int(os.environ.get("MEMBROKER_POINTS") or 40)
SEED = int(os.environ.get("MEMBROKER_SEED") or random.randrange(1 << 30))


class Program:
    """One page of memory at the first of four pages of addresses."""

    def __init__(self) -> None:
        self.driver = HostDriver()
        PhysicalMemory.create(self.driver, PAGE).close()  # its first extent opens the driver's own descriptors
        self.before = self.now()
        self.addresses = AddressRange(self.driver, 4 * PAGE)
        self.memory = PhysicalMemory.create(self.driver, PAGE)
        self.mapping = MappedRange(self.addresses, self.memory)
        self.more = PhysicalMemory.create(self.driver, PAGE)

    def end(self) -> None:
        """Close what can be closed, twice where the first time cannot."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                for one in [*self.addresses.mappings, self.mapping, self.memory, self.more, self.addresses]:
                    with suppress(MembrokerError, DriverError, KeyError):
                        one.close()

    def now(self) -> Counter[str]:
        """Return what there is of all of it, by kind."""
        addresses = self.driver._process.addresses
        memory = self.driver.memory(Location.DEVICE)
        return Counter(
            handles=len(self.driver._handles),
            reservations=len(addresses._reserved),
            mappings=len(addresses._mapped),
            pages=memory.used // PAGE,
            descriptors=len(os.listdir("/proc/self/fd")),
        )

    def left(self) -> Counter[str]:
        """Return what there is more than at the beginning."""
        return self.now() - self.before


ALL = {"handles", "reservations", "mappings", "pages", "descriptors"}
CALLS: dict[str, tuple[Callable[[Program], object], set[str]]] = {
    "set_access": (lambda it: it.mapping.set_access(AccessFlags.READ), set()),
    "get_access": (lambda it: it.mapping.get_access(), set()),
    "mappings": (lambda it: it.addresses.mappings, set()),
    "mappings_in": (lambda it: it.addresses.mappings_in(0, PAGE), set()),
    "AddressRange": (lambda it: AddressRange(it.driver, PAGE), {"reservations"}),
    "create": (lambda it: PhysicalMemory.create(it.driver, PAGE), {"handles", "pages", "descriptors"}),
    "export": (lambda it: it.memory.export(), {"descriptors", "pages"}),
    "MappedRange": (lambda it: MappedRange(it.addresses, it.more, PAGE), ALL),
    "close a mapping": (lambda it: it.mapping.close(), ALL),
    "close memory": (lambda it: it.more.close(), {"handles", "pages", "descriptors"}),
}
"""Each call, and the kinds of what it may leave."""


def in_time(work: Callable[[], object]) -> None:
    """Do it in a thread, which must not wait for a lock that an interrupt has left, and not fail."""
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive(), "a lock was never released"
    assert done, "it failed"


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_no_more_than_the_page_says(name: str) -> None:
    print(f"seed {SEED}")
    in_a_child(partial(strike, name))  # what is left ends with it


def strike(name: str) -> None:
    """Interrupt a call at many points, each time in a new program."""
    warnings.simplefilter("ignore", ResourceWarning)
    call, may_stay = CALLS[name]
    program = Program()
    points, _ = interrupted_at(None, partial(call, program))
    program.driver.close()
    struck = 0
    for point in sampled(SEED, points, POINTS):
        program = Program()
        struck += interrupted_at(point, partial(call, program))[1]
        in_time(partial(cycle, program.driver))
        in_time(program.end)
        left = +program.left()
        program.driver.close()
        assert left.keys() <= may_stay, f"point {point}: {left}"
    assert struck


def cycle(driver: HostDriver) -> None:
    """Use the driver as a program does after the interrupt."""
    with (
        AddressRange(driver, PAGE) as addresses,
        PhysicalMemory.create(driver, PAGE) as memory,
        MappedRange(addresses, memory) as mapping,
    ):
        driver.write(mapping.address, b"bytes")
        assert driver.read(mapping.address, 5) == b"bytes"
