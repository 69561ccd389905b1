"""Packets on their way: made, or taken from the stock, kept if they are a segment's, and delivered.

Runs on the event loop's thread. It owns the descriptors of the stock, and tells the core the outcome of each packet; it
decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from membroker.wire.descriptors import close_all, copy_all

from ..core import effects as fx
from ..core import events as ev
from ..core.denied import Denied, Reason
from ..core.machine import Broker
from ..core.names import Location
from ..device.executor import OWN, Executor
from ..restart.descriptor_store import Store
from ..system import logs
from ..system.failpoints import reach
from ..system.turns import PORTION_SECONDS
from .connections import SessionConnection


class Packets:
    """Carries out the effects that need the driver or the store. `connections` are the sessions' connections."""

    def __init__(
        self,
        broker: Broker,
        executor: Executor,
        store: Store,
        connections: Mapping[int, SessionConnection],
        tell: Callable[[ev.Event], None],
    ) -> None:
        self._broker = broker
        self._executor = executor
        self._store = store
        self._connections = connections
        self._tell = tell
        self._io = asyncio.get_running_loop()
        self._stock: dict[tuple[Location, int], list[int]] = {}
        self.unsent: deque[fx.Send] = deque()
        """Packets of segments that wait for `send_some`: a seal can begin a thousand attaches in one step."""
        self._sending = False
        self._making = 0
        self._idle = asyncio.Event()
        """Set once nothing is being made any more, after the stop."""

    # --- made, or taken from the stock ---

    def make(self, make: fx.Make) -> None:
        """Make a packet, or take it from the stock, and deliver it."""
        if make.stocked:
            self._deliver(make, self._take_stock(make.location, make.extent_bytes, len(make.ids)))
        else:
            self._making += 1
            self._executor.make(make, partial(self._made, make))

    def _made(self, make: fx.Make, outcome: list[int] | Denied) -> None:
        self._making -= 1
        if self._broker.books.stopping and not self._making:
            self._idle.set()
        if isinstance(outcome, Denied):
            self._not_made(make, outcome)
        elif make.session not in self._connections:
            close_all(outcome)
            self._not_made(make, Denied(Reason.DELIVERY_FAILED, {"location": make.location}))
        elif make.segment:
            reach("store")
            kept = partial(self._kept, make, outcome)
            self._store.keep(make.tenant, make.segment, make.ids, outcome, kept)
        else:
            self._deliver(make, outcome)

    def _not_made(self, packet: fx.Make | fx.Send, failure: Denied) -> None:
        if isinstance(packet, fx.Make) and packet.segment:
            kept = self._store.give_up(packet.segment, packet.ids)
            if kept:  # and then it could not be sent
                self._executor.close(packet.tenant, kept)
        self._tell(ev.NotMade(packet.session, packet.request_id, packet.part, failure.reason, failure.numbers))

    def refuse_unwritten(self, packet: fx.Make | fx.Send) -> None:
        """Refuse a packet whose debit or hold could not be written to the journal: nothing is made or sent."""
        if isinstance(packet, fx.Make) and packet.stocked:
            self.drop_stock(fx.DropStock(packet.location, packet.extent_bytes, len(packet.ids)))
        self._not_made(packet, Denied(Reason.JOURNAL_FULL, {"driver_says": self._broker.books.cannot_write}))

    # --- the stock ---

    def stock_later(self, effect: fx.Stock) -> None:
        """Make an extent ahead, after the frames that have come in meanwhile."""
        self._io.call_soon(self._make_stock, effect)

    def _make_stock(self, effect: fx.Stock) -> None:
        location, extent_bytes = kind = effect.location, effect.extent_bytes

        def made(outcome: list[int] | Denied) -> None:
            if not isinstance(outcome, Denied):
                self._stock.setdefault(kind, []).extend(outcome)
            self._tell(ev.Stocked(location, extent_bytes, made=not isinstance(outcome, Denied)))

        self._executor.make(
            fx.Make(
                tenant=OWN,
                session=0,
                request_id=0,
                part=0,
                parts=1,
                ids=range(1),
                extent_bytes=extent_bytes,
                location=location,
            ),
            made,
        )

    def drop_stock(self, effect: fx.DropStock) -> None:
        """Close extents of the stock."""
        dropped = self._take_stock(effect.location, effect.extent_bytes, effect.count)
        self._executor.close(OWN, dropped)

    def _take_stock(self, location: Location, extent_bytes: int, count: int) -> list[int]:
        kept = self._stock.get((location, extent_bytes), [])  # none after the stop, whatever the books say
        taken, kept[:] = kept[:count], kept[count:]
        return taken

    @property
    def stocked(self) -> int:
        """How many descriptors of the stock are open."""
        return sum(map(len, self._stock.values()))

    # --- segments ---

    def _kept(self, make: fx.Make, descriptors: list[int], error: OSError | None) -> None:
        """Send a packet of a segment, now that the store has it; if it could not be stored, it is not made."""
        reach("stored")
        if error is not None:
            close_all(descriptors)
            self._not_made(make, Denied(Reason.DESCRIPTORS_EXHAUSTED, {"driver_says": str(error)}))
        else:
            self._send(make)

    def send_some(self) -> None:
        """Send queued packets of segments, as many as there is time for in this turn, and the rest in later ones."""
        if not self._sending:
            self._send_some()

    def _send_some(self) -> None:
        end, self._sending = time.perf_counter() + PORTION_SECONDS, True
        try:
            while self.unsent:
                self._send(self.unsent.popleft())
                if time.perf_counter() >= end:
                    break
        except Exception as error:  # noqa: BLE001 - as in `Loop.tell`: the sends behind it must happen
            logs.fault(error, effect="Send")
        finally:
            self._sending = bool(self.unsent)
            if self._sending:
                self._io.call_soon(self._send_some)

    def _send(self, packet: fx.Make | fx.Send) -> None:
        """Deliver copies of what the store keeps: a segment may end while they are queued."""
        try:
            copies = copy_all(self._store.lend(packet.segment, packet.ids))
        except OSError as error:
            self._not_made(packet, Denied(Reason.DESCRIPTORS_EXHAUSTED, {"driver_says": str(error)}))
            return
        except KeyError:  # it was queued, and the last session that held the segment has died
            self._not_made(packet, Denied(Reason.DELIVERY_FAILED))
            return
        self._deliver(packet, copies)

    def seal(self, effect: fx.Seal) -> None:
        """Seal the extents of a segment."""
        segment = effect.segment
        row = self._broker.ledger.segments[segment]

        def sealed(failure: Denied | None) -> None:
            done = ev.Sealed(segment) if failure is None else ev.NotSealed(segment, failure.reason, failure.numbers)
            self._tell(done)

        self._executor.seal(row.name.tenant, self._store.lend(segment, row.ids), sealed)

    def drop(self, effect: fx.Drop) -> None:
        """Close the broker's own descriptors of a segment, and the mirror's."""
        descriptors, ended = self._store.give_up(effect.segment), ev.Dropped(effect.segment)
        tenant = self._broker.ledger.segments[effect.segment].name.tenant
        self._executor.close(tenant, descriptors, lambda _: self._store.settle(lambda: self._tell(ended)))

    # --- delivered ---

    def _deliver(self, packet: fx.Make | fx.Send, descriptors: list[int]) -> None:
        connection = self._connections.get(packet.session)
        if connection is None:
            close_all(descriptors)
            self._not_made(packet, Denied(Reason.DELIVERY_FAILED))
            return
        # The packet is queued before the core hears of it, so that an answer follows it or joins it. If the packet
        # has its answer already, it is even sent before that: the worker maps it while the core goes on.
        connection.deliver(packet, descriptors)
        made = ev.Made(packet.session, packet.request_id, packet.part)
        if isinstance(packet, fx.Make) and packet.answer is not None:
            connection.flush()
            self._tell(made)
        else:
            self._tell(made)
            connection.flush()

    # --- the end ---

    async def stop(self, seconds: float) -> None:
        """Wait for the packets that are being made, and close the stock."""
        try:
            if self._making:
                await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            logs.log("stopping before all packets were created", packets=self._making)
        for kept in self._stock.values():
            close_all(kept)
        self._stock.clear()
