"""The library's machines of calls and outages without a socket or a thread, for transcripts and simulation.

It does what `Connection` does around `Calls`, one step at a time: a call that begins is sent or waits in front, a call
takes its packets, and one that has failed undoes what it did and releases it. Descriptors are numbers. As
`ReconnectingConnection` does around `Outages`, it repeats calls on the next connection.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from membroker.errors import AccessDenied, BrokerUnavailable, Cancelled, MembrokerError, ProtocolError
from membroker.session import machine
from membroker.session.inventory import HeldResources, Inventory
from membroker.session.machine import Call, Calls, detach, releases
from membroker.session.outages import Outages
from membroker.v1 import handoff_pb2 as pb
from membroker.wire.frames import Packet


class Asked:
    """One call of a program, over as many connections as it takes. It ends with `result` or `error`."""

    def __init__(self, frame: pb.Frame, *, patient: bool | None = None, note: Callable[[], None] | None = None) -> None:
        self.frame = frame
        self.patient = patient
        self.note = note
        self.call: Call | None = None
        self.failure: tuple[Calls, MembrokerError, float] | None = None
        """The connection on which it failed, why, and when, as long as it waits for another one."""
        self.placed: list[int] = []
        self.fails_next: Exception | None = None
        """What its placement raises next."""
        self.is_stuck = False
        """Whether the device fails to unmap."""
        self.is_cancelled = False
        self.result: object = None
        self.error: Exception | None = None

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        """Map extents, or fail."""
        if self.fails_next is not None:
            error, self.fails_next = self.fails_next, None
            raise error
        assert extent_bytes >= 0
        assert len(extent_ids) == len(descriptors)
        self.placed += extent_ids

    def undo(self) -> None:
        """Unmap them all, or fail."""
        if self.is_stuck:
            raise RuntimeError("the device is lost")
        self.placed.clear()


class PureClient:
    """One session, whose calls wait `outage` seconds for a connection. `sent` are the frames for the broker."""

    def __init__(self, revision: int = 4, outage: float = 30.0) -> None:
        self.inventory = Inventory()
        self.sent: deque[pb.Frame] = deque()
        self.asked: list[Asked] = []
        """The calls that have not ended."""
        self.odd: list[str] = []
        """The kinds of frames for no call that are worth a warning."""
        self.revision = revision
        self.now = 0.0
        self._ids = itertools.count(2)
        self.outages = Outages("/test/handoff.sock", self._connected(), outage=outage, timeout=5.0)

    def _connected(self) -> Calls:
        return Calls(self.inventory, "/test/handoff.sock", self.revision)

    @property
    def calls(self) -> Calls:
        """The calls of the present connection, or of the lost one."""
        return self.outages.calls

    # What the program does

    def ask(self, asked: Asked) -> Asked:
        """Begin a call."""
        self.asked.append(asked)
        self._begin(asked)
        return asked

    def _begin(self, asked: Asked) -> None:
        asked.frame.request_id = next(self._ids)
        asked.call = Call(asked.frame, asked, patient=asked.patient, note=asked.note)
        if asked.is_cancelled:
            asked.error = Cancelled("before it began")
        else:
            try:
                self._go(asked)
            except MembrokerError as error:
                asked.error = error
        if asked.error is not None:
            self._over(asked)

    def _go(self, asked: Asked) -> None:
        if self.calls.begin(asked.call):
            self._send(asked.frame)
            asked.call.sent = True

    def cancel(self, asked: Asked) -> None:
        """Give a call up."""
        asked.is_cancelled = True
        call = asked.call
        if call is None:
            asked.error = Cancelled("without a connection")
            self.asked.remove(asked)
        elif self.calls.give_up(call):
            frame = self.calls.cancels(call)
            if frame is None:
                self.lose()
            else:
                self._send(frame)
        elif not call.sent:
            asked.error = Cancelled("in front")
            self._over(asked)

    def release(self, extent_ids: Sequence[int]) -> None:
        """Release extents that are unmapped."""
        for frame in releases(self.inventory.strike_extents(extent_ids)):
            self._number(frame)

    def detach(self, generation: int) -> None:
        if self.inventory.strike_segment(generation):
            self._number(detach(generation))

    def interrupt(self, asked: Asked) -> None:
        """Ctrl-C in a call: what it did is undone, and the connection ends. The call is not repeated."""
        call = asked.call
        if call is not None:
            self._undo(asked, call)
            self.calls.interrupted(call)
            self.calls.over(call)
        asked.error = Cancelled("interrupted")
        self.asked.remove(asked)
        self.lose(interrupted=True)

    def _number(self, frame: pb.Frame) -> None:
        frame.request_id = frame.request_id or next(self._ids)
        self._send(frame)

    def _send(self, frame: pb.Frame) -> None:
        if self.calls.end is None:
            frame.acknowledged = self.calls.acknowledged
            self.sent.append(pb.Frame.FromString(frame.SerializeToString()))

    # What the broker does

    def hear(self, packet: Packet) -> Asked | None:
        """A packet has arrived. What it brings is taken by `take`; return whose it is."""
        call = self.calls.arrived(packet)
        if call is None:
            if self.calls.is_odd(packet.frame):
                self.odd.append(str(packet.frame.WhichOneof("kind")))
            for frame in list(self.calls.stray(packet)):
                self._number(frame)
            return None
        return next(asked for asked in self.asked if asked.call is call)

    def take(self, asked: Asked) -> None:
        """Let a call take what has come for it, and end if it is answered."""
        call = asked.call
        while call.inbox:
            packet = call.inbox[0]
            delivery = packet.frame.delivery
            try:
                if self.calls.take(call):
                    asked.place(delivery.extent_ids, packet.descriptors, delivery.extent_bytes)
            except Exception as error:  # noqa: BLE001 - as a placement may raise anything
                self._fail(asked, error)
            finally:
                call.inbox.popleft()
                ack = self.calls.taken(packet)
            if ack is not None:
                self._send(ack)
        if call.outcome is not None:
            self._end(asked, call)

    def _fail(self, asked: Asked, error: Exception) -> None:
        assert asked.call is not None
        asked.error = asked.error or error
        self._undo(asked, asked.call)
        self.calls.give_up(asked.call)

    def _undo(self, asked: Asked, call: Call) -> None:
        call.keep = True
        with suppress(RuntimeError):
            asked.undo()
            call.keep = False

    def _end(self, asked: Asked, call: Call) -> None:
        if asked.error is None and asked.is_cancelled:
            self._fail(asked, Cancelled("at the broker"))
        elif asked.error is None and isinstance(call.outcome, Exception):
            self._fail(asked, call.outcome)
        elif asked.error is None:
            try:
                self.calls.record(call)
            except ProtocolError as error:
                self._fail(asked, error)
            else:
                asked.result = call.outcome
        if asked.error is not None:
            for frame in self.calls.goes_back(call):
                self._number(frame)
            if call.keep:
                self.calls.record(call, is_whole=False)
        self._over(asked)

    def _over(self, asked: Asked) -> None:
        """A call is over. It is repeated on another connection, if the machine says so: then it waits."""
        assert asked.call is not None
        self._admit(self.calls.over(asked.call))
        if isinstance(asked.error, BrokerUnavailable | AccessDenied):
            asked.failure, asked.call, asked.error = (self.calls, asked.error, self.now), None, None
            self.go_on()
        else:
            self.asked.remove(asked)

    def hurry(self, asked: Asked) -> None:
        """The time of a call in front is over."""
        assert asked.call is not None
        self._admit(self.calls.hurry(asked.call))

    def _admit(self, admitted: Collection[int]) -> None:
        if self.calls.end is None:
            for asked in [asked for asked in self.asked if asked.call is not None]:
                if asked.call is not None and asked.call.request_id in admitted:
                    self._go(asked)

    # An outage

    def lose(self, *, interrupted: bool = False, starts: bool = True) -> None:
        """The connection is lost: every call undoes what it did. Unless a thread `starts`, nothing reconnects yet."""
        self.calls.end_with(BrokerUnavailable, "lost", interrupted=interrupted)
        self.outages.move("connection lost")
        self.sent.clear()
        for asked in [asked for asked in self.asked if asked.call is not None]:
            call = asked.call
            assert call is not None
            self._undo(asked, call)
            if call.keep:
                self.calls.record(call, is_whole=False)
                asked.error = asked.error or RuntimeError("the device is lost")
            elif asked.is_cancelled:
                asked.error = asked.error or Cancelled("while the connection was lost")
            asked.error = asked.error or BrokerUnavailable("lost")
            self._over(asked)
        if starts:
            self.start()

    def start(self) -> bool:
        """A thread has started that reconnects, unless another one does."""
        return self.outages.begin(self.calls, self.now)

    def failed(self, error: Exception) -> str:
        """An attempt to resume has failed."""
        warning = self.outages.failed(error, self.now)
        self.go_on()
        return warning

    def close(self) -> None:
        """The program closes the client: no call waits any more."""
        self.outages.close_soon()
        self.go_on()

    def leave(self, cause: str) -> None:
        """The session has said goodbye, or is closed."""
        self.outages.move(cause)
        self.go_on()

    def go_on(self) -> None:
        """Every call that waits for a connection looks whether it still does."""
        for asked in list(self.asked):
            try:
                if asked.failure is not None and not self.outages.wait(*asked.failure, self.now):
                    asked.failure = None
                    self._begin(asked)
            except MembrokerError as error:
                asked.error, asked.failure = error, None
                self.asked.remove(asked)

    def pass_time(self, seconds: float) -> None:
        """Some calls have waited too long now."""
        self.now += seconds
        self.go_on()

    def resume(self) -> HeldResources:
        """Return what to state on a new connection. `agree` follows; until then calls are those of the lost one."""
        return self.inventory.held()

    def agree(self, stated: HeldResources, extents: Collection[int] = (), generations: Collection[int] = ()) -> None:
        """The broker has answered what was stated, and does not know these. Repeat all calls."""
        self.inventory.forget(extents, generations)
        self.outages.resumed(self._connected())
        for frame in machine.catch_up(stated.without(extents, generations), self.inventory.held()):
            self._number(frame)
        self.go_on()
