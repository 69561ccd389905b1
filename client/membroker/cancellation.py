"""Cancel scopes: a block whose calls another thread can end while they wait, and the scope that a call is in.

Owns which scope is the innermost of a thread, and what a scope wakes. It knows nothing of calls. `cancel` never waits
for a call or for the broker, because event loops and signal handlers call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Final, Self

from .errors import Cancelled


class CancelScope:
    """A `with` block whose calls end with `membroker.errors.Cancelled` once any thread has called `cancel`.

    The calls that wait are those for memory, for a seal or a newer version, and for a broker that is away. Such a wait
    ends at once, in the broker too, and nothing of the call is left. A call that does not wait is finished: it has
    nothing to give up. Scopes nest, and an outer one ends the calls of the inner ones. A block is entered once.

        with membroker.CancelScope() as scope:
            buffer = model.allocate("8GiB", timeout=60)  # elsewhere: scope.cancel()
    """

    def __init__(self) -> None:
        self._cancelled = False
        self._wakes: dict[object, Callable[[], object]] = {}
        self._outer: CancelScope | None = None
        self._token: Token[CancelScope | None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called, for this scope or one around it."""
        return self._cancelled

    def cancel(self) -> None:
        """End the block's calls that wait, and those that would. Returns at once, and may be called again."""
        self._cancelled = True
        for wake in list(self._wakes.values()):
            wake()

    def watch(self, key: object, wake: Callable[[], object]) -> None:
        """Call `wake` when this is cancelled, or now if it is: for the library. `wake` must not wait."""
        self._wakes[key] = wake
        if self._cancelled:
            wake()

    def unwatch(self, key: object) -> None:
        """Forget what `watch` got."""
        self._wakes.pop(key, None)

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Watch during a block."""
        key = object()
        self.watch(key, wake)
        try:
            yield
        finally:
            self.unwatch(key)

    def check(self) -> None:
        """Raise `Cancelled` if this is cancelled."""
        if self._cancelled:
            raise Cancelled("the cancel scope of this call was cancelled: nothing of the call is left")

    def __enter__(self) -> Self:
        self._outer = innermost.get()
        self._token = innermost.set(self)
        if self._outer is not None:
            self._outer.watch(self, self.cancel)
        return self

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            self._outer.unwatch(self)
        if self._token is not None:
            innermost.reset(self._token)


innermost: Final[ContextVar[CancelScope | None]] = ContextVar("innermost", default=None)
"""The innermost scope of a thread, or of a task."""
