"""`Closing`: objects that the end of a `with` block closes. Each class decides what `close` does."""

from __future__ import annotations

from typing import Self


class Closing:
    """A context manager that calls `close` at the end of its block."""

    def close(self) -> None:
        """End the object."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
