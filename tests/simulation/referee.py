"""What every step of the core must keep, judged from outside: from the world's truth, and by sums of its own.

The one thing that the core is allowed to get wrong is *when* a dead session's memory is gone: it knows a sum only, and
a fall of that sum that was somebody else's can credit a death early (docs/decisions.md, on credits). Each
such credit is counted, must be explained by falls of at least its size within the death's own window, and all of them
together must stay below EARLY_AT_MOST of the proven ones. The world is made to provoke them: workers give memory back
all the time while deaths wait, and figures are told tens of milliseconds late, so that a release which was heard in
between makes them look too high (nine of ten early credits stand beside such a word). In such a world every tenth
proven credit is early; the bound leaves room for seeds.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.guarantees_referee import GuaranteesReferee
from tests.simulation.parts import Counting, once_a_step
from tests.simulation.recalls_referee import RecallsReferee
from tests.simulation.resuming_referee import ResumingReferee
from tests.simulation.sharing_referee import SharingReferee
from tests.simulation.stock_referee import StockReferee
from tests.simulation.waiting_referee import WaitingReferee

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core.books import Step
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.ledger import replay
from membrokerd.core.machine import Broker
from membrokerd.core.names import Location, ModelName, QuotaKey
from membrokerd.core.recount import check, recount
from membrokerd.core.rows import Quota, SegmentRow, SessionRow

if TYPE_CHECKING:
    from tests.simulation.world import World

WINDOW = 128
NOTICE_NS = 1_000_000_000
"""How far back the core may look for what a death falls from. Stated here, not taken from the core."""
FALLS_KEPT_NS = 20_000_000_000
EARLY_AT_MOST = 0.20
RECOUNT_EVERY = 1_000


@dataclass(slots=True)
class Death:
    """A death that was told, or a segment whose holder died and that was dropped.

    Its memory at each location, and since when a fall may have been taken for its own.
    """

    at: int
    since: int
    blocks: dict[Location, set[int]] = field(default_factory=dict)
    slack: int = 1
    """Granules that its fall may be short of: one more where what it falls from was on file."""
    charged: dict[Location, int] = field(default_factory=dict)
    """What it is charged, when a step begins that may settle it."""


class Referee(Counting):
    """Judges each step of a world, and the end."""

    COUNTED = ("judged", "sessions", "proven", "timed_out", "early")

    def __init__(self, world: World) -> None:
        self.world = world
        self.sharing = SharingReferee(world)
        self.stock = StockReferee(world)
        self.resuming = ResumingReferee(world)
        self.judged = 0
        self.lost = False
        """Whether the device did not answer when the core was asked."""
        self.last_id = 0
        self.quotas: dict[QuotaKey, Quota] = {}
        self.guarantees = GuaranteesReferee(self)
        self.recalls = RecallsReferee(self)
        self.waiting = WaitingReferee(self)
        self.asked: dict[ModelName, dict[Location, int]] = {}
        self.owners: dict[int, int] = {}
        self.deaths: dict[int, Death] = {}
        self.falls: dict[Location, deque[tuple[int, int, str, int]]] = {"device": deque(), "host": deque()}
        self.audits: deque[tuple[int, int]] = deque()
        """When an audit was told, and when the device had been read for it."""
        self.noted_at: dict[Location, int] = {}
        """When the figure was read that is on file."""
        self.began_at = -NOTICE_NS
        """When this daemon began."""
        self.sessions = 0
        self.proven = 0
        self.timed_out = 0
        self._referee = self
        self.known: dict[Any, Any] | None = None
        """While a step is judged: see `once_a_step`."""
        self.drops: dict[int, int] = {}
        """By segment: since when what falls can be the memory of one that the broker closes."""
        self.early: Counter[str] = Counter()
        """Proven credits whose memory was still held, by the kind of the largest fall that explains them."""

    # --- what the world reports ---

    def fell(self, where: Location, size: int, why: str, block: int) -> None:
        """The device shows less, or is expected to show more: what could be taken for a death's fall."""
        if not size:
            return
        falls = self.falls[where]
        falls.append((self.world.now, size, why, block))
        while self.world.now - falls[0][0] > FALLS_KEPT_NS:
            falls.popleft()

    def audited(self, read_at: int, seen: ev.Seen) -> None:
        """An audit was told: deaths that are older than the settle time are over, unless a packet is being made."""
        world = self.world
        self.audits.append((world.now, read_at))
        self.noted_at |= {where: read_at for where, size in seen.items() if size is not None}
        while len(self.audits) > 1 and world.now - self.audits[0][0] > NOTICE_NS:
            self.audits.popleft()
        for owner, death in self.deaths.items():
            late = world.now - death.at > world.broker.books.rules.settle_ns
            waits = owner in world.workers and world.workers[owner].makes
            assert not late or waits, f"{owner} is not settled in time"

    # --- each step ---

    def before(self, event: ev.Event) -> None:
        """Take down what a step may be the end of."""
        row = self.world.broker.ledger.sessions.get(event.session) if isinstance(event, ev.ProcessDied) else None
        if row is not None and row.session not in self.deaths:
            self._died(row)
        self.lost = bool(self.world.broker.books.device_lost)
        self.stock.before()
        self.waiting.take_down(event)
        self.recalls.before(event)
        self.resuming.before(event)
        if isinstance(event, ev.Dropped):
            segment = self.world.broker.ledger.segments[event.segment]
            if segment.uncertain:
                self._dropped(segment)
        if isinstance(event, ev.ProcessDied | ev.Audit | ev.Dropped):
            for owner, death in self.deaths.items():
                charged = self._row(owner).charged
                death.charged = {where: charged(where) for where in death.blocks}

    def _row(self, owner: int) -> SessionRow | SegmentRow:
        ledger = self.world.broker.ledger
        return ledger.sessions.get(owner) or ledger.segments[owner]

    def judge(self, event: ev.Event, step: Step, before: int) -> None:
        """Hold one step to all that must be true after it."""
        world = self.world
        ledger = world.broker.ledger
        check(ledger)
        self.judged += 1
        if self.judged % RECOUNT_EVERY == 0:
            recount(ledger)
        changes = [fact for fact in step.facts if not isinstance(fact, ft.UnaccountedSeen)]
        assert ledger.revision == before + len(changes)
        decided = self.waiting.decided()
        if step.facts and self._refused(event, step) and not self._replaces(event, step) and not decided:
            raise AssertionError(f"{event} was refused and changed {step.facts}")
        assert all(size >= 0 for size in world.broker.books.making.values())
        for effect in step.effects:
            if isinstance(effect, fx.Make | fx.Send):
                worker = world.workers[effect.session]
                packets = [*worker.makes, *(packet.make for packet in worker.sent)]
                assert sum(len(packet.ids) for packet in packets) <= WINDOW, "more than the window on its way"
            if isinstance(effect, fx.Make) and not effect.segment:
                owned = ledger.sessions[effect.session].extents
                assert all(extent in owned for extent in effect.ids), "a packet is made of what is not charged"
        for total in ledger.totals.values():
            assert 0 <= total.lent + total.releasing <= total.lent + total.releasing + total.stock <= total.capacity
        self._follow(step)
        self.guarantees.follow(step)
        self.recalls.follow(event, step)
        self.known = {}
        looked = isinstance(event, ev.ProcessDied | ev.Audit)
        for fact in step.facts:
            proven = isinstance(fact, ft.LocationSettled | ft.SegmentEnded) and fact.proven
            assert looked or not proven, "a credit is proven, and the device was not asked"
            self._judge_fact(fact)
        self._judge_wants(event, step)
        if self.lost:
            self._judge_lost(event, step)
        self.sharing.judge(event, decided, step)
        self.stock.judge(event, decided, step)
        self.resuming.judge(event, step)
        self.recalls.judge(event, step)
        self.waiting.judge(event, step)
        self.known = None

    def _judge_lost(self, event: ev.Event, step: Step) -> None:
        """Nothing is lent of a device that does not answer, nobody waits for it, and no stock of it is kept."""
        lent = [fact for fact in step.facts if isinstance(fact, ft.Debited | ft.SegmentBegan)]
        assert not lent, f"lent of a device that does not answer: {lent}"
        waiting = self.world.broker.waiting
        assert waiting.left_over or not waiting.waiters(), "requests wait for a device that does not answer"
        if isinstance(event, ev.Audit):
            kept = [total.stock for total in self.world.broker.ledger.totals.values()]
            assert not any(kept), "stock is kept of a device that does not answer"

    @staticmethod
    def _refused(event: ev.Event, step: Step) -> bool:
        """Say whether this very question was refused (outcomes may end other calls with a refusal)."""
        call = getattr(event, "call", None)
        return any(
            isinstance(effect, fx.Answer) and effect.call == call and isinstance(effect.result, Denied)
            for effect in step.effects
        )

    @staticmethod
    def _replaces(event: ev.Event, step: Step) -> bool:
        """Say whether an older declaration was decided in the same step."""
        others = [
            one for one in step.effects if isinstance(one, fx.Answer) and one.call != getattr(event, "call", None)
        ]
        return isinstance(event, ev.Declare) and bool(others)

    def _judge_wants(self, event: ev.Event, step: Step) -> None:
        """Nobody is refused for want of room before what others had given back was heard; and then he is answered.

        But for a declaration that a newer one takes the place of, and where a session has too much put aside.
        """
        world, session = self.world, getattr(event, "session", None)
        waiting = [one for one in self.waiting.before.values() if one.event.session == session]
        full = len(waiting) >= world.broker.books.rules.max_calls_per_session
        for effect in step.effects:
            if isinstance(effect, fx.Answer) and isinstance(effect.result, Denied):
                wants = effect.result.reason in (Reason.MODEL_LIMIT, Reason.TENANT_LIMIT, Reason.CAPACITY)
                heard = isinstance(event, ev.InputsDrained) and event.call == effect.call
                replaced = isinstance(event, ev.Declare) and event.call != effect.call
                waiter = self.waiting.before.get(effect.call)
                limited = effect.result.reason is not Reason.CAPACITY
                waited = waiter and waiter.deadline and (limited or waiter.deadline <= world.now)
                waited = waited or (limited and "waited_ms" in effect.result.numbers)  # it came with this step
                asked = waiter and self.recalls.is_asked(waiter.event.session, waiter.name, waiter.event.location)
                asked = asked or (getattr(event, "call", None) == effect.call and self.waiting.is_asked(event))
                assert heard or replaced or waited or asked or not wants or full, (
                    f"refused before the others were heard: {effect.result} {waiter}"
                )
                if wants and "model" in effect.result.numbers:
                    self.waiting.judge_refusal(event, effect)
            again = isinstance(event, ev.InputsDrained) and isinstance(effect, fx.DrainInputs)
            assert not again, "the inputs are drained twice"
            if isinstance(effect, fx.Answer) and isinstance(effect.result, fx.Reconciled):
                whose = {one.session for call, one in world.put_aside.items() if call in world.unanswered}
                taken_up = [
                    one.session for one in world.workers.values() if one.stated and one.stated.call == effect.call
                ]
                assert whose.isdisjoint(taken_up), "something is put aside of a session that was taken up again"

        answered = {effect.call for effect in step.effects if isinstance(effect, fx.Answer)}
        moved = {fact.session for fact in step.facts if isinstance(fact, ft.SessionMoved)}
        left = [one.event for call, one in world.broker.waiting._waiters.items() if call not in answered]
        assert moved.isdisjoint(one.session for one in left), "who has gone, or begins anew, is still to be decided"

    def _follow(self, step: Step) -> None:
        """Take down what limits and quotas are from now on."""
        for fact in step.facts:
            match fact:
                case ft.ModelBegan():
                    self.asked[fact.name] = dict(fact.limits)
                case ft.ModelAsked():
                    self.asked[fact.name].update(fact.limits)
                case ft.QuotaSet():
                    key = (fact.tenant, fact.model, fact.location)
                    self.quotas[key] = Quota(fact.limit, fact.guarantee, fact.weight)

    def _judge_fact(self, fact: ft.Fact) -> None:
        match fact:
            case ft.Debited():
                assert fact.first > self.last_id, "an id is used twice"
                self.last_id = fact.first + fact.count - 1
                self.owners.update(dict.fromkeys(range(fact.first, self.last_id + 1), fact.session))
                self._within_limits(fact.name, fact.location)
                size = fact.extent_bytes * fact.count
                self.guarantees.debited(fact.name, fact.location, size, fact.session)
            case ft.Credited():
                for extent in fact.ids:
                    assert self.owners.pop(extent) == fact.session, "an extent has two owners"
            case ft.DeclarationSet() if fact.declared_bytes:
                # Less may be declared above a limit that has shrunk; the world only declares sizes of its choosing.
                self._within_limits(fact.name, fact.location, less=True)
            case ft.SegmentBegan():
                assert fact.first > fact.segment > self.last_id, "an id is used twice"
                self.last_id = fact.first + fact.count - 1
                self._within_limits(fact.name, fact.location)
                size = fact.extent_bytes * (fact.count - 1) + fact.last_bytes
                self.guarantees.debited(fact.name, fact.location, size, None)
            case ft.SegmentEnded() if fact.proven is not None:
                self._settled(fact.segment, *self.deaths[fact.segment].charged, proven=fact.proven)
                del self.deaths[fact.segment]
            case ft.SessionBegan():
                assert fact.session > self.last_id, "an id is used twice"
                self.last_id = fact.session
                self.sessions += 1
            case ft.SessionEnded():
                self.deaths.pop(fact.session, None)
            case ft.LocationSettled():
                for extent in [one for one in self.deaths[fact.session].blocks[fact.location] if one > 0]:
                    self.owners.pop(extent, None)
                self._settled(fact.session, fact.location, proven=fact.proven)

    @once_a_step
    def set_for(self, key: QuotaKey) -> Quota:
        """Return what operators have set: as commanded, or else configured."""
        rules, quota = self.world.broker.books.rules, self.quotas.get(key, Quota())
        default = rules.default_limits.get(key[2]) if key[1] is None else None
        limit = rules.limits.get(key, default) if quota.limit is None else quota.limit
        return Quota(limit, rules.guarantees.get(key, 0) if quota.guarantee is None else quota.guarantee)

    def weight(self, key: QuotaKey) -> int:
        """Return the weight that operators have set: as commanded, or else configured, or else 1."""
        commanded = self.quotas.get(key, Quota()).weight
        return self.world.broker.books.rules.weights.get(key, 1) if commanded is None else commanded

    def _within_limits(self, name: ModelName, where: Location, *, less: bool = False) -> None:
        """No debit takes the model, the tenant or the location above what was asked, commanded or configured."""
        ledger = self.world.broker.ledger
        limits = [self.set_for((*name, where)).limit, self.asked[name].get(where)]
        used = ledger.models[name].charges[where].bytes
        whole = sum(row.charges[where].bytes for other, row in ledger.models.items() if other.tenant == name.tenant)
        bounds = [(used, limit) for limit in limits] + [(whole, self.set_for((name.tenant, None, where)).limit)]
        for charged, limit in bounds:
            assert limit is None or charged <= limit or less, f"{name} was debited to {charged}, above {limit}"

    # --- deaths ---

    def _died(self, row: SessionRow) -> None:
        world = self.world
        death = self._death({"device": set(), "host": set()})
        for extent, loan in row.extents.items():
            death.blocks[loan.location].add(extent)
        for where, block in world.workers[row.session].own.items():
            death.blocks[where].add(block)
        self.deaths[row.session] = death

    def _dropped(self, row: SegmentRow) -> None:
        self.deaths[row.segment] = death = self._death({row.location: set(row.ids)})
        death.since = min(death.since, self.drops.pop(row.segment, death.since))

    def drop_begins(self, segment: int) -> None:
        """The broker begins to close a segment: what falls from now on can be its memory."""
        self.drops[segment] = self._since()

    def _since(self) -> int:
        """Return the earliest moment of which a figure is in use."""
        return min([self.world.now - NOTICE_NS, *(read_at for _, read_at in self.audits)])

    def _death(self, blocks: dict[Location, set[int]]) -> Death:
        now = self.world.now
        return Death(now, self._since(), blocks, slack=2 if now - self.began_at <= NOTICE_NS else 1)

    # --- a successor ---

    def inherit(self, dead: Broker, *, torn: bool) -> None:
        """A daemon begins with the books on file: those of the dead one, but for what its last step did not write."""
        world, ledger = self.world, self.world.broker.ledger
        recount(ledger)
        for name in ("sessions", "models", "segments", "labels", "tenants", "turns", "quotas"):
            assert torn or getattr(ledger, name) == getattr(dead.ledger, name), f"other {name} are on file"
        self.judged += 1
        self.began_at = world.now
        self.owners = {extent: row.session for row in ledger.sessions.values() for extent in row.extents}
        self.quotas = dict(ledger.quotas)
        # The last step of the dead one is on file, and was not judged.
        self.asked = {name: {**row.limits, **self.asked.get(name, {})} for name, row in ledger.models.items()}
        self.audits.append((world.now, min(self.noted_at.values(), default=world.now)))
        for where, size in world.daemons.unmade.items():
            self.fell(where, size, "unmade", 0)
        for fact in world.daemons.torn_facts:
            if isinstance(fact, ft.DeclarationSet):
                self.fell(fact.location, fact.declared_bytes, "declaration", 0)
            if isinstance(fact, ft.ModelBegan):
                self.asked[fact.name] = dict(fact.limits)
        self._inherit_deaths()
        self.sharing.inherit(world.daemons.torn_facts)
        self.stock.inherit()
        self.resuming.inherit()
        self.recalls.inherit(dead, torn=torn)
        self.waiting.granted.clear()

    def _inherit_deaths(self) -> None:
        """Who was dead is dead, as of now; one may have died in the last step of all."""
        before, self.deaths = self.deaths, {}
        ledger = self.world.broker.ledger
        for row in [*ledger.sessions.values(), *ledger.segments.values()]:
            if row.state == "releasing" and isinstance(row, SessionRow):
                self._died(row)
            elif row.state == "releasing" and isinstance(row, SegmentRow):
                self._dropped(row)
        for owner, death in self.deaths.items():
            if owner in before:
                death.since, death.blocks = min(death.since, before[owner].since), before[owner].blocks

    def _settled(self, owner: int, where: Location, *, proven: bool) -> None:
        death = self.deaths[owner]
        charged = death.charged[where]
        if not charged:
            return
        if not proven:
            self.timed_out += 1
            return
        self.proven += 1
        blocks = death.blocks[where]
        held = sum(self.world.exists[block][1] for block in blocks if block in self.world.exists)
        if not held:
            return
        falls = [fall for fall in self.falls[where] if fall[0] >= death.since]
        fallen = sum(size for _, size, _, _ in falls)
        assert fallen > charged - death.slack * self.world.broker.books.rules.granularity, (
            f"{owner} was credited {charged} bytes as proven, {held} of it exist, and {fallen} fell"
        )
        kinds: Counter[str] = Counter()
        for _, size, why, block in falls:
            kinds[why] += size if block not in blocks else 0
        self.early[kinds.most_common(1)[0][0]] += 1

    # --- the end ---

    def at_the_end(self) -> None:
        """Everybody is gone: nothing is charged, nothing exists, nobody waits, and the facts tell the same books."""
        world = self.world
        broker = world.broker
        recount(broker.ledger)
        for where, total in broker.ledger.totals.items():
            assert (total.lent, total.releasing, total.free) == (0, 0, total.capacity), where
            assert broker.books.making[where] == 0
        assert not broker.ledger.sessions
        assert not broker.ledger.models
        assert not broker.ledger.tenants
        assert not broker.denials
        assert not broker.releasing.deaths
        assert not world.unanswered, "somebody waits for an answer"
        assert not world.workers
        assert not world.exists
        assert not self.owners
        assert not self.deaths
        self.sharing.at_the_end()
        self.stock.at_the_end()
        self.resuming.at_the_end()
        self.recalls.at_the_end()
        again = replay(broker.books.rules.capacities, world.facts)
        for name in ("revision", "totals", "sessions", "models", "segments", "labels", "tenants", "quotas"):
            assert getattr(again, name) == getattr(broker.ledger, name), f"the facts tell other {name}"

    def report(self) -> str:
        """Return what happened, in a line for each part. What is early is told by the largest fall beside it."""
        parts = (self.sharing, self.stock, self.resuming, self.guarantees, self.waiting, self.recalls)
        return "\n".join([super().report(), *(part.report() for part in parts)])
