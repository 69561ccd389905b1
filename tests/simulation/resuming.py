"""Workers take their sessions up again: what they know of their calls, what they undo, what they state, and who lies.

A worker whose connection ends has had some of its answers: an answer stands behind the packets of its call, so where
one of them was not read, there was none. What it has of a call without an answer it lets go of, before it states what
it holds; the call is made anew when it is back. Here are the operator's orders, too: forget, drain, and the full disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.simulation.sharing import blocks_of
from tests.support.sizes import MIB

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core.denied import Denied
from membrokerd.core.names import Location, ModelName

if TYPE_CHECKING:
    from tests.simulation.processes import Worker
    from tests.simulation.world import World

MILLISECOND = 1_000_000
NEVER = 9
"""Of so many workers one never comes back."""
LATE = 4
UNKNOWN_ID = (1 << 40) + 10_000_000

Declaration = tuple[ModelName, Location]
_BRINGS = ev.Allocate | ev.CreateSegment | ev.AttachSegment
_ANEW = _BRINGS | ev.SealSegment | ev.Declare | ev.RegisterModel


class Resuming:
    """What workers do about their sessions, and the operator about those that nobody takes up."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.drained_until = 0
        self.full_until = 0

    # --- what a worker knows ---

    def asked(self, event: ev.Event) -> None:
        """Note who asked for what."""
        worker = self.world.workers.get(getattr(event, "session", None) or 0)
        if worker and hasattr(event, "call") and hasattr(event, "request_id"):
            worker.asked[event.call] = event
            if isinstance(event, _BRINGS):
                worker.flying[event.request_id] = event

    def answered(self, worker: Worker | None, call: int, result: fx.Result | Denied) -> None:
        """A worker is told what became of its call."""
        if worker is None:
            return
        event = worker.asked.pop(call, None)
        if isinstance(event, ev.Declare) and isinstance(result, fx.Declared):
            worker.declared[event.name, event.location] = result.declared_bytes
        elif isinstance(result, fx.Reconciled):
            self.is_back(worker, result)

    def cut(self, worker: Worker, unread: Iterable[int]) -> None:
        """A connection has ended: calls without an answer are for undoing, as are those of which not all was read."""
        lost = {event.request_id: event for event in worker.asked.values()}
        lost |= {number: worker.flying[number] for number in unread if number in worker.flying}
        worker.undone |= lost.keys()
        worker.recalls.clear()
        worker.lost += lost.values()
        worker.cut_names += [event.name for event in lost.values() if isinstance(event, ev.CreateSegment)]
        worker.asked.clear()
        worker.flying.clear()

    def undo(self, worker: Worker) -> None:
        """Let go of all that calls have brought of which the answer never came, and forget what was to be released."""
        world = self.world
        for number in sorted(worker.undone):
            extents = worker.brought.pop(number, set()) & worker.held
            worker.held -= extents
            world.drop(extents, "word")
            for key in [key for key in worker.maps if key[1] == number]:
                world.drop(worker.maps.pop(key), "word")
        worker.undone.clear()
        worker.unmapped.clear()

    # --- taking up ---

    def resume_one(self) -> None:
        """A worker comes back, soon or late; now and then before the daemon knows that its connection is gone."""
        world, chance = self.world, self.world.random.random()

        def comes(one: Worker) -> bool:
            able = one.process.alive and one.knows_token and world.state(one) in ("open", "detached")
            gone = not one.connected and (not one.resuming or chance < 0.02)
            willing = one.number % NEVER and (one.number % LATE or chance < 0.1)
            return able and bool(willing) and (gone or chance < 0.03)

        worker = world.pick(comes)
        if worker:
            self.greet(worker)

    def greet(self, worker: Worker) -> None:
        """Say Hello with the session's token. What was still queued on the old connection is told before the Holds."""
        world = self.world
        was_connected, unsent = worker.connected, world.endings.hang_up(worker) if worker.connected else []
        self.close_socket(worker)
        event = ev.ResumeSession(world.call(worker.session), worker.session, worker.process.name)
        answers = [
            one.result for one in world.send(event).effects if isinstance(one, fx.Answer) and one.call == event.call
        ]
        if not answers or not isinstance(answers[0], fx.SessionResumed):
            if was_connected:
                world.told += unsent
                world.send(ev.ConnectionLost(worker.session))
            return
        worker.resuming = "greeted"
        late = [one for one in world.told if isinstance(one, ev.NotDelivered) and one.session == worker.session]
        for one in late:
            world.told.remove(one)
        for one in [*late, *unsent]:
            world.send(one)
        if world.random.random() < 0.5 and worker.resuming:
            self.state(worker)

    def close_socket(self, worker: Worker) -> None:
        """What a dead daemon had sent is gone with the socket, unread."""
        for packet in worker.sent:
            self.world.drop(blocks_of(packet.make), "word")
        worker.sent.clear()

    def state_one(self) -> None:
        worker = self.world.pick(lambda one: one.process.alive and one.resuming == "greeted")
        if worker:
            self.state(worker)

    def state(self, worker: Worker) -> None:
        """State all that is held. A liar states more, or less."""
        world = self.world
        self.undo(worker)
        requests: dict[int, list[int]] = {}
        for segment, number in worker.maps:
            requests.setdefault(segment, []).append(number)
        declared = {key: size for key, size in worker.declared.items() if size}
        extents, times = set(worker.held), {segment: len(numbers) for segment, numbers in requests.items()}
        if worker.liar and world.random.random() < 0.4:
            self.hide(worker, extents, times)
        if worker.liar and world.random.random() < 0.4:
            self.claim(worker, extents, times, declared)
        worker.resuming, worker.stated_requests = "stated", requests
        holds = frozenset(extents), times, declared, world.recalling.state(worker)
        guests = frozenset(declared) if worker.is_guest and world.random.random() < 0.9 else frozenset()
        worker.stated = ev.StateHolds(world.call(worker.session), worker.session, *holds, guests)
        world.send(worker.stated)

    def hide(self, worker: Worker, extents: set[int], times: dict[int, int]) -> None:
        """Keep some of what is mapped, and say nothing of it."""
        world = self.world
        hidden = set(world.random.sample(sorted(extents), len(extents) // 2))
        extents -= hidden
        worker.held -= hidden
        worker.process.kept |= hidden
        for segment in list(times)[:1]:
            del times[segment]
            worker.lied.add(segment)
            world.sharing.haunted.add(segment)
            for key in [key for key in worker.maps if key[0] == segment]:
                worker.process.shared += worker.maps.pop(key)

    def claim(self, worker: Worker, extents: set[int], times: dict[int, int], declared: dict[Declaration, int]) -> None:
        """State what others have, what nobody has, more of what one has, and less than nothing."""
        world = self.world
        extents |= {UNKNOWN_ID, world.borrowing.extent_of_another(worker)}
        segment = world.sharing.some(lambda row: True)
        for one in (77, segment.segment if segment else 78):
            times[one] = times.get(one, 0) + 3
        for key in list(declared)[:1]:
            declared[key] = world.random.choice((-40, 3000)) * MIB

    def is_back(self, worker: Worker, result: fx.Reconciled) -> None:
        """A worker is on its session's connection; what nobody knows of it unmaps."""
        world = self.world
        world.referee.resuming.judge_names(worker)
        worker.cut_names.clear()
        worker.connected, worker.resuming, worker.inherited, worker.packets = True, "", False, 0
        unknown = worker.held & set(result.unknown_extents)
        worker.held -= unknown
        world.drop(unknown, "stranger")
        for key in [key for key in worker.maps if key[0] in result.unknown_segments]:
            world.drop(worker.maps.pop(key), "stranger")
        row = world.broker.ledger.sessions.get(worker.session)
        if row is not None:
            worker.declared = {key: charge.declared for key, charge in row.charges.items() if charge.declared}

    def ask_anew(self) -> None:
        """A worker that is back asks again for what it had no answer to."""
        worker = self.world.pick(lambda one: one.process.alive and one.connected and one.lost)
        if worker:
            event = worker.lost.pop(0)
            if isinstance(event, _ANEW):
                call, _, request_id = self.world.ask(worker)
                self.world.send(dataclasses.replace(event, call=call, request_id=request_id))

    def say_last(self, worker: Worker) -> None:
        """A process died in a resume: what it had said is read, now and then, when its death is known already."""
        if worker.resuming == "greeted" and self.world.random.random() < 0.7:
            call, session = self.world.call(worker.session), worker.session
            self.world.send(ev.StateHolds(call, session, frozenset(worker.held), {}, {}))

    # --- who must not ---

    def forge(self) -> None:
        """Somebody has another's token, or one that is no good any more; or states Holds without a Hello."""
        world = self.world
        worker = world.pick(lambda one: one.resuming != "greeted")
        if world.past and world.random.random() < 0.3:
            worker = world.random.choice(world.past)
            world.send(ev.ResumeSession(world.call(-1), worker.session, worker.process.name))
        elif worker and world.random.random() < 0.5:
            world.send(ev.ResumeSession(world.call(-1), worker.session, "thief"))
        elif worker:
            world.send(ev.StateHolds(world.call(-1), worker.session, frozenset(), {}, {}))

    # --- the operator ---

    def forget(self) -> None:
        """Give up on somebody who does not come back, or on anybody."""
        world, anybody = self.world, self.world.random.random() < 0.2
        worker = world.pick(lambda one: anybody or (world.state(one) == "detached" and one.number % NEVER == 0))
        if worker:
            world.send(ev.ForgetSession(world.call(-1), worker.session))

    def drain(self) -> None:
        """Nothing is to be lent for a while."""
        if not self.drained_until:
            self.drained_until = self.world.now + self.world.random.choice((1, 50, 400)) * MILLISECOND
            self.world.send(ev.SetDraining(self.world.call(-1), draining=True))

    def fill_the_disk(self) -> None:
        """Nothing can be written down for a while."""
        if not self.full_until:
            self.full_until = self.world.now + self.world.random.choice((1, 50, 400)) * MILLISECOND
            self.cannot_write("full")

    def cannot_write(self, why: str) -> None:
        world = self.world
        world.broker.books.cannot_write = why
        world.events.append((world.now, f"cannot_write {why}".rstrip()))

    def end_orders(self) -> None:
        """What was for a while is over."""
        if 0 < self.drained_until <= self.world.now:
            self.drained_until = 0
            self.world.send(ev.SetDraining(self.world.call(-1), draining=False))
        if 0 < self.full_until <= self.world.now:
            self.full_until = 0
            self.cannot_write("")

    def inherit(self) -> None:
        """A successor lends, and can write."""
        self.drained_until = self.full_until = 0
