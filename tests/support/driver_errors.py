"""A driver's errors: what a test asks of one is its name, and not its sentence; and a driver that raises one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from membroker.vmm import Driver, DriverError


def named(*names: str) -> Callable[[BaseException], bool]:
    """Return a check for `pytest.raises`: the error or its cause is the driver's, of one of these names."""

    def check(error: BaseException) -> bool:
        found = error if isinstance(error, DriverError) else error.__cause__
        return isinstance(found, DriverError) and found.name in names

    return check


def fail_once(driver: Driver, call: str, number: int = 1) -> None:
    """Let the driver refuse one call, the `number`th from now on, as a GPU does while a graph is captured."""
    real, left = getattr(driver, call), number

    def flaky(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise DriverError(call, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900)
        return real(*arguments, **options)

    setattr(driver, call, flaky)


@contextmanager
def failing_from(driver: Driver, call: str, number: int) -> Iterator[None]:
    """Let the driver refuse a call from its `number`th time on, until the end of the block."""
    real, times = getattr(driver, call), itertools.count(1)

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(times) >= number:
            raise DriverError(call, "ENOMEM", 12, "vm.max_map_count")
        return real(*arguments, **options)

    with mock.patch.object(driver, call, failing):
        yield
