"""One handoff socket that many threads share: each sends, and one at a time reads packets for all.

Owns the socket, its end, and every packet until its descriptors are closed. A thread that waits for an answer reads
itself, because a thread for reading would double the round trip. It must never know what a packet is for.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import BrokerUnavailable, ClosedError, MembrokerError, ProtocolError
from ..interrupts import STOPPING_SECONDS, Condition, uninterrupted
from ..v1 import handoff_pb2 as pb
from ..wire import frames as handoff
from ..wire.descriptors import close_each
from .call import Taken

_NOSIGNAL = int(socket.MSG_NOSIGNAL)
_PATIENCE = struct.pack("@ll", int(STOPPING_SECONDS), 0)
"""How long a send waits for a broker that reads nothing, as a `timeval`. Then the connection is lost."""


class SharedSocket:
    """A connected socket of the broker at `name`. A subclass says what a packet is for.

    With `counts`, each frame carries the number of deliveries that were taken. `on_lost` is called with this when the
    connection ends without `close`, by any thread.
    """

    def __init__(
        self,
        connection: socket.socket,
        name: str,
        *,
        counts: bool,
        on_lost: Callable[[Any], None],
    ) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
        self.socket = connection
        self.name = name
        self.changed = Condition()
        self.taken = Taken()
        self.unclosed: list[handoff.Packet] = []
        self.reader: int | None = None
        """The thread that reads; 0 for one that only reads, None while no thread does."""
        self.end: tuple[type[MembrokerError], str] | None = None
        self.interrupted = False
        """Whether this side ended it, because an interrupt left a call half done."""
        self.counts = counts
        self._on_lost = on_lost
        self._stopping = ""

    def _route(self, packet: handoff.Packet) -> bool:
        """Give a packet to whatever waits for it; return False if nothing does. The lock is held."""
        raise NotImplementedError

    def _refuse(self, packet: handoff.Packet) -> None:
        """Drop a packet that nothing waits for. The lock is not held."""
        raise NotImplementedError

    def send(self, frame: pb.Frame) -> None:
        """Send a frame. Raises what ended the connection, after 5 seconds in which the broker makes no room."""
        frame.acknowledged = self.taken.count if self.counts else 0
        try:
            self.socket.send(handoff.encode(frame), _NOSIGNAL)
        except OSError as error:
            self._lose(error)
            self.check_open()

    # Reading: one thread at a time, for all

    def read_for_all(self) -> None:
        """Read until the connection ends. No other thread reads."""
        while self.end is None:
            self.readable(None)
            self.drain()
        self.hand_on(None)

    def drain(self) -> None:
        """Route every packet that is in the socket.

        Called by the thread that only reads, and by a thread that has the answer of a call by gRPC.
        """
        strays = []
        try:
            with self.changed.lock:
                while self.end is None and self.readable(0):
                    packet = handoff.receive(self.socket)
                    self.unclosed.append(packet)
                    if not self._route(packet):
                        strays.append(packet)
                self.changed.tell_all()
        except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
            self._lose(error)
        for packet in strays:
            self._refuse(packet)

    def read_to_the_end(self) -> None:
        """Read what the broker sent before it closed, once no other thread reads, and note that it is gone."""
        while True:
            with self.changed.lock:
                while self.reader is not None and self.end is None:
                    self.changed.wait()
                if self.end is not None:
                    return
                self.reader = threading.get_ident()
            if not self.readable(0):
                self._lose(handoff.EndOfConnection())
                self.hand_on(None)
                return
            self.read()

    def readable(self, seconds: float | None) -> bool:
        """Say whether a packet, or the end, arrives within `seconds`; None for any time."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        return bool(poller.poll(None if seconds is None else max(0.0, seconds * 1000)))

    def read(self) -> None:
        """As the reader, read one packet and route it; then another thread may read."""
        packet = None
        try:
            packet = handoff.receive(self.socket)
            self.unclosed.append(packet)
        except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
            self._lose(error)
        finally:
            self.hand_on(packet)

    def hand_on(self, packet: handoff.Packet | None) -> None:
        """Route a packet, and let another thread read."""
        with self.changed.lock:
            routed = packet is None or self._route(packet)
            self.reader = None
            self.changed.tell_all()
        if packet is not None and not routed:
            self._refuse(packet)

    def close_packet(self, packet: handoff.Packet) -> None:
        """Close the descriptors of a packet, and forget it. The lock is held."""
        close_each(packet.descriptors)
        self.unclosed.remove(packet)

    # The end

    def heard_stopping(self) -> None:
        """Note that the broker announced its stop: the error of its end says so too."""
        self._stopping = " (it had said that it stops)"

    @property
    def lost(self) -> bool:
        """Whether the connection ended without `close`."""
        return self.end is not None and self.end[0] is BrokerUnavailable

    def check_open(self) -> None:
        """Raise what ended the connection, if it has ended."""
        if self.end is not None:
            kind, why = self.end
            raise kind(why)

    def interrupt(self) -> None:
        """End the connection, because an interrupt left a call half done: the resume agrees on what is held.

        A second interrupt must not stop this half way: calls would wait for a resume that no thread makes.
        """
        uninterrupted(self._interrupt)

    def _interrupt(self) -> None:
        self.break_off(
            BrokerUnavailable,
            f"an interrupt ended the connection to the broker at {self.name} in the middle of a call: mapped memory "
            "stays valid, and the session goes on",
            interrupted=True,
        )
        if self.lost:
            self._on_lost(self)

    def break_off(self, kind: type[MembrokerError], why: str, *, interrupted: bool = False) -> None:
        """End the connection, unless it has ended: calls raise this error from now on."""
        with self.changed.lock:
            if self.end is None:
                self.end = (kind, why)
                self.interrupted = interrupted
                with suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)
            self.changed.tell_all()

    def _lose(self, error: Exception) -> None:
        """Note that the connection is lost, and why."""
        if isinstance(error, handoff.BrokenPacket):
            self.break_off(ProtocolError, f"the broker at {self.name} sent an invalid frame: {error}")
        if isinstance(error, BlockingIOError):
            self.break_off(
                BrokerUnavailable,
                f"the broker at {self.name} has read nothing for {STOPPING_SECONDS:g} s: it is stopped or overloaded; "
                "mapped memory stays valid, and the session goes on when the broker reads again",
            )
        self.break_off(
            BrokerUnavailable,
            f"the broker at {self.name} is gone{self._stopping}: mapped memory stays valid; "
            "start it again (`membrokerd`), and the session goes on",
        )
        if self.lost:
            self._on_lost(self)

    def close(self) -> None:
        """Close the socket, and packets that were not taken. Calls in flight, and later ones, raise `ClosedError`."""
        self.break_off(ClosedError, "the client is closed")
        with self.changed.lock:
            # A descriptor's number can be reused as soon as it is closed, so no thread may be reading from it.
            deadline = time.monotonic() + 5
            while self.reader is not None and (seconds := deadline - time.monotonic()) > 0:
                self.changed.wait(seconds)
        self._close_all()

    def abandon(self) -> None:
        """In a forked child: close what was inherited. Takes no lock; never a shutdown, which the parent would feel."""
        self.end = (ClosedError, "this client belongs to the process that this one was forked from")
        self.changed = Condition()
        self.reader = None
        self._close_all()

    def _close_all(self) -> None:
        self.socket.close()
        while self.unclosed:
            close_each(self.unclosed.pop().descriptors)
