"""`Line`: calls of another process of the same engine, over a connection.

Owns the form of a call and its answer. An error of the library goes to the caller, and any other is logged where it was
raised.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ..errors import ClosedError, MembrokerError

logger: logging.Logger = logging.getLogger("membroker")


class Line:
    """Calls of the other process, one at a time. They raise `ClosedError` when that has ended."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def __call__(self, name: str, *arguments: object, **options: object) -> Any:
        """Call a function of this name there, and return its answer. Raises what it raises."""
        self.begin(name, *arguments, **options)
        return self.end()

    def begin(self, name: str, *arguments: object, **options: object) -> None:
        """Call, without waiting for the answer: `end` returns it."""
        self._lock.acquire()
        with suppress(OSError):  # `end` raises
            self._connection.send((name, arguments, options))

    def end(self) -> Any:
        """Wait for the answer to what was begun. Raises what the other process has raised."""
        try:
            found, error = self._connection.recv()
        except (EOFError, OSError) as ended:
            raise ClosedError("a rank of this engine has ended") from ended
        finally:
            self._lock.release()
        if error is not None:
            raise error
        return found

    def close(self) -> None:
        """Close the connection, when no thread waits for an answer any more. Idempotent."""
        with self._lock:
            self._connection.close()


def hang_up(connection: Connection) -> None:
    """End a connection. A call of another thread that waits for its answer raises `ClosedError` at once."""
    with suppress(OSError):
        same = socket.socket(fileno=connection.fileno())
        try:
            same.shutdown(socket.SHUT_RDWR)
        finally:
            same.detach()  # the connection keeps its descriptor


def answer(connection: Connection, calls: Mapping[str, Callable[..., object]]) -> bool:
    """Answer one call of the other process, and return whether there may be another."""
    with suppress(EOFError, OSError):
        name, arguments, options = connection.recv()
        found: object = None
        error: MembrokerError | None = None
        try:
            found = calls[name](*arguments, **options)
        except MembrokerError as refusal:
            error = refusal
        except Exception as failure:
            logger.exception("this process of an engine failed to run %r for another process of the engine", name)
            error = MembrokerError(f"a process of this engine has failed to {name}: {failure!r}")
        connection.send((found, error))
        return True
    return False
