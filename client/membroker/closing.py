"""`Closing`: objects that the end of a `with` block closes. Each class decides what `close` does."""

from __future__ import annotations

from typing import Any, NoReturn, Self


def refuse_pickle(value: object) -> NoReturn:
    """Raise `TypeError` for an object that is of this process, with what another process does instead."""
    raise TypeError(
        f"a {type(value).__name__} belongs to this process and cannot be pickled or copied: in the other process, "
        "connect(), and attach() a segment for memory that both use (a sealed Segment can be pickled)"
    )


class Closing:
    """A context manager that calls `close` at the end of its block."""

    def close(self) -> None:
        """End the object."""
        raise NotImplementedError

    def __reduce__(self) -> str | tuple[Any, ...]:
        refuse_pickle(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
