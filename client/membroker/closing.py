"""`Closing`: a `with` block that closes.

Owns nothing but that. What `close` does, and that it may be called twice, is each class's own.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Something with a `close`, which the end of a `with` block calls. A context manager."""

    def close(self) -> None:
        """End it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
