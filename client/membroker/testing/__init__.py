"""For tests: a broker with faults (`broker`), and the conformance suite of what every `Driver` must do.

`check_driver(make_driver)` runs all checks. `CHECKS` has them one by one, for `pytest.mark.parametrize`.
`check_two_devices(make_first, make_second)` and `TWO_DEVICE_CHECKS` are for drivers of two devices that reach each
other. Bytes are moved by `write` and `read`.

`make_driver` is called in other processes too, so it must be picklable: a function of an importable module, or
`functools.partial(open_driver, "host")`. It takes `survivors=` if its drivers have any. Nothing else may use the
device's memory while a check runs.

The suite (`checks` and `harness`) knows the driver contract alone, and must never import the rest of the library.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from .checks import batches, descriptors, device, mappings, two_devices
from .harness import MakeDriver, wait_until
from .local_broker import LocalBroker, broker

__all__ = [
    "CHECKS",
    "TWO_DEVICE_CHECKS",
    "LocalBroker",
    "MakeDriver",
    "broker",
    "check_driver",
    "check_two_devices",
    "wait_until",
]


def _checks_of(*modules: ModuleType) -> tuple[Callable[..., None], ...]:
    """Return the functions that the modules define, in their order."""
    return tuple(
        check
        for module in modules
        for check in vars(module).values()
        if callable(check) and check.__module__ == module.__name__
    )


CHECKS: tuple[Callable[[MakeDriver], None], ...] = _checks_of(mappings, descriptors, batches, device)
"""Every promise; each is called with `make_driver` and raises `AssertionError` if it is broken."""
TWO_DEVICE_CHECKS: tuple[Callable[[MakeDriver, MakeDriver], None], ...] = _checks_of(two_devices)
"""Every promise of two devices; each is called with a maker of each and raises `AssertionError` if it is broken."""


def check_driver(make_driver: MakeDriver) -> None:
    """Run every check, each on a driver of its own; raise `AssertionError` at the first broken promise."""
    for check in CHECKS:
        check(make_driver)


def check_two_devices(make_first: MakeDriver, make_second: MakeDriver) -> None:
    """Run every check of two devices; raise `AssertionError` at the first broken promise."""
    for check in TWO_DEVICE_CHECKS:
        check(make_first, make_second)
