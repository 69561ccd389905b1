"""The one place where events meet the core and effects meet the world.

Everything here runs on the event loop's thread. It owns the clock, the calls that wait for an answer, and the links
to sessions' connections; it decides nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from membroker.v1.handoff_pb2 import Frame, Notice
from membroker.vmm import MemoryInfo
from membroker.wire.frames import close_all

from .core import effects as fx
from .core import events as ev
from .core.denied import Denied, Reason
from .core.machine import Broker
from .deferrals import Deferrals
from .executor import Executor, Failure, Figures
from .failpoints import reach
from .observe import logs
from .processes import Processes
from .restart.descriptor_store import Store
from .turns import SHARE_SECONDS, Turns
from .writer import Writer

Reply = Callable[[fx.Result | Denied], None]
RELEASING_AUDIT_SECONDS = 0.01


class Link(Protocol):
    """A session's connection, as far as effects need it."""

    heard: int
    """The bytes that were read from it so far."""

    def queued(self) -> int:
        """Return the bytes that have arrived and were not read; 0 while nothing is read."""
        ...

    def read(self) -> None:
        """Read frames, as many as this connection and its tenant may send in one turn."""
        ...

    def deliver(self, packet: fx.Make | fx.Send, descriptors: list[int]) -> None:
        """Queue a packet; the descriptors are the link's from now on."""
        ...

    def flush(self) -> None:
        """Send what is queued."""
        ...

    def notify(self, frame: Frame) -> None:
        """Say something on the broker's own account."""
        ...

    def recall(self, recall: fx.Recall) -> None:
        """Ask for memory."""
        ...

    def disconnect(self, why: str) -> None:
        """Close the connection because its peer broke the protocol."""
        ...

    def close(self, why: str) -> None:
        """Close the connection."""
        ...


