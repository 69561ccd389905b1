"""Checks of the public API's arguments: sizes, offsets, names, locations and times.

Owns the rules, and the sentence of each refusal. It must never talk to a broker or a driver.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from .errors import InvalidPageSize, InvalidRequest
from .vmm.driver import AccessFlags, Location
from .vmm.sizes import MAX_BYTES, Size, format_size, is_power_of_two, parse_size, round_up
from .wire.names import MAX_WAIT_SECONDS

MAX_SECONDS = 7 * 24 * 3600.0
"""The longest time that a user may ask for: a week. The kernel's own timeouts end at 24 days."""
Progress = Callable[[int, int], object]
"""Called as `progress(done, total)`, in bytes, after each step of a copy."""
_FRAMEWORKS = ("numpy", "torch", "jax")


def location_of(location: Location | str) -> Location:
    """Return `"device"` or `"host"` as a `Location`; raises `InvalidRequest` for anything else."""
    if isinstance(location, Location):
        return location
    try:
        return Location(location)
    except ValueError:
        raise InvalidRequest(f'a location is "device" or "host", not {location!r}') from None


def access_of(access: AccessFlags | str) -> AccessFlags:
    """Return `"none"`, `"read"` or `"read_write"` as `AccessFlags`; raises `InvalidRequest` for anything else."""
    if isinstance(access, AccessFlags):
        return access
    for flags in AccessFlags:
        if access == flags.name.lower():
            return flags
    raise InvalidRequest(f'an access is "none", "read" or "read_write", not {access!r}')


def bytes_of(what: str, size: Size, at_least: int = 0) -> int:
    """Return a size in bytes. Raises `InvalidRequest` about `what` for anything else, or for less than `at_least`."""
    if type(size) is int and at_least <= size <= MAX_BYTES:  # the common case, in every allocation
        return size
    try:
        value = parse_size(size)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{what}: {error}") from error
    if value < at_least:
        raise InvalidRequest(f"{what} must be at least {at_least} bytes, not {size!r}")
    return value


def rounded_up(what: str, size: Size, step: int) -> int:
    """Return a size of 1 byte or more, rounded up to a multiple of `step`. Raises `InvalidRequest` about `what`."""
    rounded = round_up(bytes_of(what, size, at_least=1), step)
    check_total(f"{what} of {size!r}", rounded)
    return rounded


def check_total(what: str, size: int) -> None:
    """Raise `InvalidRequest` about `what` if its size, rounded up, is more than 2^63-1 bytes."""
    if size > MAX_BYTES:
        raise InvalidRequest(f"{what} rounds up to more than 2^63-1 bytes")


def whole_number(what: str, value: object, wrong: type[InvalidRequest] = InvalidRequest) -> int:
    """Return an int, also one of NumPy's (`__index__`). Raises `wrong` for anything else, bool and float included."""
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]  # TypeError: refused below
    except TypeError:
        pass
    raise wrong(f"{what} is a whole number, not {value!r}")


def shape_of(shape: object) -> tuple[int, ...]:
    """Return a shape as ints, each from 0 to 2^63-1; raises `InvalidRequest` for anything else."""
    if isinstance(shape, str | bytes) or not isinstance(shape, Sequence):
        raise InvalidRequest(f"a shape is a sequence of whole numbers, as (1000, 64), not {shape!r}")
    found = tuple(whole_number("a dimension", dimension) for dimension in shape)
    if not all(0 <= dimension <= MAX_BYTES for dimension in found):
        raise InvalidRequest(f"a shape is whole numbers from 0 to 2^63-1, not {shape!r}")
    return found


def name_of(what: str, name: str) -> str:
    """Return a name that is text. Raises `InvalidRequest` about `what` otherwise. The broker checks the grammar."""
    if not isinstance(name, str) or any("\ud800" <= character <= "\udfff" for character in name):
        raise InvalidRequest(f"the name of a {what} is text that UTF-8 can encode, not {name!r}")
    return name


def parts_of(name: str) -> tuple[str, ...]:
    """Return the tenant, the model and the segment of a broker's resource name, as many as it has."""
    _, tenant, *rest = name.split("/", 3)
    if not rest:
        return (tenant,)
    model, _, segment = rest[1].rpartition("/segments/")
    return (tenant, model, segment) if model else (tenant, rest[1])


def seconds_of(what: str, seconds: float, *, positive: bool = False) -> float:
    """Return a time in seconds, at most a week. Raises `InvalidRequest` about `what` for anything else."""
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= MAX_SECONDS or (positive and not seconds):
        least = "more than 0" if positive else "0 or more"
        raise InvalidRequest(f"{what} is a number of seconds, {least} and at most a week, not {seconds!r}")
    return float(seconds)


def deadline_of(timeout: float | None) -> float | None:
    """Return when a call that waits `timeout` seconds for memory ends, on the monotonic clock; None if it does not say.

    Raises `InvalidRequest` for anything but 0 to 24 hours.
    """
    if timeout is None:
        return None
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not is_number or not 0 <= timeout <= MAX_WAIT_SECONDS:
        raise InvalidRequest(f"timeout is a number of seconds, 0 or more and at most 24 hours, not {timeout!r}")
    return time.monotonic() + float(timeout)


def check_progress(progress: Progress | None) -> None:
    """Raise `InvalidRequest` for a progress that cannot be called."""
    if progress is not None and not callable(progress):
        raise InvalidRequest(f"progress is a function of two numbers of bytes, not {progress!r}")


def check_framework(framework: str) -> None:
    """Raise `InvalidRequest` for a framework that the library makes no tensors of."""
    if framework not in _FRAMEWORKS:
        raise InvalidRequest(f"a framework is {', '.join(map(repr, _FRAMEWORKS))}, not {framework!r}")


def contiguous_bytes(what: str, data: Any) -> memoryview:
    """Return the bytes of an object that has contiguous ones. Raises `InvalidRequest` about `what` otherwise."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidRequest(f"{what} is contiguous bytes, not {type(data).__name__}: {error}") from error


def check_range(offset: int, size: int, total: int, what: str) -> tuple[int, int]:
    """Return both as ints, in bytes. Raises `InvalidRequest` if they exceed the `total` bytes of `what`."""
    offset, size = whole_number("an offset", offset), whole_number("a size", size)
    if not 0 <= offset <= total or not 0 <= size <= total - offset:
        raise InvalidRequest(f"{size} bytes at {offset} do not lie in {what} of {total} bytes")
    return offset, size


def check_page_size(page_size: Size, granularity: int) -> int:
    """Return a page size in bytes. Raises `InvalidPageSize` unless it is a power of two, at least `granularity`."""
    try:
        value = bytes_of("a page size", page_size)
    except InvalidRequest as error:
        raise InvalidPageSize(str(error)) from error
    if not is_power_of_two(value) or value < granularity:
        raise InvalidPageSize(
            f"a page size is a power of two and at least {format_size(granularity)}, the device's granularity, "
            f"not {page_size!r}"
        )
    return value
