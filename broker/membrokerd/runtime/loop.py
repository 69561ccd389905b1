"""The one place where events meet the core and effects meet the world.

Everything here runs on the event loop's thread. It owns the clock, the calls that wait for an answer, and which
connection a session has; it decides nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

from membroker.v1.handoff_pb2 import Frame, Notice

from ..core import effects as fx
from ..core import events as ev
from ..core.books import Step
from ..core.denied import Denied
from ..core.machine import Broker
from ..core.names import LOCATIONS, Location
from ..device.executor import OWN, Executor, Figures
from ..device.processes import Processes
from ..restart.descriptor_store import Store
from ..system import logs
from ..system.pods import PodNames
from ..system.turns import Turns
from .connections import SessionConnection
from .deferrals import Deferrals
from .guests import Guests
from .idle_sleep import IdleSleep
from .journal_writer import JournalWriter
from .packets import Packets
from .sleeping import Sleeping

MakeEvent = Callable[[int], ev.Event]
"""Returns the event of a call, given its number."""
Reply = Callable[[fx.Result | Denied], None]
RecordStep = Callable[[ev.Event, Step, int], None]
"""Takes an event, the step that it caused and its time."""
RELEASING_AUDIT_SECONDS = 0.01
ELAPSED = 0
"""In place of a call that is deferred: a deadline has come. What was sent before it may lie in a socket, above all
where the daemon itself was stopped, and is read first: an answer that was given in time is not late."""


class Loop:
    """Feeds the core and carries out what it says."""

    def __init__(
        self,
        broker: Broker,
        executor: Executor,
        store: Store,
        *,
        audit_seconds: float,
        figures: Figures | None = None,
        context_bytes: int = 0,
        writer: JournalWriter | None = None,
        turns: Turns | None = None,
        on_audit: Callable[[], None] = lambda: None,
        on_step: Callable[[float], None] = lambda seconds: None,
        on_wait: Callable[[fx.Waited], None] = lambda waited: None,
        on_recall: Callable[[fx.Recalled], None] = lambda recalled: None,
    ) -> None:
        """Build a loop that is not started. `figures` are what the device shows now.

        `on_audit` is called ten times a second, or more often; `on_step` with the seconds of each step of the core;
        `on_wait` when a request that waited for room waits no more; `on_recall` when a recall has ended, or is late.
        """
        self.broker = broker
        self.turns = turns or Turns()
        self.executor = executor
        self.store = store
        self.connections: dict[int, SessionConnection] = {}
        self.resuming: dict[int, SessionConnection] = {}
        """Connections on which a session is being resumed: nothing is delivered on them before that is done."""
        self.on_forget: list[Callable[[int], None]] = []
        self.sleeping = Sleeping(self.connections)
        self.pod_names = PodNames()
        self.idle_sleep = IdleSleep(broker, self.sleeping, self.connections)
        self.guests = Guests(broker, self.connections)
        self.figures: Figures = figures or {}
        self.drain: Notice | None = None
        """The notice of the drain that is under way, for sessions that begin or resume during it."""
        self.deferrals = Deferrals(
            self._read_out,
            lambda: [*self.connections.values(), *self.resuming.values()],
            first=OWN,
        )
        self._audit_seconds = audit_seconds
        self._on_audit = on_audit
        self._on_step = on_step
        self._record_step: RecordStep | None = None
        self._writer = writer
        self.processes = Processes(broker, executor, context_bytes, self.pod_names)
        self._calls = itertools.count(1)
        self._replies: dict[int, Reply] = {}
        self._io = asyncio.get_running_loop()
        self._audit_timer: asyncio.TimerHandle | None = None
        self._look_pending = False
        self._deadline: int | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        packets = self.packets = Packets(broker, executor, store, self.connections, self.tell)
        self._carry_out: dict[type[fx.Effect], Callable[[Any], None]] = {
            fx.Answer: self.answer,
            fx.DrainInputs: lambda effect: self.deferrals.add(broker.waiting.tenant_of(effect.call), effect.call),
            fx.Waited: on_wait,
            fx.SendRecall: self._recall,
            fx.Recalled: on_recall,
            fx.Make: packets.make,
            fx.Send: packets.unsent.append,
            fx.Stock: packets.stock_later,
            fx.DropStock: packets.drop_stock,
            fx.Seal: packets.seal,
            fx.Drop: packets.drop,
            fx.NameSuspects: self.processes.name_suspects,
            fx.Disconnect: self._disconnect,
            fx.Forget: self._forget,
        }

    # --- events in ---

    def ask(self, make_event: MakeEvent, reply: Reply) -> int:
        """Ask the core, and return the number of the call. `reply` is called once, now or later, with its answer.

        What `make_event` raises is raised here: the core is not asked then.
        """
        call = next(self._calls)
        event = make_event(call)
        self._replies[call] = reply
        self.tell(event)
        return call

    def tell(self, event: ev.Event) -> None:
        """Give the core an event and carry out what follows."""
        broker, now = self.broker, clock()
        effects, facts, deadline = step = broker.step(event, now)
        self._on_step((clock() - now) / 1e9)
        is_written = True
        if facts or broker.books.cannot_write:
            is_written = self._writer is None or self._writer.write(facts)
            if not logs.not_logged.issuperset(map(type, facts)):
                for fact in facts:
                    logs.log_fact(fact)
        if self._record_step is not None:  # first: an effect can lead to the next step at once
            self._record_step(event, step, now)
        if deadline != self._deadline:  # before the effects, which can lead to the next step at once
            self._schedule_deadline(deadline)
        for effect in effects:
            try:
                if is_written or not isinstance(effect, fx.Make | fx.Send):
                    self._carry_out[type(effect)](effect)
                else:
                    self.packets.refuse_unwritten(effect)
            except Exception as error:  # noqa: BLE001 - the books have changed: the effects behind must happen
                logs.fault(error, effect=type(effect).__name__)
        if self.packets.unsent:
            self.packets.send_some()
        if broker.releasing.deaths:
            self._schedule_audit(RELEASING_AUDIT_SECONDS)

    def say(self, notice: Notice) -> None:
        """Send a notice to every session."""
        for connection in list(self.connections.values()):
            connection.notify(Frame(notice=notice))

    def call_threadsafe(self, work: Callable[[], None]) -> None:
        """Run `work` on the event loop's thread; may be called from any thread."""
        self._io.call_soon_threadsafe(work)

    def process_died(self, session: int) -> None:
        """Look at the device, then tell the core that a session's process is dead; close its connections."""
        self.executor.look(lambda figures: self._died(session, figures))
        for connection in (self.connections.get(session), self.resuming.get(session)):
            if connection is not None:
                connection.close("its process died")

    def _died(self, session: int, figures: Figures) -> None:
        self._take(figures)
        self.tell(ev.ProcessDied(session, seen(figures)))

    # --- the audit ---

    def start(self, record_step: RecordStep | None = None) -> None:
        """Begin to audit the device, and to call `record_step` with each step from now on."""
        self._record_step = record_step
        self._audit()

    def _audit(self) -> None:
        self._audit_timer = None
        if not self._look_pending:
            self._look_pending = True
            self.executor.look(self._audited)

    def _audited(self, figures: Figures) -> None:
        self._look_pending = False
        self._take(figures)
        self.tell(ev.Audit(seen(figures)))
        self._on_audit()
        self.idle_sleep.look(clock())
        waiting = self.broker.releasing.deaths
        self._schedule_audit(RELEASING_AUDIT_SECONDS if waiting else self._audit_seconds)

    def _take(self, figures: Figures) -> None:
        self.figures = figures
        self.broker.books.device_lost = self.executor.lost

    def _schedule_audit(self, seconds: float) -> None:
        timer = self._audit_timer
        if timer is not None and timer.when() <= self._io.time() + seconds:
            return
        if timer is not None:
            timer.cancel()
        self._audit_timer = self._io.call_later(seconds, self._audit)

    def _schedule_deadline(self, deadline: int | None) -> None:
        """Set the timer that tells the core when its next deadline has come."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        self._deadline = deadline
        if deadline is not None:
            seconds = max(0, deadline - clock()) / 1e9
            self._deadline_timer = self._io.call_later(seconds, self._elapsed)

    def _elapsed(self) -> None:
        self._deadline_timer = None
        if self._deadline:
            self.deferrals.add(OWN, ELAPSED)
        else:  # only what was left over
            self._tell_elapsed()

    def _tell_elapsed(self) -> None:
        self._deadline = None
        self.tell(ev.Elapsed())

    def _read_out(self, call: int) -> None:
        """Hear that all is read which was queued when a call was deferred, or when a deadline came."""
        if call == ELAPSED:
            self._tell_elapsed()
        else:
            self.tell(ev.InputsDrained(call))

    # --- effects out ---

    def answer(self, answer: fx.Answer) -> None:
        """Answer a call."""
        self._replies.pop(answer.call)(answer.result)

    def _recall(self, effect: fx.SendRecall) -> None:
        connection = self.connections.get(effect.session) or self.resuming.get(effect.session)
        if connection is not None:
            connection.recall(effect)

    def _disconnect(self, effect: fx.Disconnect) -> None:
        connection = self.connections.get(effect.session)
        if connection is not None:
            connection.disconnect(effect.why)

    def _forget(self, effect: fx.Forget) -> None:
        for forget in self.on_forget:
            forget(effect.session)

    # --- the end ---

    async def stop(self, seconds: float) -> None:
        """Take no more requests, and wait for the packets that are being made."""
        self.broker.books.stopping = True
        self.tell(ev.Elapsed())  # requests that wait are refused
        for timer in (self._audit_timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()
        if self._writer is not None:
            self._writer.close()
        await self.packets.stop(seconds)


clock = time.monotonic_ns
"""Return CLOCK_MONOTONIC in nanoseconds. It never goes back, goes on over daemons, is the clock of the event loop's
timers and of the library's deadlines, and stands still while the machine sleeps: nobody can answer in that time."""


def seen(figures: Figures) -> dict[Location, int | None]:
    """Return what the core wants to know of the device's figures: bytes in use."""
    return {where: info.used if (info := figures.get(where)) else None for where in LOCATIONS}
