"""Old spellings of the public API. Each works for one release, with a DeprecationWarning that names the new one.

Owns the decorators that accept old spellings. Each class lists its own. To end support for them, remove the decorators.
It must import nothing of membroker.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Class = TypeVar("_Class", bound=type)


def warn(old: str, new: str, level: int = 3) -> None:
    """Warn the caller of our caller that `old` is spelled `new`."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=level)


def renamed(*in_bytes: str, **others: str) -> Callable[[_Class], _Class]:
    """Let attributes of the decorated class be read by their old names.

    Those of `in_bytes` now end in `_bytes`; `others` gives the new name of each old one.
    """
    new_by_old = {old: f"{old}_bytes" for old in in_bytes} | others

    def decorate(cls: _Class) -> _Class:
        for old, new in new_by_old.items():
            setattr(cls, old, property(functools.partial(_read, cls.__name__, old, new)))
        setattr(cls, "__old_spellings__", new_by_old)  # noqa: B010 - a new attribute
        return cls

    return decorate


def _read(kind: str, old: str, new: str, value: Any) -> Any:
    warn(f"{kind}.{old}", f"{kind}.{new}")
    return getattr(value, new)


def old_spellings(value: object) -> dict[str, Any]:
    """Return the old names of a value's attributes, with what they are now: for what is printed as JSON."""
    return {old: getattr(value, new) for old, new in getattr(value, "__old_spellings__", {}).items()}


def keywords_only(*order: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Let arguments of the decorated method be passed by position, in the old order."""

    def decorate(method: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            by_position = dict(zip(order, args[1:], strict=False))
            if by_position and len(args) - 1 == len(by_position) and not by_position.keys() & kwargs:
                spelled = ", ".join(f"{name}=" for name in by_position)
                warn(f"{method.__qualname__} with positional arguments", f"the keywords {spelled}")
                return method(args[0], **by_position, **kwargs)  # type: ignore[arg-type]
            return method(*args, **kwargs)

        return call

    return decorate


def two_numbers(progress: Callable[..., object]) -> Callable[[int, int], object]:
    """Return `progress` as a function of (done, total), also if it takes one number, the bytes of each step."""
    try:
        inspect.signature(progress).bind(0, 0)
    except TypeError:
        warn("progress(step)", "progress(done, total)", level=4)
    except ValueError:  # a function in C whose signature is unknown
        return progress
    else:
        return progress
    before = 0

    def steps(done: int, total: int) -> object:
        nonlocal before
        step, before = done - before, done
        return progress(step)

    return steps
