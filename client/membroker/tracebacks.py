"""Where a traceback ends: at the user's line, and not eight frames deeper in the library.

What was refused, or interrupted, is the user's call, and the message says why. The frames below that line help only to
repair the library. They would also keep alive what they refer to, for as long as the error is kept. Only errors of the
library and interrupts are shortened: a defect shows all its frames. With MEMBROKER_TRACEBACK=full, nothing is.

It must never hide a frame of the user's code.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import FunctionType, TracebackType
from typing import Any, TypeVar

from .errors import MembrokerError

VARIABLE = "MEMBROKER_TRACEBACK"
SHORTENED = (MembrokerError, KeyboardInterrupt)
_OURS = frozenset({__name__.partition(".")[0], *sys.stdlib_module_names})
"""The modules whose frames are left out: this library, and what it calls of the standard library."""

_T = TypeVar("_T")


def shorten(error: BaseException) -> None:
    """Remove the library's frames from the traceback of an error, and of those of the library that it came from.

    Called by the outermost frame of the library, in an `except` block that ends with `raise`: from Python 3.11 on, that
    adds no frame.
    """
    if os.environ.get(VARIABLE) == "full":
        return
    seen: set[int] = set()
    raised: BaseException | None = error
    while raised is not None and id(raised) not in seen and _is_ours(raised.__traceback__):
        seen.add(id(raised))
        raised.__traceback__ = _users(raised.__traceback__)
        raised = raised.__cause__ or raised.__context__


def _is_ours(trace: TracebackType | None) -> bool:
    """Say whether an error was caught by the library: one that the user's code has caught begins with its frame."""
    return trace is None or str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] in _OURS


def _users(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback with the frames that are neither of the library nor of the standard library."""
    kept: list[TracebackType] = []
    while trace is not None:
        if not _is_ours(trace):
            kept.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for entry in reversed(kept):
        found = TracebackType(found, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return found


def ends_at_the_caller(but: tuple[str, ...] = ()) -> Callable[[type[_T]], type[_T]]:
    """Shorten what the public methods of a class raise, all `but` some.

    Those do it themselves. An interrupt that comes as a wrapped method returns loses its result: that must be an object
    that ends by itself, or nothing that matters. And a wrapper is one more call.
    """

    def decorate(kind: type[_T]) -> type[_T]:
        for name, member in list(vars(kind).items()):
            is_public = not name.startswith("_") or (name.startswith("__") and name != "__repr__")
            if isinstance(member, FunctionType) and is_public and name not in but:
                setattr(kind, name, shortened(member))
        return kind

    return decorate


_F = TypeVar("_F", bound=Callable[..., Any])


def shortened(function: _F) -> _F:
    """Return the function, which shortens what it raises."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except SHORTENED as error:
            shorten(error)
            raise

    return call  # type: ignore[return-value]