class Loop:
    """Feeds the core and carries out what it says."""

    def __init__(
        self,
        broker: Broker,
        executor: Executor,
        store: Store,
        audit_seconds: float,
        observe_step: Callable[[float], None] = lambda seconds: None,
        context_bytes: int = 0,
        writer: Writer | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.broker = broker
        self.turns = turns or Turns()
        self.executor = executor
        self.store = store
        self.links: dict[int, Link] = {}
        self.resuming: dict[int, Link] = {}
        """Connections on which a session is being taken up: nothing is delivered on them before that is done."""
        self.on_forget: list[Callable[[int], None]] = []
        self.on_audit: Callable[[], None] = lambda: None
        """Called ten times a second, or more often."""
        self.observe_wait: Callable[[fx.Waited], None] = lambda waited: None
        """Called when a request that waited for room waits no more."""
        self.observe_recall: Callable[[fx.Recalled], None] = lambda recalled: None
        """Called when a recall has ended, or is late."""
        self.figures: Figures = {}
        self.drain: Notice | None = None
        """The drain that goes on, as a session is told of it that begins, or goes on, in the middle of it."""
        self.deferrals = Deferrals(
            lambda call: self.tell(ev.InputsDrained(call)), lambda: [*self.links.values(), *self.resuming.values()]
        )
        self._sends: deque[fx.Send] = deque()
        """Packets of segments that are to be sent: a seal can begin a thousand attaches in one step."""
        self._sending = False
        self._audit_seconds = audit_seconds
        self._observe_step = observe_step
        self._writer = writer
        self.processes = Processes(broker, executor, context_bytes)
        self._calls = itertools.count(1)
        self._replies: dict[int, Reply] = {}
        self._making = 0
        self._idle = asyncio.Event()
        """Set once nothing is being made any more, after the stop."""
        self._io = asyncio.get_running_loop()
        self._audit_timer: asyncio.TimerHandle | None = None
        self._look_pending = False
        self._deadline: int | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._stock: dict[tuple[ev.Location, int], list[int]] = {}

    # --- events in ---

    def ask(self, make_event: Callable[[int], ev.Event], reply: Reply) -> int:
        """Ask the core, and return the call's number. `reply` is called once, now or later, with its answer."""
        call = next(self._calls)
        self._replies[call] = reply
        self.tell(make_event(call))
        return call

    def tell(self, event: ev.Event) -> None:
        """Give the core an event and carry out what follows."""
        start = time.perf_counter()
        broker = self.broker
        effects, facts = broker.step(event, clock())
        self._observe_step(time.perf_counter() - start)
        is_written = True
        if self._writer is not None and (facts or broker.books.cannot_write):
            is_written = self._writer.write(facts)
        for fact in facts:
            if type(fact) not in logs.not_logged:
                logs.log_fact(fact)
        for effect in effects:
            try:
                if is_written or not isinstance(effect, fx.Make | fx.Send):
                    _CARRY_OUT[type(effect)](self, effect)
                else:
                    self._unwritten(effect)
            except Exception as error:  # noqa: BLE001 - the books have changed: the effects behind must happen
                logs.fault(error, effect=type(effect).__name__)
        if self._sends and not self._sending:
            self._send_some()
        if broker.settling.deaths:
            self._schedule_audit(RELEASING_AUDIT_SECONDS)
        timed = broker.waiting.deadline is not None or broker.recalls.deadline is not None
        deadline = broker.deadline if timed else broker.segments.deadline
        if deadline != self._deadline:
            self._schedule_deadline()

    def _unwritten(self, packet: fx.Make | fx.Send) -> None:
        """Nothing is made of a debit, and nothing sent of a hold, that is not on file."""
        if isinstance(packet, fx.Make) and packet.stocked:
            stocked = self._take_stock(packet.location, packet.extent_bytes, len(packet.ids))
            self.executor.close(stocked, lambda _: None)
        self._not_made(packet, Failure(Reason.JOURNAL_FULL, {"driver_says": self.broker.cannot_write}))

    def say(self, notice: Notice) -> None:
        """Tell every session something on the broker's own account."""
        for link in list(self.links.values()):
            link.notify(Frame(notice=notice))

    def call_threadsafe(self, work: Callable[[], None]) -> None:
        """Run `work` on the event loop's thread; may be called from any thread."""
        self._io.call_soon_threadsafe(work)

    def process_died(self, session: int) -> None:
        """A session's process is dead: look at the device, then tell the core."""
        self.executor.look(lambda figures: self._died(session, figures))
        for link in (self.links.get(session), self.resuming.get(session)):
            if link is not None:
                link.close("its process died")

    def _died(self, session: int, figures: Figures) -> None:
        self.figures = figures
        self.tell(ev.ProcessDied(session, seen(figures)))

    # --- the audit ---

    def start(self) -> None:
        """Begin to audit the device."""
        self._audit()

    def _audit(self) -> None:
        self._audit_timer = None
        if not self._look_pending:
            self._look_pending = True
            self.executor.look(self._audited)

    def _audited(self, figures: Figures) -> None:
        self._look_pending = False
        self.figures = figures
        self.tell(ev.Audit(seen(figures)))
        self.on_audit()
        waiting = self.broker.settling.deaths
        self._schedule_audit(RELEASING_AUDIT_SECONDS if waiting else self._audit_seconds)

    def _schedule_audit(self, seconds: float) -> None:
        timer = self._audit_timer
        if timer is not None and timer.when() <= self._io.time() + seconds:
            return
        if timer is not None:
            timer.cancel()
        self._audit_timer = self._io.call_later(seconds, self._audit)

    def _schedule_deadline(self) -> None:
        """Let the core hear of the time that it waits for."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        self._deadline = self.broker.deadline
        if self._deadline is not None:
            seconds = max(0, self._deadline - clock()) / 1e9
            self._deadline_timer = self._io.call_later(seconds, self._elapsed)

    def _elapsed(self) -> None:
        self._deadline = self._deadline_timer = None
        self.tell(ev.Elapsed())

    # --- effects out ---

    def _answer(self, answer: fx.Answer) -> None:
        self._replies.pop(answer.call)(answer.result)

    def _make(self, make: fx.Make) -> None:
        if make.stocked:
            self._deliver(make, self._take_stock(make.location, make.extent_bytes, len(make.ids)))
        else:
            self._making += 1
            self.executor.make(make, lambda outcome: self._made(make, outcome))

    def _stock_later(self, effect: fx.Stock) -> None:
        self._io.call_soon(self._make_stock, effect)  # the frames that have come in meanwhile go first

    def _drop_stock(self, effect: fx.DropStock) -> None:
        dropped = self._take_stock(effect.location, effect.extent_bytes, effect.count)
        self.executor.close(dropped, lambda _: None)

    def _drop(self, effect: fx.Drop) -> None:
        descriptors, ended = self.store.give_up(effect.segment), ev.Dropped(effect.segment)
        self.executor.close(descriptors, lambda _: self.store.settle(lambda: self.tell(ended)))

    def _recall(self, effect: fx.Recall) -> None:
        link = self.links.get(effect.session) or self.resuming.get(effect.session)
        if link is not None:
            link.recall(effect)

    def _disconnect(self, effect: fx.Disconnect) -> None:
        link = self.links.get(effect.session)
        if link is not None:
            link.disconnect(effect.why)

    def _forget(self, effect: fx.Forget) -> None:
        for forget in self.on_forget:
            forget(effect.session)

    def _make_stock(self, effect: fx.Stock) -> None:
        kind = (effect.location, effect.extent_bytes)

        def made(outcome: list[int] | Failure) -> None:
            if not isinstance(outcome, Failure):
                self._stock.setdefault(kind, []).extend(outcome)
            self.tell(ev.Stocked(*kind, made=not isinstance(outcome, Failure)))

        self.executor.make(fx.Make(0, 0, 0, 1, range(1), effect.extent_bytes, effect.location), made)

    def _take_stock(self, location: ev.Location, extent_bytes: int, count: int) -> list[int]:
        kept = self._stock.get((location, extent_bytes), [])  # none after the stop, whatever the books say
        taken, kept[:] = kept[:count], kept[count:]
        return taken

    @property
    def stocked(self) -> int:
        """How many descriptors of the stock are open."""
        return sum(map(len, self._stock.values()))

    def _made(self, make: fx.Make, outcome: list[int] | Failure) -> None:
        self._making -= 1
        if self.broker.stopping and not self._making:
            self._idle.set()
        if isinstance(outcome, Failure):
            self._not_made(make, outcome)
        elif make.session not in self.links:
            close_all(outcome)
            self._not_made(make, Failure(Reason.DELIVERY_FAILED, {"location": make.location}))
        elif make.segment:
            reach("store")
            self.store.keep(make.segment, make.ids, outcome, lambda error: self._kept(make, outcome, error))
        else:
            self._deliver(make, outcome)

    def _kept(self, make: fx.Make, descriptors: list[int], error: OSError | None) -> None:
        """The store has a packet of a segment, or has it not: only then may anybody get it."""
        reach("stored")
        if error is not None:
            close_all(descriptors)
            self._not_made(make, Failure(Reason.DESCRIPTORS_EXHAUSTED, {"driver_says": str(error)}))
        else:
            self._send(make)

    def _send_some(self) -> None:
        """Send packets of segments, as many as there is time for in this turn, and the rest in later ones."""
        end, self._sending = time.perf_counter() + SHARE_SECONDS, True
        try:
            while self._sends:
                self._send(self._sends.popleft())
                if time.perf_counter() >= end:
                    break
        except Exception as error:  # noqa: BLE001 - as in `tell`: the sends behind it must happen
            logs.fault(error, effect="Send")
        finally:
            self._sending = bool(self._sends)
            if self._sending:
                self._io.call_soon(self._send_some)

    def _send(self, packet: fx.Make | fx.Send) -> None:
        """Deliver copies of what the store keeps: a segment may end while they are queued."""
        copies: list[int] = []
        try:
            for descriptor in self.store.lend(packet.segment, packet.ids):
                copies.append(os.dup(descriptor))
        except OSError as error:
            close_all(copies)
            self._not_made(packet, Failure(Reason.DESCRIPTORS_EXHAUSTED, {"driver_says": str(error)}))
            return
        self._deliver(packet, copies)

    def _deliver(self, packet: fx.Make | fx.Send, descriptors: list[int]) -> None:
        link = self.links.get(packet.session)
        if link is None:
            close_all(descriptors)
            self._not_made(packet, Failure(Reason.DELIVERY_FAILED, {}))
            return
        # The packet is queued before the core hears of it: the answer that may follow stands behind it, or in it. One
        # that has its answer already goes first: the worker maps while the books are done.
        link.deliver(packet, descriptors)
        made = ev.Made(packet.session, packet.request_id, packet.part)
        if isinstance(packet, fx.Make) and packet.answer is not None:
            link.flush()
            self.tell(made)
        else:
            self.tell(made)
            link.flush()

    def _not_made(self, packet: fx.Make | fx.Send, failure: Failure) -> None:
        if isinstance(packet, fx.Make) and packet.segment:
            kept = self.store.give_up(packet.segment, packet.ids)
            if kept:  # and then it could not be sent
                self.executor.close(kept, lambda _: None)
        self.tell(ev.NotMade(packet.session, packet.request_id, packet.part, failure.reason, failure.numbers))

    def _seal(self, effect: fx.Seal) -> None:
        segment = effect.segment
        ids = self.broker.ledger.segments[segment].ids

        def sealed(failure: Failure | None) -> None:
            done = ev.Sealed(segment) if failure is None else ev.NotSealed(segment, failure.reason, failure.numbers)
            self.tell(done)

        self.executor.seal(self.store.lend(segment, ids), sealed)

    # --- the end ---

    async def stop(self, seconds: float) -> None:
        """Take no more requests, and wait for the packets that are being made."""
        self.broker.stopping = True
        self.tell(ev.Elapsed())  # requests that wait are refused
        for timer in (self._audit_timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()
        if self._writer is not None:
            self._writer.close()
        try:
            if self._making:
                await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            logs.log("stopping with packets unmade", packets=self._making)
        for kept in self._stock.values():
            close_all(kept)
        self._stock.clear()


_CARRY_OUT: dict[type[fx.Effect], Callable[[Loop, Any], None]] = {
    fx.Answer: Loop._answer,
    fx.DrainInputs: lambda loop, effect: loop.deferrals.add(effect.call),
    fx.Waited: lambda loop, waited: loop.observe_wait(waited),
    fx.Recall: Loop._recall,
    fx.Recalled: lambda loop, recalled: loop.observe_recall(recalled),
    fx.Make: Loop._make,
    fx.Send: lambda loop, send: loop._sends.append(send),
    fx.Stock: Loop._stock_later,
    fx.DropStock: Loop._drop_stock,
    fx.Seal: Loop._seal,
    fx.Drop: Loop._drop,
    fx.NameSuspects: lambda loop, rise: loop.processes.name_suspects(rise),
    fx.Disconnect: Loop._disconnect,
    fx.Forget: Loop._forget,
}


clock = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
"""Return CLOCK_BOOTTIME in nanoseconds: it never goes back, and counts while the machine sleeps."""


def seen(figures: Figures) -> dict[ev.Location, int | None]:
    """Return what the core wants to know of the device's figures: bytes in use."""
    return {where: _used(figures.get(where)) for where in ev.LOCATIONS}


def _used(info: MemoryInfo | None) -> int | None:
    return info.used if info else None
