"""The packets that one connection still has to send: frames in their order, some with descriptors.

Owns the descriptors of each packet until it is sent or dropped, and stops the reading while the socket is full. Must
never end a connection itself, nor decide what is sent.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, deque
from collections.abc import Callable

from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff

from ...system import logs
from ...system.failpoints import reach
from ...system.retry import Retry


def _ignore(_why: str = "") -> None:
    """Do nothing."""


class OutboxCounters:
    """The counters of all connections of the daemon together."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.notices_dropped = 0
        self.descriptors = 0


class Outbox:
    """What waits for the socket of one connection.

    `read` is what the event loop calls when the socket is readable. `traffic` counts the memory descriptors that are
    held here. `end` is called, with why, when nothing can be sent any more, or after the last packet.
    """

    def __init__(
        self, sock: socket.socket, read: Callable[[], None], traffic: OutboxCounters, end: Callable[[str], None]
    ) -> None:
        self.packets: deque[tuple[pb.Frame, list[int]]] = deque()
        """Each frame, and the descriptors that go with it."""
        self.is_ending = False
        """Whether the connection ends once everything is sent."""
        self._sock = sock
        self._read = read
        self._traffic = traffic
        self._end = end
        self._io = asyncio.get_running_loop()
        self.retry = Retry(sock)

    @property
    def is_full(self) -> bool:
        """Whether the socket has no room, or is not asked before the packets that wait."""
        return bool(self.packets) or self.retry.is_pending

    def put(self, frame: pb.Frame, descriptors: list[int]) -> None:
        """Queue a packet. It is sent with the next flush."""
        if frame.HasField("delivery"):
            self._traffic.descriptors += len(descriptors)
        self.packets.append((frame, descriptors))

    def flush(self) -> None:
        """Send what is queued, unless the socket is full."""
        if self.packets and not self.retry.is_pending:
            self._send_all()

    def _send_all(self) -> None:
        """Send what is queued. When the socket is full, wait for room, and read nothing until all is sent."""
        while self.packets:
            frame, descriptors = self.packets[0]
            try:
                if descriptors:
                    reach("deliver")
                handoff.send(self._sock, handoff.encode(frame), descriptors)
                if descriptors:
                    reach("delivered")
            except OSError as error:
                if self.retry.after(error, self._send_all):
                    self._io.remove_reader(self._sock)
                else:
                    self._end(error.strerror or "broken")
                return
            except Exception as error:  # noqa: BLE001 - a packet that can never be sent must not block the others
                logs.fault(error)
                self._end("a packet for this connection cannot be encoded")
                return
            self.packets.popleft()
            self._close(frame, descriptors)
        if self.is_ending:
            self._end("done")
        elif self.retry.is_pending:
            self.retry.stop()
            self._io.add_reader(self._sock, self._read)
            self._read()  # a read may have been put aside

    def _close(self, frame: pb.Frame, descriptors: list[int]) -> None:
        handoff.close_all(descriptors)
        if frame.HasField("delivery"):
            self._traffic.descriptors -= len(descriptors)

    def take_back(self) -> pb.Frame | None:
        """Return the only packet, without descriptors, if the socket has not taken it, and do not send it."""
        return self.packets.popleft()[0] if self.packets else None

    def stop(self) -> None:
        """Send nothing more, and forget the connection: its socket is about to be closed."""
        self.retry.stop()
        self._read = self._end = _ignore

    def drop_all(self) -> list[pb.Frame]:
        """Close everything that is queued, and return the frames that are not sent."""
        dropped = []
        while self.packets:
            frame, descriptors = self.packets.popleft()
            self._close(frame, descriptors)
            dropped.append(frame)
        return dropped
