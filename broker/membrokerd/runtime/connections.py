"""What the daemon needs of a session's connection, whatever carries it."""

from __future__ import annotations

from typing import Protocol

from membroker.v1.handoff_pb2 import Frame

from ..core import effects as fx


class SessionConnection(Protocol):
    """A connection. Releases arrive on it, and effects leave by it."""

    heard: int
    """The bytes that were read from it so far."""

    def queued(self) -> int:
        """Return the bytes that have arrived and were not read; 0 if nothing is read from it at the moment."""
        ...

    def deliver(self, packet: fx.Make | fx.Send, descriptors: list[int]) -> None:
        """Queue a packet; the descriptors are the connection's from now on."""
        ...

    def flush(self) -> None:
        """Send what is queued."""
        ...

    def notify(self, frame: Frame) -> None:
        """Send a frame that answers no request."""
        ...

    def recall(self, recall: fx.SendRecall) -> None:
        """Ask for memory."""
        ...

    def disconnect(self, why: str) -> None:
        """Close the connection because its peer broke the protocol."""
        ...

    def close(self, why: str) -> None:
        """Close the connection."""
        ...
