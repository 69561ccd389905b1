"""What a test asks of a driver's error: its name, and not its sentence."""

from __future__ import annotations

from collections.abc import Callable

from membroker.vmm import DriverError


def named(*names: str) -> Callable[[BaseException], bool]:
    """Return a check for `pytest.raises`: the error or its cause is the driver's, of one of these names."""

    def check(error: BaseException) -> bool:
        found = error if isinstance(error, DriverError) else error.__cause__
        return isinstance(found, DriverError) and found.name in names

    return check
