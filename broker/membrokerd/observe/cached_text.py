"""A text that is expensive to make, kept for a second and shared by all threads that ask for it.

Owns the text. Making it keeps the interpreter from the event loop's thread, so the time that this takes must not depend
on how many threads ask.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

KEPT_SECONDS = 1.0


class CachedText:
    """The text that `make` returned, or the `TimeoutError` that it raised. One thread makes it; the others wait."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._making = threading.Lock()
        self._text: bytes | None = None
        self._make_again_at = 0.0

    def get(self) -> bytes:
        """Return the text, at most KEPT_SECONDS old; may be called on any thread."""
        with self._making:
            if time.monotonic() >= self._make_again_at:
                try:
                    self._text = self._make()
                except TimeoutError:
                    self._text = None
                self._make_again_at = time.monotonic() + KEPT_SECONDS
            if self._text is None:
                raise TimeoutError
            return self._text
